"""SynFlow: flow is conserved, and no layer vanishes before all are down to their last paths."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CLIPConfig,
    CLIPModel,
    GPTNeoXConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import tiny
from thrifty import NotApplicable
from thrifty.architecture import branch_outputs, main_blocks
from thrifty.methods.sparsity.synflow import Flow, flow_scores, synflow_masks


def _chain(sizes: list[int]) -> tuple[dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    weights = {
        str(i): torch.randn(b, a, dtype=torch.float64).abs().requires_grad_()
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    }

    def flow() -> torch.Tensor:
        x = torch.ones(sizes[0], dtype=torch.float64)
        for w in weights.values():
            x = (w @ x).relu()
        return x.sum()

    return weights, flow


def test_scores_of_each_layer_sum_to_the_flow_and_units_pass_on_what_they_get():
    weights, flow = _chain([5, 8, 6, 3])
    scores = list(flow_scores(weights, flow).values())
    total = torch.ones(5, dtype=torch.float64)
    for w in weights.values():
        total = w.detach() @ total  # R = 1' prod |W| 1
    for score in scores:
        assert float(score.sum()) == pytest.approx(float(total.sum()), rel=1e-12)
    for before, after in itertools.pairwise(scores):
        torch.testing.assert_close(before.sum(1), after.sum(0), rtol=1e-12, atol=0)


def test_density_follows_the_ratio_and_masks_are_nested():
    weights, flow = _chain([20, 30, 20])
    seen: list[int] = []

    def watched() -> torch.Tensor:
        seen.append(sum(int((w != 0).sum()) for w in weights.values()))
        return flow()

    masks = synflow_masks(weights, watched, 0.9, iterations=5)
    assert [*seen, sum(int(m.sum()) for m in masks.values())] == [round(1200 * 0.1 ** (k / 5)) for k in range(6)]
    assert seen == sorted(seen, reverse=True)
    assert all(torch.equal(w != 0, masks[name]) for name, w in weights.items())


def test_no_layer_is_emptied_down_to_the_last_path():
    """A wide layer beside narrow ones: global pruning by magnitude empties it, SynFlow never does."""
    weights, flow = _chain([50, 100, 4, 60])
    size = sum(w.numel() for w in weights.values())
    masks = synflow_masks(weights, flow, 1 - 3.4 / size, iterations=100)
    assert [int(mask.sum()) for mask in masks.values()] == [1, 1, 1]
    assert float(flow().detach()) > 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_conserved_through_the_blocks_of_real_models(family):
    model = tiny.FAMILIES[family](3)
    own = tiny.weights(model)
    flow = Flow(model)
    r = float(flow().detach())
    scores = flow_scores(flow.weights, flow)
    prefix = main_blocks(model, "test").prefix
    for index, block in enumerate(main_blocks(model, "test")):
        ends = branch_outputs(block, "test")
        sums: dict[str, float] = {}
        for name, score in scores.items():
            if name.startswith(f"{prefix}.{index}."):
                inner = name.removeprefix(f"{prefix}.{index}.").removesuffix(".weight")
                stage = inner if inner in ends else ("attention" if "att" in inner else "ffn")
                sums[stage] = sums.get(stage, 0.0) + float(score.sum())
        assert len(sums) == 4
        assert all(value == pytest.approx(r, rel=1e-9) for value in sums.values())
    masks = synflow_masks(flow.weights, flow, 0.98, iterations=100)
    assert all(mask.any() for mask in masks.values())
    tiny.assert_same(tiny.weights(model), own)  # the model itself is untouched


def test_float64_carries_a_deep_stack():
    """Without keeping the flow in range, 60 blocks of large weights overflow."""
    model: Any = tiny.gpt2(60)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e4)
    flow = Flow(model)
    scores = flow_scores(flow.weights, flow)
    assert all(torch.isfinite(score).all() and score.any() for score in scores.values())


def test_refused_where_the_stand_in_is_not_a_chain():
    parallel = GPTNeoXConfig(vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                             num_attention_heads=4)  # fmt: skip
    with pytest.raises(NotApplicable, match=r"synflow: the flow through the blocks of GPTNeoX.* Fix: use snip"):
        Flow(AutoModelForCausalLM.from_config(parallel))
    two_sides = T5Config(vocab_size=97, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    with pytest.raises(NotApplicable, match=r"synflow"):
        Flow(T5ForConditionalGeneration(two_sides))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    towers = CLIPConfig(text_config=sizes, vision_config=sizes)
    with pytest.raises(NotApplicable, match=r"synflow runs one chain of blocks.* Fix: use snip"):
        Flow(CLIPModel(towers))
