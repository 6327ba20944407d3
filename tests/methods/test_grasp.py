"""GraSP: its scores are the change of the gradient's norm, by finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import tiny
from methods import loops
from thrifty import NotApplicable
from thrifty.methods.sparsity._masks import block_weights
from thrifty.methods.sparsity._samples import scoring, weighted_batches
from thrifty.methods.sparsity.grasp import grasp_scores


def _double(model: nn.Module) -> tuple[Any, dict[str, torch.Tensor]]:
    batch = loops.batch(model)
    return model.double().eval(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


@pytest.mark.parametrize("family", ["gpt2", "bert", "vit"])  # Llama's norms round to float32 inside
def test_scores_are_the_change_of_the_gradient_norm(family):
    """d/de |grad L((1 - e) w)|^2 = -2 w' H g, for the weights of one layer shrunk at a time."""
    model, batch = _double(tiny.FAMILIES[family]())
    parameters = block_weights(model, "test")
    scores = grasp_scores(model, parameters, [(batch, 1.0)], temperature=1.0)

    def norm(scales: dict[str, float]) -> float:
        moved = {n: (p.detach() * scales.get(n, 1.0)).requires_grad_() for n, p in parameters.items()}
        with scoring(model):
            loss = functional_call(model, moved, (), batch).loss
        return sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(moved.values())))

    step = 1e-3  # the loss of a causal model is computed in single precision
    for name in list(parameters)[:3] + list(parameters)[-1:]:
        change = (norm({name: 1 - step}) - norm({name: 1 + step})) / (2 * step)
        assert 2 * float(scores[name].sum()) == pytest.approx(change, rel=1e-3)


def test_the_temperature_softens_the_logits_and_goes_away():
    """With T, the loss is that of logits / T."""
    model, batch = _double(tiny.llama())
    parameters = block_weights(model, "test")
    before = model(**batch).logits
    soft = grasp_scores(model, parameters, [(batch, 1.0)], temperature=5.0)
    torch.testing.assert_close(model(**batch).logits, before)
    with torch.no_grad():
        model.lm_head.weight.div_(5.0)
    by_hand = grasp_scores(model, parameters, [(batch, 1.0)], temperature=1.0)
    for name in soft:
        torch.testing.assert_close(soft[name], by_hand[name], rtol=1e-5, atol=1e-12)


def test_batches_add_up_on_both_sides_of_the_product():
    """H and g are those of all samples: not a sum of each batch's own product."""
    model: Any = tiny.gpt2()
    parameters = block_weights(model, "test")
    whole = weighted_batches(model, list(loops.loader(model, count=4, size=4)))
    parts = weighted_batches(model, list(loops.loader(model, count=4, size=1)))
    one, many = (grasp_scores(model, parameters, batches) for batches in (whole, parts))
    for name in one:
        scale = float(one[name].abs().max())
        torch.testing.assert_close(one[name] / scale, many[name] / scale, rtol=0, atol=1e-3)


def test_the_largest_scores_are_removed(tmp_path):
    run = tiny.trainer(tmp_path, [{"grasp": {"sparsity": 0.5, "samples": 2}}])
    fresh: Any = tiny.llama()
    batches = weighted_batches(fresh, run.ctx.batches(1, fresh))
    scores = grasp_scores(fresh, block_weights(fresh, "test"), batches)
    masks = run.recipe["grasp"].weights.masks  # type: ignore[attr-defined]
    kept = max(float(scores[n][masks[n]].max()) for n in scores)
    removed = min(float(scores[n][~masks[n]].min()) for n in scores)
    assert kept <= removed


def test_refused_where_the_logits_are_not_found():
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

    model = Strange()
    with pytest.raises(NotApplicable, match=r"temperature.*Strange is not found.* Fix: set it to 1"):
        grasp_scores(model, dict(model.named_parameters()), [])
