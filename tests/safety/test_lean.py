"""The parent's results without its idle work."""

from __future__ import annotations

import pytest
import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer

import tiny
from thrifty import _hf


@pytest.fixture
def trainer(tmp_path):
    run = tiny.trainer(tmp_path, (), tiny.llama(), max_steps=3)
    run.train()
    return run


def with_gradients(run, scale):
    generator = torch.Generator().manual_seed(3)
    for p in run.model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * scale
    run.model.lm_head.weight.grad = None
    return run.model


@pytest.mark.parametrize("scale", [1e-4, 3.0, float("nan")])
def test_clipping_is_the_parents(trainer, scale):
    theirs = transformers.Trainer._clip_grad_norm(trainer, with_gradients(trainer, scale))
    expected = [p.grad for p in trainer.model.parameters()]
    ours = trainer._clip_grad_norm(with_gradients(trainer, scale))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    for mine, other in zip((p.grad for p in trainer.model.parameters()), expected, strict=True):
        if other is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def test_close_to_the_limit_too(trainer):
    model = with_gradients(trainer, 1.0)
    norm = float(trainer._clip(list(model.parameters()), None))
    for limit in (norm, norm * (1 - 1e-7), norm * (1 + 1e-7), norm * 1.0005):
        trainer.args.max_grad_norm = limit
        transformers.Trainer._clip_grad_norm(trainer, with_gradients(trainer, 1.0))
        expected = [p.grad for p in model.parameters() if p.grad is not None]
        trainer._clip_grad_norm(with_gradients(trainer, 1.0))
        ours = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)), limit


def test_norm_without_clipping_is_the_parents(trainer):
    theirs = transformers.Trainer._get_grad_norm(trainer, with_gradients(trainer, 2.0))
    assert torch.equal(trainer._get_grad_norm(trainer.model), theirs)


def test_flops_are_the_parents_also_for_another_model(trainer):
    for model in (trainer.model, tiny.llama(layers=3)):
        trainer.model = model
        for rows, length in ((2, 8), (1, 5)):
            inputs = {"input_ids": torch.zeros(rows, length, dtype=torch.long)}
            assert trainer.floating_point_ops(inputs) == transformers.Trainer.floating_point_ops(trainer, inputs) > 0
    assert trainer.floating_point_ops({"pixel_values": torch.zeros(1)}) == 0


def test_step_is_shortened_only_where_nothing_is_lost(trainer):
    assert isinstance(trainer.optimizer, _hf.ShortStep)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    scaled = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.5), scaler=torch.amp.GradScaler("cpu"))
    _hf.shorten_step(scaled)
    assert type(scaled) is AcceleratedOptimizer
    short = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.5))
    _hf.shorten_step(short)
    short.gradient_state._set_sync_gradients(False)
    short.step()
    assert torch.equal(weight, torch.ones(2)), "gradients are still being accumulated"
    short.gradient_state._set_sync_gradients(True)
    short.step()
    assert torch.equal(weight, torch.full((2,), 0.5))
