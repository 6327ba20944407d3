"""Weights in bf16: what is lost without compensation, what Kahan and chance give back; states stay float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.precision import bf16_pure
from thrifty.methods.precision.bf16_pure import PreciseUpdates, round_stochastically, to_bf16


def _thousand_small_updates(rounding: str, count: int = 1) -> torch.Tensor:
    p = torch.nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=1e-4)
    if rounding != "nearest":
        PreciseUpdates(optimizer, rounding)  # type: ignore[arg-type]
    for _ in range(1000):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    return p.detach().float()


def test_kahan_keeps_what_rounding_loses():
    """From 1.0, a thousand updates of 1e-4 make 1.1; bfloat16 alone never leaves 1.0."""
    assert _thousand_small_updates("nearest").item() == 1.0
    assert _thousand_small_updates("kahan").item() == pytest.approx(1.1, abs=2**-8)


def test_stochastic_rounding_is_right_on_average():
    found = _thousand_small_updates("stochastic", count=4000)
    assert found.mean().item() == pytest.approx(1.1, abs=2e-3)
    assert found.std() > 1e-3


def test_stochastic_rounding_of_single_values():
    value = 1 + 2**-8 * 0.25 + 2**-9  # between two neighbours 1 and 1 + 2**-7
    values = torch.full((200_000,), value)
    rounded = round_stochastically(values, torch.Generator().manual_seed(1)).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert rounded.mean().item() == pytest.approx(value, abs=5e-5)
    mirrored = round_stochastically(-values, torch.Generator().manual_seed(1)).float()
    assert torch.equal(mirrored, -rounded)
    special = torch.tensor([0.0, 3.0, float("inf"), float("-inf"), float("nan")])
    assert torch.equal(round_stochastically(special).isnan(), special.isnan())
    assert torch.equal(round_stochastically(special)[:4].float(), special[:4])


def test_kahan_follows_float32_within_its_sixteen_bits(monkeypatch):
    monkeypatch.setattr(bf16_pure, "PIECE", 40)  # several pieces a group
    generator = torch.Generator().manual_seed(3)
    shapes = [(7, 5), (4,), (6, 6), (3,)]
    start = [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]
    exact = [torch.nn.Parameter(w.clone()) for w in start]
    half = [torch.nn.Parameter(w.bfloat16()) for w in start]
    optimizers = [torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1) for p in (exact, half)]
    PreciseUpdates(optimizers[1])
    for _ in range(50):
        for p, q in zip(exact, half, strict=True):
            q.grad = torch.randn(p.shape, generator=generator).bfloat16()
            p.grad = q.grad.float()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(exact, half, strict=True):
        state = optimizers[1].state[q]
        assert q.dtype == state["compensation"].dtype == torch.bfloat16
        assert state["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(q.float() + state["compensation"].float(), p.detach(), rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(state["exp_avg"], optimizers[0].state[p]["exp_avg"])


def test_states_keep_their_types_when_they_are_loaded():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([p])
    PreciseUpdates(optimizer)
    p.grad = torch.full_like(p, 1 / 3)
    optimizer.step()
    wanted = {key: value.clone() for key, value in optimizer.state[p].items()}
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    PreciseUpdates(other)
    other.load_state_dict(optimizer.state_dict())
    (found,) = other.state.values()
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value)


def test_casts_weights_and_not_buffers():
    model = tiny.llama()
    frequencies = model.model.rotary_emb.inv_freq
    assert to_bf16(model) == sum(1 for _ in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert frequencies.dtype == model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
@pytest.mark.parametrize("family", ["gpt2", "bert", "vit"])
def test_families_learn_and_resume(tmp_path, family, rounding):
    build: Any = tiny.vit if family == "vit" else lambda: tiny.FAMILIES[family](dropout=0.1)
    run = loops.resumes(tmp_path, [{"bf16-pure": {"rounding": rounding}}], build, max_steps=3)
    assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
    states = [state["exp_avg"].dtype for state in run.ctx.optimizer.state.values()]
    assert set(states) == {torch.float32}


@pytest.mark.parametrize("optimizer", ["lion", "muon", "lamb", "adamw-anyprecision"])
def test_other_optimizers(tmp_path, optimizer):
    """Close to float32; an optimizer that compensates itself keeps its own buffers."""
    exact = tiny.trainer(tmp_path / "a", [optimizer], tiny.gpt2())
    half = tiny.trainer(tmp_path / "b", [optimizer, "bf16-pure"], tiny.gpt2())
    exact.train()
    half.train()
    assert tiny.losses(half) == pytest.approx(tiny.losses(exact), rel=0.02)
    assert {"compensation"} <= set.union(*[set(state) for state in half.ctx.optimizer.state.values()])


def test_the_model_is_saved_in_bf16(tmp_path):
    run = tiny.trainer(tmp_path / "run", ["bf16-pure"], max_steps=2)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    tiny.assert_same(tiny.weights(loaded), tiny.weights(run.model))


def test_own_loops_agree():
    def make() -> loops.Setup:
        model = tiny.bert()
        to_bf16(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        PreciseUpdates(optimizer)
        return loops.Setup(model, optimizer)

    loops.both_loops(make)


def test_the_planner_counts_half_weights_and_full_states(tmp_path, monkeypatch):
    from thrifty.planner.plan import estimate

    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    config = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
              "max_position_embeddings": 64}  # fmt: skip
    full, half = (estimate(config, device="a100", seq_len=16, methods=m) for m in ([], ["bf16-pure"]))
    assert half.breakdown["parameters"] == pytest.approx(full.breakdown["parameters"] / 2, rel=0.02)
    # Two float32 moments, and the compensation.
    assert half.breakdown["optimizer"] == pytest.approx(10 * full.parameters, rel=0.02)
    assert half.peak_allocated_bytes < full.peak_allocated_bytes


def test_refusals(tmp_path):
    for other in ("bf16", "fp16", "schedule-free"):
        with pytest.raises(InputError, match=other):
            Recipe.parse(["bf16-pure", other])
    with pytest.raises(NotApplicable, match="bf16"):
        tiny.trainer(tmp_path, ["bf16-pure"], bf16=True)
    with pytest.raises(InputError, match="rounding"):
        Recipe.parse([{"bf16-pure": {"rounding": "up"}}])
