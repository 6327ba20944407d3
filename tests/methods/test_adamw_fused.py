"""AdamW with few kernels: the same steps as parameter by parameter."""

from __future__ import annotations

import pytest
import torch

import tiny
from methods import loops
from thrifty import InputError, Recipe


@pytest.mark.parametrize(("kernels", "tolerance"), [("foreach", 0.0), ("fused", 1e-6)])
def test_twenty_steps_on_a_small_network(tmp_path, kernels, tolerance):
    """From the same gradients: foreach is the loop to the bit, fused to rounding."""
    results = []
    for methods in ([{"adamw": {"implementation": "loop"}}], [{"adamw-fused": {"kernels": kernels}}]):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        ctx = tiny.trainer(tmp_path, []).ctx
        groups = [{"params": list(model.parameters()), "names": ["a", "b", "c", "d"], "weight_decay": 0.1}]
        optimizer = Recipe.parse(methods).methods[0].build_optimizer(groups, ctx)
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        results.append(tiny.weights(model))
    tiny.assert_same(*results, atol=tolerance)


def test_trains_and_resumes_as_adamw(tmp_path):
    run = loops.resumes(tmp_path / "a", ["adamw-fused"], tiny.llama)
    assert run.ctx.optimizer.defaults["fused"] is True
    plain = tiny.trainer(tmp_path / "b", ["adamw"], tiny.llama(), max_steps=3)
    plain.train()
    assert tiny.losses(run) == tiny.losses(plain)


def test_refuses_other_kernels():
    with pytest.raises(InputError, match="kernels"):
        Recipe.parse([{"adamw-fused": {"kernels": "loop"}}])
