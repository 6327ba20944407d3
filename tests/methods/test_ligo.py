"""LiGO: one-hot maps are stacking and Net2Net; learning lowers the loss; what is made equals what was learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.architecture import copy_layer
from thrifty.methods.growth._grow import build
from thrifty.methods.growth._width import narrowed
from thrifty.methods.growth.ligo import GrowthOperator, instantiate, learn
from thrifty.methods.growth.net2net import net2net
from thrifty.methods.growth.stacking import stack

GROWING = {"ligo": {"at": 0.34, "steps": 2}}


def _pair(family: str, width: float, layers: int, depth: int = 2, **overrides: Any) -> tuple[Any, Any]:
    full = tiny.FAMILIES[family](depth, **overrides)
    small = build(full, narrowed(full.config, width, layers, "test"))
    with torch.no_grad():
        rng = torch.Generator().manual_seed(1)
        for p in small.parameters():
            p.add_(torch.randn(p.shape, generator=rng) * 0.1)
    return small, full


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_hot_maps_are_net2net(family):
    small, full = _pair(family, 0.5, 2)
    instantiate(GrowthOperator(small, full, noise=0.0), small, full)
    other = build(full, full.config)
    net2net(small, other)
    tiny.assert_same(tiny.weights(full), tiny.weights(other), atol=1e-6)


def test_one_hot_maps_are_net2net_with_a_tied_head():
    small, full = _pair("llama", 0.5, 2, tie_word_embeddings=True)
    instantiate(GrowthOperator(small, full, noise=0.0), small, full)
    inputs = loops.batch(full)
    torch.testing.assert_close(full.eval()(**inputs).logits, small.eval()(**inputs).logits, rtol=0, atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_one_hot_mixtures_are_stacking(family):
    small, full = _pair(family, 1.0, 2, depth=4)
    instantiate(GrowthOperator(small, full, noise=0.0), small, full)
    stacked = copy_layer(small)
    stack(stacked, 4)
    tiny.assert_same(tiny.weights(full), tiny.weights(stacked))


def test_number_of_learned_scalars():
    """Hidden and heads 8 to 16 (one matrix), keys 4 to 8, feed-forward 16 to 32; 9 parameters a block, 2 x 1 each."""
    small, full = _pair("llama", 0.5, 1)
    count = sum(p.numel() for p in GrowthOperator(small, full).parameters())
    assert count == 8 * 8 + 4 * 4 + 16 * 16 + 9 * 2 * 1


def test_learning_lowers_the_loss_and_is_what_the_model_gets():
    small, full = _pair("llama", 0.5, 1)
    operator = GrowthOperator(small, full)
    batch = loops.batch(full, size=8)
    before = tiny.weights(small)
    losses = learn(operator, small, full, [batch], steps=40, lr=0.05)
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.02
    instantiate(operator, small, full)
    functional = functional_call(full, operator(dict(small.named_parameters())), kwargs=batch).loss
    torch.testing.assert_close(full(**batch).loss, functional)
    tiny.assert_same(tiny.weights(small), before)


@pytest.mark.parametrize(("family", "step"), [(family, 2) for family in tiny.FAMILIES])
def test_trains_grows_and_resumes(tmp_path, family, step):
    run = loops.resumes(tmp_path, [GROWING], lambda: tiny.FAMILIES[family](2), max_steps=5, step=step)
    shapes = {n: p.shape for n, p in run.model.named_parameters()}
    assert shapes == {n: p.shape for n, p in tiny.FAMILIES[family](2).named_parameters()}


def test_random_state_and_data_position_stay(tmp_path):
    """With dropout on, learning the maps draws random numbers; the run after it must not notice how many."""
    results = []
    for steps in (0, 3):
        method = {"ligo": {"at": 0.5, "steps": steps, "lr": 1e-30}}
        run = tiny.trainer(tmp_path / str(steps), [method], tiny.llama(dropout=0.1), max_steps=4)
        run.train()
        results.append(tiny.losses(run))
    assert results[0] == results[1]


def test_in_ones_own_loop():
    model = tiny.llama(2)
    small = build(model, narrowed(model.config, 0.5, 1, "test"))
    losses = loops.plain_loop(loops.Setup(small, torch.optim.AdamW(small.parameters(), lr=1e-2)))
    operator = GrowthOperator(small, model)
    learn(operator, small, model, loops.loader(model), steps=3)
    instantiate(operator, small, model)
    losses += loops.accelerate_loop(loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    assert all(torch.isfinite(torch.tensor(losses)))
    assert isinstance(operator, nn.Module)


def test_refused(tmp_path):
    with pytest.raises(NotApplicable, match="nothing to grow"):
        tiny.trainer(tmp_path, [{"ligo": {"width": 1.0, "start_layers": 2}}])
    for settings in ({"steps": -1}, {"lr": 0.0}, {"noise": -0.1}):
        with pytest.raises(InputError, match=next(iter(settings))):
            Recipe.parse([{"ligo": settings}])
