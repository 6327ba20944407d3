"""Dropout drawn several numbers at a time: what it drops, where it stands in, and that a run of it resumes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty.methods._dropout import kept, use_lean_dropout


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
def test_dropout_drops_what_it_should_and_keeps_the_mean(p):
    torch.manual_seed(0)
    count = 200_001
    factors = kept(count, p, torch.float64, torch.device("cpu"))
    dropped = (factors == 0).double().mean().item()
    assert factors.shape == (count,)
    assert dropped == pytest.approx(p, abs=5 * (p * (1 - p) / count) ** 0.5 + 2**-16)
    assert set(factors.unique().tolist()) <= {0.0, 2**16 / (2**16 - round(p * 2**16))}
    # Four numbers come from one word of the generator: no two of them may go together.
    signs = factors[: count - 1].view(-1, 4).sign()
    if 0 < p < 0.9:
        assert (torch.corrcoef(signs.T) - torch.eye(4)).abs().max() < 0.03
    torch.manual_seed(0)
    assert torch.equal(kept(count, p, torch.float64, torch.device("cpu")), factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_drops_the_same_forward_and_backward(dtype: torch.dtype) -> None:
    module = nn.Dropout(0.25)
    assert use_lean_dropout(module) == 1
    assert use_lean_dropout(module) == 0
    x = torch.ones(200, 300, dtype=dtype, requires_grad=True)
    out = module(x)
    out.backward(torch.ones_like(out))
    assert out.dtype == dtype
    assert torch.equal(out, x.grad)
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert out.float().mean().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(module.eval()(x), x)


def test_what_is_left_alone() -> None:
    class Own(nn.Dropout):
        pass

    modules = nn.ModuleList([nn.Dropout(0.0), nn.Dropout(1.0), nn.Dropout(0.5, inplace=True), Own(0.5), nn.Dropout1d()])
    assert use_lean_dropout(modules) == 0
    ids = torch.tensor([[1, 2]])
    module = nn.Dropout(0.5)
    use_lean_dropout(module)
    with pytest.raises(RuntimeError):  # as PyTorch's own says of whole numbers
        module(ids)
    copied = copy.deepcopy(module).eval()
    assert torch.equal(copied(torch.ones(9)), torch.ones(9))
    assert module.training


def test_an_encoder_trains_with_it_and_resumes(tmp_path) -> None:
    def build() -> nn.Module:
        return tiny.bert(dropout=0.3)

    whole = loops.resumes(tmp_path, ["lean-kernels"], build)
    again = tiny.trainer(tmp_path / "twice", ["lean-kernels", "gradient-checkpointing"], build(), max_steps=3)
    again.train()  # computes layers again, with the same numbers
    assert tiny.losses(again) == pytest.approx(tiny.losses(whole), rel=1e-5)
    plain = tiny.trainer(tmp_path / "plain", [], build(), max_steps=3)
    plain.train()
    assert tiny.losses(plain) != tiny.losses(whole)
