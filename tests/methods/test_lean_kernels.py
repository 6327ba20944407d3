"""Hand-written kernels against transformers' own, in values, gradients, memory and reach."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch.autograd import gradcheck
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma_attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, eager_attention_forward

import tiny
from thrifty.errors import NotApplicable
from thrifty.methods.compilation import lean_kernels
from thrifty.methods.compilation._lean_attention import attend, lean_attention
from thrifty.methods.compilation.lean_kernels import LeanKernels, rms_norm, rotate, use_lean_kernels
from thrifty.tasks.models import seeded


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
    key, value = (torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.randn(2, 1, 5, 4, dtype=torch.float64)
    assert gradcheck(lambda *parts: attend(*parts, mask, 0.3), (q, key, value))  # of the weights, too
    assert gradcheck(lambda *parts: attend(*parts, None, 0.3)[0], (q, key, value))


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


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_attention_computes_what_transformers_does(dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    half = autocast or dtype == torch.bfloat16
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if half else {"rtol": 1e-5, "atol": 1e-5}
    lean = lean_attention(eager_attention_forward)
    assert lean is not None
    module = types.SimpleNamespace(num_key_value_groups=2, training=True)
    mask = torch.zeros(2, 1, 5, 5, dtype=dtype).masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(dtype).min)
    mask[1, :, :2] = torch.finfo(dtype).min  # a row that may look nowhere
    results = []
    for attention in (eager_attention_forward, lean):
        rng = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(2, heads, 5, 8, generator=rng).to(dtype).requires_grad_() for heads in (6, 3, 3))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, weights = attention(module, q, k, v, mask, 0.3)
        slope = torch.randn(out.shape, generator=rng)
        ((out.float() * slope).sum() + (weights.float() ** 2).sum()).backward()
        results.append([part.float() for part in (out, weights, q.grad, k.grad, v.grad)])
    for theirs, ours in zip(*results, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_attention_with_dropout_or_a_learnt_mask_is_theirs() -> None:
    lean = lean_attention(eager_attention_forward)
    assert lean is not None
    module = types.SimpleNamespace(num_key_value_groups=1, training=True)
    q, bias = torch.randn(1, 2, 5, 8), torch.zeros(1, 1, 5, 5, requires_grad=True)
    lean(module, q, q, q, bias, 0.3)[0].square().sum().backward()
    assert bias.grad is not None
    assert bias.grad.abs().sum() > 0
    with seeded(0):
        theirs = eager_attention_forward(module, q, q, q, None, 0.3, 0.5)
    with seeded(0):
        ours = lean(module, q, q, q, None, 0.3, 0.5)
    for a, b in zip(theirs, ours, strict=True):
        assert torch.equal(a, b)


def test_another_attention_is_left_alone() -> None:
    def capped(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        return eager_attention_forward(module, query, key, value, attention_mask, scaling / 2, dropout, **kwargs)

    def without_groups(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        weights = (query @ key.mT * scaling + attention_mask).softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    assert lean_attention(capped) is lean_attention(without_groups) is lean_attention(gemma_attention) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_with_plain_attention_trains_as_before_and_keeps_less(dtype: torch.dtype) -> None:
    plain = tiny.llama().to(dtype)
    plain.set_attn_implementation("eager")
    rotations = copy.deepcopy(plain)
    lean = copy.deepcopy(plain)
    use_lean_kernels(lean)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lean_kernels, "lean_attention", lambda plain: None)
        use_lean_kernels(rotations)
    before, after = run(plain), run(lean)
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.1, "atol": 5e-3}
    assert after[0] == pytest.approx(before[0], rel=tolerance["rtol"])
    for name, gradient in before[1].items():
        torch.testing.assert_close(after[1][name], gradient, **tolerance)
    kept = run(rotations)[2]
    assert after[2] < kept if dtype == torch.bfloat16 else after[2] == kept  # no float32 copies of the weights


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
    for kind, why in (("cpu", "no dropout"), ("cuda", "a kernel of its own")):
        with pytest.raises(NotApplicable, match=f"neither RMS.*{why}"):
            LeanKernels().prepare_model(
                tiny.gpt2(dropout=0.1 if kind == "cuda" else 0.0), types.SimpleNamespace(device_kind=kind)
            )
