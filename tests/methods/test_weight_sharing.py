"""Weight sharing: parameters do not grow with depth, gradients are those of all layers together, saved as plain."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.architecture import main_blocks
from thrifty.methods.sharing.weight_sharing import group_of, separate, share_weights

FAMILIES = ["llama", "gpt2", "bert", "vit"]


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_do_not_depend_on_depth_and_operations_do(family):
    counts, flops = [], []
    for layers in (2, 4):
        model = tiny.FAMILIES[family](layers)
        share_weights(model)
        counts.append(_count(model))
        with FlopCounterMode(display=False) as counter:
            model(**loops.batch(model))
        flops.append(counter.get_total_flops())
        plain = tiny.FAMILIES[family](layers)
        with FlopCounterMode(display=False) as counter:
            plain(**loops.batch(plain))
        assert counter.get_total_flops() == flops[-1]
    assert counts[0] == counts[1]
    assert flops[1] > 1.4 * flops[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_are_the_sums_of_those_of_separate_copies(family, groups):
    shared = tiny.FAMILIES[family](4)
    tied = share_weights(shared, groups=groups)
    copied = copy.deepcopy(shared)
    separate(copied, tied)
    assert _count(copied) > _count(shared)
    batch = loops.batch(shared)
    losses = [model.train()(**batch).loss for model in (shared, copied)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    grads = {name: p.grad.clone() for name, p in copied.named_parameters() if p.grad is not None}
    for name, leader in tied.items():
        grads[leader] += grads.pop(name)
    for name, p in shared.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, grads[name], rtol=1e-4, atol=1e-6)


def test_groups_and_kinds():
    assert [group_of(i, 12, 3) for i in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    for share in ("attention", "feed_forward"):
        model = tiny.bert(4)
        tied = share_weights(model, groups=2, share=share)
        assert {("attention" in name) for name in tied} == {share == "attention"}
        layers = list(main_blocks(model, "test"))
        same = [layers[0].attention.self.query.weight is layer.attention.self.query.weight for layer in layers]
        assert same == [True, share == "attention", False, False]
    both = tiny.bert(4)
    union = (
        share_weights(both, groups=2, share="attention").keys()
        | share_weights(both, groups=2, share="feed_forward").keys()
    )
    assert union == share_weights(tiny.bert(4), groups=2).keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_resumes_and_stays_shared(tmp_path, family):
    seen: list[int] = []

    def watch(run: Any) -> Any:
        seen.append(_count(run.model))
        return loops.LastStep([])

    build = (lambda: tiny.vit(4)) if family == "vit" else (lambda: tiny.FAMILIES[family](4, dropout=0.1))
    run = loops.resumes(tmp_path, ["weight-sharing"], build, watch=watch)
    assert seen[0] < _count(run.model) == _count(build())
    first, *others = main_blocks(run.model, "test")
    for layer in others:
        tiny.assert_same(tiny.weights(layer), tiny.weights(first))


def test_a_checkpoint_loads_as_the_plain_architecture(tmp_path):
    run = tiny.trainer(tmp_path, ["weight-sharing"], tiny.gpt2(3), max_steps=2, save_strategy="steps", save_steps=2)
    run.train()
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2", output_loading_info=True)
    assert not report["missing_keys"]
    tiny.assert_same(tiny.weights(loaded), tiny.weights(run.model))


def test_what_is_folded_into_a_layer_is_folded_once(tmp_path):
    """LayerScale's own factors go into separate weights: the logits stay those of training."""
    methods = ["weight-sharing", {"layerscale": dict(Recipe.parse(["layerscale"])["layerscale"].spec.preset)}]
    run = tiny.trainer(tmp_path, methods, tiny.llama(3), max_steps=2)
    finish, logits = run.finish, []
    ids = torch.arange(3, 11)[None]

    def watched() -> None:
        with torch.no_grad():
            logits.append(run.model.eval()(input_ids=ids).logits)
        finish()

    run.finish = watched  # type: ignore[method-assign]
    run.train()
    with torch.no_grad():
        torch.testing.assert_close(run.model.eval()(input_ids=ids).logits, logits[0], rtol=1e-4, atol=1e-5)


def test_own_loops_agree():
    def make() -> loops.Setup:
        model = tiny.llama(3)
        share_weights(model)
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    loops.both_loops(make)


def test_the_planner_counts_shared_weights_once(tmp_path, monkeypatch):
    from thrifty.planner.plan import estimate

    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    config = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
              "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
              "max_position_embeddings": 64}  # fmt: skip
    full, shared = (estimate(config, device="t4", seq_len=16, methods=m) for m in ([], ["weight-sharing"]))
    assert shared.parameters < full.parameters / 5
    assert shared.peak_allocated_bytes < full.peak_allocated_bytes
    assert shared.model_flops == pytest.approx(full.model_flops, rel=0.01)


def test_refusals():
    with pytest.raises(NotApplicable, match="share nothing"):
        share_weights(tiny.llama(2), groups=2)
    with pytest.raises(NotApplicable, match="stack of equal blocks"):
        share_weights(nn.Linear(2, 2))
    for other in ("lora", "stacking", "rigl"):
        with pytest.raises(InputError, match=other):
            Recipe.parse(["weight-sharing", other])
    with pytest.raises(InputError, match="groups"):
        Recipe.parse([{"weight-sharing": {"groups": 0}}])
