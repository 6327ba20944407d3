"""Early-bird tickets: the detector, what is cut, that cutting equals a zero coefficient, and what is saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    GPTNeoXConfig,
    TrainerCallback,
)

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.sparsity.early_bird import Detector, Slimming, choose, mask_distance

AUTOS: dict[str, Any] = {
    "llama": AutoModelForCausalLM,
    "gpt2": AutoModelForCausalLM,
    "bert": AutoModelForMaskedLM,
    "vit": AutoModelForImageClassification,
}


@pytest.fixture(autouse=True)
def _modules_of_written_code(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def _logits(model: Any) -> torch.Tensor:
    inputs = {key: value for key, value in loops.batch(model).items() if key != "labels"}
    with torch.no_grad():
        return model.eval()(**inputs).logits


def _first(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# --- when a ticket is drawn, and which ---


def test_distance_of_masks():
    """Of n places two masks keep k each, o of them in common: 2 (k - o) / n."""
    first, second = torch.zeros(10, dtype=torch.bool), torch.zeros(10, dtype=torch.bool)
    first[:4] = True
    second[3:7] = True
    assert mask_distance(first, second) == pytest.approx(2 * (4 - 1) / 10)
    assert mask_distance(first, first) == 0


def test_fires_at_the_first_mask_that_is_close_to_five():
    stable = torch.arange(20) < 10
    moving = [torch.roll(stable, 7), torch.roll(stable, 3)]
    near = stable.clone()
    near[0], near[19] = False, True  # distance 0.1 from the stable one
    detector = Detector(epsilon=0.11)
    assert [detector(mask) for mask in [*moving, *[stable] * 4, near, near]] == [False] * 7 + [True]
    strict = Detector(epsilon=0.1)
    assert [strict(mask) for mask in [*[stable] * 5, near, *[near] * 5, near]] == [False] * 10 + [True] * 2
    assert [Detector(length=1)(stable)] == [False]  # nothing to compare with yet


def test_heads_by_layer_and_units_over_all_layers():
    heads = [torch.tensor([1.0, 0.2, -0.9]), torch.tensor([0.1, 0.05, 0.01])]
    units = [torch.tensor([1.0, 0.9, -0.8, 0.7, 0.6]), torch.tensor([0.5, 0.4, 0.3, 0.2, 0.1])]
    keep = choose(heads, units, 1 / 3, 0.4)
    assert keep == [([0, 2], [0, 1, 2, 3, 4]), ([0, 1], [0])]
    assert choose(heads, units, 1 / 3, 0.4, "layer") == [([0, 2], [0, 1, 2]), ([0, 1], [0, 1, 2])]
    assert choose(heads, units, 0.9, 0.9)[1] == ([0], [0])  # at least one of each stays
    assert choose(heads, units, 0.0, 0.0) == [([0, 1, 2], [0, 1, 2, 3, 4])] * 2


# --- coefficients and cutting ---


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_coefficients_of_one_change_nothing_and_cutting_equals_zeros(family):
    model: Any = tiny.FAMILIES[family](2).double()
    plain = _logits(model)
    slimming = Slimming(model)
    torch.testing.assert_close(_logits(model), plain, rtol=0, atol=1e-12)
    heads, units = slimming.coefficients(model)
    torch.manual_seed(3)
    for c in (*heads, *units):
        c.copy_(torch.rand_like(c) + 0.5)
    keep = choose(heads, units, 0.5, 0.4)
    for (kept_heads, kept_units), h, u in zip(keep, heads, units, strict=True):
        for c, kept in ((h, kept_heads), (u, kept_units)):
            c[[i for i in range(len(c)) if i not in kept]] = 0.0
    expected = _logits(model)
    assert not torch.allclose(expected, plain)
    with slimming.folded(model):
        torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-12)
    before = sum(p.numel() for p in model.parameters())
    slimming.draw(model, keep)
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-12)

    # The number of parameters, counted by hand from the shapes.
    block: Any = slimming.outputs(model)[0][0]
    hidden, parts = 16, slimming.parts
    gone_units = sum(parts["units"] - len(u) for _, u in keep)
    gone_heads = sum(parts["heads"] - len(h) for h, _ in keep)
    a_unit = {"llama": 3 * hidden, "gpt2": 2 * hidden + 1, "bert": 2 * hidden + 1, "vit": 2 * hidden + 1}[family]
    # A head has 4 dimensions; Llama's come in groups of two queries (8) with a key and a value (4 each).
    a_head = {"llama": hidden * (8 + 4 + 4 + 8)}.get(family, hidden * 16 + 3 * 4)
    slims = 2 * (parts["units"] + parts["heads"])
    after = sum(p.numel() for p in model.parameters())
    assert before - slims - after == gone_units * a_unit + gone_heads * a_head
    assert block.weight.requires_grad


def test_back_to_the_first_weights():
    model = tiny.bert()
    first = _first(model)
    slimming = Slimming(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    keep = [([0, 3], [1, 2, 30])] * 2
    slimming.draw(model, keep, first)
    after = _first(model)
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    assert torch.equal(after[name], first[name][[1, 2, 30]])
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(after[name], first[name][[0, 1, 2, 3, 12, 13, 14, 15]])
    assert torch.equal(after["bert.embeddings.word_embeddings.weight"], first["bert.embeddings.word_embeddings.weight"])


def test_really_cheaper_by_counted_operations():
    model: Any = tiny.llama()
    inputs = {"input_ids": torch.arange(3, 11)[None]}

    def operations() -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.model(**inputs)
        return counter.get_total_flops()

    before, slimming = operations(), Slimming(model)
    slimming.draw(model, [([0], list(range(8)))] * 2)
    # Of a layer's 16 x (48 + 96) weights, half of the attention's and a quarter of the others are left.
    tokens, weights_before, weights_after = 8, 2 * 16 * (48 + 96), 2 * 16 * (24 + 24)
    assert before - operations() >= 2 * tokens * (weights_before - weights_after)


def test_penalty_is_the_gradient_of_l1():
    model: Any = tiny.gpt2()
    slimming = Slimming(model)
    heads, units = slimming.coefficients(model)
    heads[0][1], units[1][5] = -0.5, 0.0
    model(**loops.batch(model)).loss.backward()
    before = [m.slimming.grad.clone() for pair in slimming.outputs(model) for m in pair]
    slimming.pull(model, 0.25)
    for module, old in zip([m for pair in slimming.outputs(model) for m in pair], before, strict=True):
        torch.testing.assert_close(module.slimming.grad - old, 0.25 * module.slimming.sign())


def test_own_loops_agree_and_act():
    def make() -> loops.Setup:
        model = tiny.gpt2()
        slimming = Slimming(model)
        return loops.Setup(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            after_backward=lambda step: slimming.pull(model, 1e-3),
        )

    setup, losses = loops.both_loops(make)
    assert losses[0] == pytest.approx(loops.baseline(tiny.gpt2)[1][0], rel=1e-6)
    assert all("slimming" not in n or (p != 1).all() for n, p in setup.model.named_parameters())


# --- in the trainer ---


class Shapes(TrainerCallback):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.sizes.append(sum(p.numel() for p in kwargs["model"].parameters()))


@pytest.mark.parametrize(
    ("family", "scope"),
    [("llama", "layer"), ("gpt2", "global"), ("gpt2", "layer"), ("bert", "global"), ("vit", "layer")],
)
def test_trains_resumes_and_loads(tmp_path, family, scope):
    build = tiny.FAMILIES[family]
    method = {"early-bird": {"every": 1, "latest": 0.5, "unit_scope": scope, "head_fraction": 0.5}}
    run = loops.resumes(tmp_path, [method], build, max_steps=4, step=3)
    bird = run.recipe["early-bird"]
    assert bird.drawn_at == 2
    assert bird.plain is (scope == "layer" and family in ("llama", "vit"))
    assert sum(p.numel() for p in run.model.parameters()) < sum(p.numel() for p in build().parameters())
    run.save_model(str(tmp_path / "saved"))
    trust = bird.saves_as == "remote_code"
    loaded = AUTOS[family].from_pretrained(tmp_path / "saved", trust_remote_code=trust)
    torch.testing.assert_close(_logits(loaded), _logits(run.model), rtol=1e-5, atol=1e-6)
    if trust:
        with pytest.raises(ValueError, match="trust_remote_code"):
            AUTOS[family].from_pretrained(tmp_path / "saved", trust_remote_code=False)


@pytest.mark.parametrize("step", [1, 2])
def test_resumes_before_and_at_the_drawing(tmp_path, step):
    method = {"early-bird": {"every": 1, "latest": 0.5, "rewind": step == 1}}
    loops.resumes(tmp_path, [method], lambda: tiny.llama(dropout=0.1), max_steps=4, step=step)


def test_only_units_of_equal_number_are_said_by_all_configurations(tmp_path):
    method = {"early-bird": {"every": 1, "latest": 0.5, "unit_scope": "layer", "head_fraction": 0.0}}
    for family in ("gpt2", "bert"):
        run = tiny.trainer(tmp_path / family, [method], tiny.FAMILIES[family](), max_steps=2)
        run.train()
        assert run.recipe["early-bird"].saves_as == "plain", family
        run.save_model(str(tmp_path / family / "saved"))
        loaded = AUTOS[family].from_pretrained(tmp_path / family / "saved")
        torch.testing.assert_close(_logits(loaded), _logits(run.model), rtol=1e-5, atol=1e-6)


def test_draws_when_the_ticket_has_settled(tmp_path):
    run = tiny.trainer(
        tmp_path, [{"early-bird": {"every": 1, "latest": 0.9, "epsilon": 0.3}}], max_steps=12, learning_rate=1e-3
    )
    run.add_callback(shapes := Shapes())
    run.train()
    drawn = run.recipe["early-bird"].drawn_at  # type: ignore[attr-defined]
    assert 6 <= drawn < 11  # five masks to compare with, and before the last moment
    assert len(set(shapes.sizes[: drawn - 1])) == 1
    assert shapes.sizes[-1] < shapes.sizes[0]


def test_a_checkpoint_of_the_search_loads_by_its_own_code_and_a_save_is_plain(tmp_path):
    method = {"early-bird": {"every": 1, "latest": 0.7}}
    run = tiny.trainer(tmp_path, [method], tiny.gpt2(), max_steps=4, save_strategy="steps", save_steps=1)
    saved: list[torch.Tensor] = []

    class Save(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                run.save_model(str(tmp_path / "between"))
                saved.append(_logits(copy.deepcopy(run.model)))

    run.add_callback(Save())
    run.train()
    between = AutoModelForCausalLM.from_pretrained(tmp_path / "between", trust_remote_code=False)
    torch.testing.assert_close(_logits(between), saved[0], rtol=1e-5, atol=1e-6)
    checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1", trust_remote_code=True)
    torch.testing.assert_close(_logits(checkpoint), saved[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1", trust_remote_code=False)


def test_the_best_checkpoint_may_be_from_before_the_drawing(tmp_path):
    run = tiny.trainer(
        tmp_path, [{"early-bird": {"every": 1, "latest": 0.5, "rewind": False}}], tiny.gpt2(), max_steps=4,
        save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
        greater_is_better=True,  # then the first is the best
    )  # fmt: skip
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-1")
    run.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    torch.testing.assert_close(_logits(loaded), _logits(run.model), rtol=1e-5, atol=1e-6)


def test_refused_before_training(tmp_path):
    config = GPTNeoXConfig(vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                           num_attention_heads=4)  # fmt: skip
    with pytest.raises(NotApplicable, match=r"early-bird cuts heads out of attention.*query_key_value.* Fix: use"):
        tiny.trainer(tmp_path, ["early-bird"], AutoModelForCausalLM.from_config(config))
    with pytest.raises(NotApplicable, match="none left for the ticket"):
        tiny.trainer(tmp_path, ["early-bird"], max_steps=1)


@pytest.mark.parametrize(
    "setting",
    [
        {"head_fraction": 1.0},
        {"unit_fraction": -0.1},
        {"unit_scope": "no"},
        {"l1": -1.0},
        {"every": 0},
        {"epsilon": 0.0},
        {"latest": 1.0},
    ],
)
def test_bad_settings(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Recipe.parse([{"early-bird": setting}])
