"""SkipInit: the identity at the start, a scalar on the branch, and a variance that does not grow with depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from methods import loops
from thrifty.architecture import main_blocks
from thrifty.methods.initialization.skipinit import skipinit


def _stream(model: Any) -> list[torch.Tensor]:
    """The residual stream before the first block and after each one."""
    caught: list[torch.Tensor] = []
    blocks = list(main_blocks(model, "test"))
    first = blocks[0].register_forward_pre_hook(
        lambda m, a, k: caught.append(a[0] if a else k["hidden_states"]), with_kwargs=True
    )
    handles = [
        b.register_forward_hook(lambda m, i, o: caught.append(o[0] if isinstance(o, tuple) else o)) for b in blocks
    ]
    with torch.no_grad():
        model.eval()(**loops.batch(model))
    for handle in (first, *handles):
        handle.remove()
    return caught


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_stack_is_the_identity(family):
    model = tiny.FAMILIES[family](3)
    skipinit(model)
    stream = _stream(model)
    assert all(torch.equal(x, stream[0]) for x in stream)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_first_gradients_are_those_of_the_scalars_alone(family):
    model: Any = tiny.FAMILIES[family](2)
    settings = skipinit(model)
    model(**loops.batch(model)).loss.backward()
    for block in main_blocks(model, "test"):
        for name, p in block.named_parameters():
            if name.endswith("skipinit_scale"):
                assert p.grad is not None
                assert p.grad.abs() > 0
            else:
                assert p.grad is None or not p.grad.any(), name
    assert len(settings["branches"]) == 2


def test_each_branch_has_its_own_scalar_which_scales_the_branch():
    model: Any = tiny.gpt2(1)
    skipinit(model, alpha=1.0)
    block = model.transformer.h[0]
    x = torch.randn(2, 3, 16)
    full = block.mlp(x)
    with torch.no_grad():
        block.mlp.c_proj.skipinit_scale.fill_(0.25)
        torch.testing.assert_close(block.mlp(x), 0.25 * full)
        assert block.attn.c_proj.skipinit_scale.item() == 1.0


def test_one_over_the_root_of_the_depth_bounds_the_variance(tmp_path):
    """With branches of unit gain the stream's variance doubles at each; with 1 / sqrt(depth) it ends below e."""
    sizes = {}
    for alpha in (1.0, None):
        run = tiny.trainer(tmp_path, [{"skipinit": {"alpha": alpha}}], tiny.bert(8))
        model: Any = run.model
        with torch.no_grad():
            for block in main_blocks(model, "test"):
                block.intermediate.intermediate_act_fn = torch.nn.Identity()  # type: ignore[union-attr]
                for module in block.modules():
                    if isinstance(module, torch.nn.Linear):
                        torch.nn.init.orthogonal_(module.weight)
                        torch.nn.init.zeros_(module.bias)
        stream = _stream(model)
        sizes[alpha] = float(stream[-1].square().mean() / stream[0].square().mean())
    assert sizes[1.0] > 2**8
    assert 1.2 < sizes[None] < 2.72 * 1.5


def test_dropout_in_front_of_the_head(tmp_path):
    run = tiny.trainer(tmp_path, [{"skipinit": {"dropout": 0.5}}], tiny.llama())
    model: Any = run.model
    batch = {k: v for k, v in loops.batch(model).items() if k != "labels"}
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda m, i: seen.append(i[0]))
    model.train()(**batch)
    assert 0.3 < float((seen[0] == 0).float().mean()) < 0.7
    model.eval()(**batch)
    assert (seen[1] != 0).all()
