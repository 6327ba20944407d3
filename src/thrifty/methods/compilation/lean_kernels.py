"""Hand-written normalisations, rotations, plain attention and dropout.

What it does: computes RMS normalisations, rotary embeddings and attention by matrix products, and their backward
passes, in as few passes over memory as plain PyTorch operations allow. As transformers writes them, a normalisation
takes six operations and its backward pass a dozen, and a rotation copies and negates halves; in half precision they and
the scores of `attention: eager` are also cast to float32 and back. On a processor it also draws the numbers of dropout
four at a time, where PyTorch's own dropout draws them one by one.

Helps: CPUs and other devices without Triton, where such operations take a large share of a small model's step. Fewer
tensors are kept for the backward pass.
Does not help: compiled models, or GPUs with Liger's kernels: both fuse the same operations into one.
Limits: what computes the same as Llama's; each is tried out before it is replaced. SDPA and flash attention have
kernels of their own and are left alone, and so is attention with dropout. In half precision, sums are made in float32
and products are rounded, so that the last bits differ. Dropout drops other numbers than PyTorch's would.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Su et al., "RoFormer", 2021.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods._dropout import use_lean_dropout
from thrifty.methods.compilation._lean_attention import PLAIN, lean_attention

ROTATION = "apply_rotary_pos_emb"
ROTATION_ARGUMENTS = ["q", "k", "cos", "sin", "unsqueeze_dim"]


class _RmsNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Any:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        inverse = (norm.square() / x.shape[-1] + eps).rsqrt().to(x.dtype)
        return (x * inverse) * weight, inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, inverse = ctx.saved_tensors
        width = x.shape[-1]
        scaled = x * inverse
        product = gradients[0] * scaled
        for_weight = product.reshape(-1, width).sum(0)
        along = (product @ weight).unsqueeze(-1) * (inverse / -width)  # what would change the norm is taken out
        return torch.addcmul(gradients[0] * weight * inverse, scaled, along), for_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis.

    Args:
        x: Shape (..., width).
        weight: Shape (width,).
        eps: Added to the mean of squares.
    """
    return _RmsNorm.apply(x, weight, eps)[0]  # type: ignore[index]


class _Rotation(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rotated(x, cos, sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # The halves change places in one copy, and their signs are the sines'.
    half = x.shape[-1] // 2
    return (x * cos).addcmul_(x.roll(half, -1), sin)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys, as `apply_rotary_pos_emb` of transformers.

    Args:
        q: Shape (batch, heads, length, width); `k` may have other heads.
        k: The keys.
        cos: Shape (batch, length, width), with equal halves; also the sines.
        sin: The sines. Neither gets a gradient.
        unsqueeze_dim: Where the axis of the heads is.
    """
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    cos, sin = cos.unsqueeze(unsqueeze_dim), signed.unsqueeze(unsqueeze_dim)
    made: Any = (_Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin))
    return made


def use_lean_kernels(model: nn.Module) -> tuple[int, int]:
    """Gives the model's modules the forward passes of this file, in place and for this model alone.

    Returns:
        How many normalisations and how many attention modules have them now.
    """
    norms = attentions = 0
    for module in model.modules():
        if _is_rms_norm(module):
            module.forward = types.MethodType(_norm_forward, module)
            norms += 1
        elif (plain := _rotating_forward(module)) is not None:
            module.forward = types.MethodType(_with_lean_parts(plain), module)
            attentions += 1
    return norms, attentions


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _is_rms_norm(module: nn.Module) -> bool:
    """Whether the module computes what `rms_norm` does, by its result for other weights than its own."""
    weight: Any = getattr(module, "weight", None)
    named = "RMSNorm" in type(module).__name__ and hasattr(module, "variance_epsilon")
    if (
        not named
        or weight is None
        or weight.ndim != 1
        or len(list(module.parameters())) != 1
        or "forward" in vars(module)
    ):
        return False
    rng = torch.Generator().manual_seed(0)
    x, other = (
        torch.randn(3, len(weight), generator=rng, device="cpu"),
        torch.randn(len(weight), generator=rng, device="cpu"),
    )
    with torch.no_grad():
        theirs = torch.func.functional_call(module, {"weight": other}, (x,))
        return torch.allclose(theirs, rms_norm(x, other, float(module.variance_epsilon)), atol=1e-5)  # type: ignore


def _rotating_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The module's forward pass without wrappers, if it rotates queries and keys as `rotate` does."""
    if not type(module).__name__.endswith("Attention") or "forward" in vars(module):
        return None
    plain: Any = inspect.unwrap(type(module).forward)
    theirs = getattr(plain, "__globals__", {}).get(ROTATION)
    if theirs is None or ROTATION not in plain.__code__.co_names:
        return None
    if list(inspect.signature(theirs).parameters) != ROTATION_ARGUMENTS:
        return None
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 5, 8, generator=rng, device="cpu"), torch.randn(2, 1, 5, 8, generator=rng, device="cpu")
    angles = torch.rand(2, 5, 4, generator=rng, device="cpu").repeat(1, 1, 2)
    with torch.no_grad():
        pairs = zip(theirs(q, k, angles.cos(), angles.sin()), rotate(q, k, angles.cos(), angles.sin()), strict=True)
        return plain if all(torch.allclose(a, b, atol=1e-6) for a, b in pairs) else None


def _with_lean_parts(plain: Any) -> Any:
    """The same function, but for the names by which it finds the rotation and, where it has one, plain attention."""
    names = {**plain.__globals__, ROTATION: rotate}
    attention = lean_attention(names[PLAIN]) if PLAIN in plain.__code__.co_names and PLAIN in names else None
    if attention is not None:
        names[PLAIN] = attention
    made = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


@register(
    "lean-kernels",
    title="Hand-written normalisations, rotations, plain attention and dropout",
    section="compilation",
    sources=[Paper("Zhang and Sennrich", 2019, "arXiv:1910.07467"), Paper("Su et al.", 2021, "arXiv:2104.09864")],
    exact=True,
    conflicts_with={"liger": "both replace normalisations and rotations"},
)
@dataclass(kw_only=True)
class LeanKernels(Method):
    """Fewer passes over memory for normalisations, rotary embeddings, plain attention and, on a processor, dropout."""

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        norms, attentions = use_lean_kernels(model)
        dropouts = use_lean_dropout(model) if ctx.device_kind == "cpu" else 0
        if not norms + attentions + dropouts:
            raise NotApplicable(
                f"lean-kernels: {type(model).__name__} has neither RMS normalisations nor rotations as Llama's, "
                f"and {'no dropout' if ctx.device_kind == 'cpu' else 'dropout has a kernel of its own here'}",
                fix="remove lean-kernels from the methods",
            )
        return model
