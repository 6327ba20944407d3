"""Hand-written kernels against transformers' own, in values, gradients, memory and reach."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd import gradcheck
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

import tiny
from thrifty.errors import NotApplicable
from thrifty.methods.compilation.lean_kernels import LeanKernels, rms_norm, rotate, use_lean_kernels


def rotation(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(2, 5, 4, dtype=dtype).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def test_their_gradients_are_right() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    assert gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x.requires_grad_(), weight.requires_grad_()), atol=1e-3)
    q = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = rotation(torch.float64)
    assert gradcheck(lambda a: rotate(a, a, cos, sin)[0], (q,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_compute_what_transformers_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    norm = LlamaRMSNorm(32).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(3, 7, 32, dtype=dtype)
    torch.testing.assert_close(rms_norm(x, norm.weight, 1e-6), norm(x), **tolerance)
    q, k = torch.randn(2, 4, 5, 8, dtype=dtype), torch.randn(2, 2, 5, 8, dtype=dtype)
    cos, sin = (part.to(dtype) for part in rotation())
    for ours, theirs in zip(rotate(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


def run(model: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients, and the bytes that were kept for the backward pass."""
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    ids = torch.arange(24).reshape(2, 12) % 7
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, sum(kept.values())


def test_a_llama_trains_as_before_and_keeps_less() -> None:
    plain = tiny.llama()
    lean = copy.deepcopy(plain)
    assert use_lean_kernels(lean) == (5, 2)
    assert use_lean_kernels(lean) == (0, 0)  # nothing is replaced twice
    before, after = run(plain), run(lean)
    assert after[0] == pytest.approx(before[0], rel=1e-6)
    for name, gradient in before[1].items():
        torch.testing.assert_close(after[1][name], gradient, rtol=1e-4, atol=1e-6)
    assert after[2] < 0.95 * before[2]
    assert copy.deepcopy(lean).model.norm.forward.__self__ is not lean.model.norm  # a copy uses its own weights


def test_only_what_computes_the_same_is_replaced() -> None:
    assert use_lean_kernels(torch.nn.Sequential(LlamaRMSNorm(8), torch.nn.RMSNorm(8))) == (1, 0)
    assert use_lean_kernels(torch.nn.Sequential(GemmaRMSNorm(8))) == (0, 0)  # its gain is 1 + weight
    with pytest.raises(NotApplicable, match="neither RMS"):
        LeanKernels().prepare_model(tiny.gpt2(), None)
