"""SNIP: its scores are gradients with respect to masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import tiny
from methods import loops
from thrifty.methods.sparsity._masks import block_weights
from thrifty.methods.sparsity._samples import weighted_batches
from thrifty.methods.sparsity.snip import snip_scores


class Out:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Mlp(nn.Module):
    """Two layers with a ReLU between them, in the shape the scorer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7, bias=False), nn.Linear(7, 2, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Out:
        return Out((self.second(self.first(x).relu()) - y).square().mean())


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_equal_the_gradient_with_respect_to_an_explicit_mask(family):
    model: Any = tiny.FAMILIES[family]().double().eval()
    batch = loops.batch(model)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    parameters = block_weights(model, "test")
    masks = {name: torch.ones_like(p, requires_grad=True) for name, p in parameters.items()}
    loss = functional_call(model, {n: p.detach() * masks[n] for n, p in parameters.items()}, (), batch).loss
    expected = [g.abs() for g in torch.autograd.grad(loss, list(masks.values()))]
    norm = sum(float(g.sum()) for g in expected)
    scores = snip_scores(model, parameters, [(batch, 1.0)])
    assert sum(float(s.sum()) for s in scores.values()) == pytest.approx(1.0)
    for got, want in zip(scores.values(), expected, strict=True):
        torch.testing.assert_close(got, want / norm, rtol=1e-4, atol=1e-9)


def test_signed_gradients_add_before_the_absolute_value():
    model: Any = tiny.llama()
    parameters = block_weights(model, "test")
    whole = next(iter(loops.loader(model, count=4, size=4)))
    parts = weighted_batches(model, list(loops.loader(model, count=4, size=1)))
    assert sum(share for _, share in parts) == pytest.approx(1.0)
    assert len({share for _, share in parts}) > 1  # by the number of labels
    one = snip_scores(model, parameters, weighted_batches(model, [whole]))
    many = snip_scores(model, parameters, parts)
    for name in one:
        torch.testing.assert_close(one[name], many[name], rtol=1e-3, atol=1e-9)


def test_scores_do_not_see_scales_that_cancel():
    torch.manual_seed(0)
    model = Mlp()
    batch = {"x": torch.randn(6, 5), "y": torch.randn(6, 2)}
    before = snip_scores(model, _parameters(model), [(batch, 1.0)])
    with torch.no_grad():
        model.first.weight.mul_(3.0)
        model.second.weight.div_(3.0)
    after = snip_scores(model, _parameters(model), [(batch, 1.0)])
    for name in before:
        torch.testing.assert_close(after[name], before[name])


def test_closed_form_of_a_linear_model():
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[1.0, -2.0, 0.5]]))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Out:
            return Out((x @ self.weight.T - y).square().mean())

    x, y = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]]), torch.tensor([[1.0], [2.0]])
    # d/dw mean (xw - y)^2 = mean 2 (xw - y) x, with residuals -2.5 and -4.5
    gradient = torch.tensor([[-2.5 * 1, -2.5 * 2 - 4.5 * 1, -2.5 * 3 + 4.5 * 1]])
    want = (gradient * torch.tensor([[1.0, -2.0, 0.5]])).abs()
    model = Linear()
    scores = snip_scores(model, _parameters(model), [({"x": x, "y": y}, 1.0)])
    torch.testing.assert_close(scores["weight"], want / want.sum())


def test_leaves_the_model_as_it_was():
    model: Any = tiny.gpt2(dropout=0.3).train()
    before, cache = tiny.weights(model), model.config.use_cache
    snip_scores(model, block_weights(model, "test"), [(loops.batch(model), 1.0)])
    tiny.assert_same(tiny.weights(model), before)
    assert model.training
    assert model.config.use_cache is cache
    assert all(p.grad is None for p in model.parameters())
