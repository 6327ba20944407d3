"""Liger's fused kernels.

What it does: replaces normalisations, rotary embeddings, gated feed-forwards and the loss of a model family by Triton
kernels that do each in one pass; the loss never makes the logits.

Helps: GPUs: memory of activations and of the logits, and speed, most with large vocabularies and long sequences.
Does not help: on CPUs, where it cannot run.
Limits: the model families that liger-kernel knows. The functions of the family's module in transformers are replaced
for the whole process. Its loss and chunked-cross-entropy do the same work: take one of them.
Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024.
Library: liger-kernel through transformers.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thrifty.method import Method, NotApplicable, Paper, register


@register(
    "liger",
    title="Liger kernels",
    section="loss",
    sources=[Paper("Hsu et al.", 2024, "arXiv:2410.10989")],
    exact=True,
    tasks=("causal-lm",),
    claims=("loss",),
    library="liger-kernel",
    extra="liger",
    bench_order=31,
)
@dataclass(kw_only=True)
class Liger(Method):
    """Fused Triton kernels for a known model family."""

    fused_loss: bool = True
    """Compute the loss from the hidden states, without logits."""
    rms_norm: bool = True
    """Normalisations in one kernel."""
    rope: bool = True
    """Rotary embeddings in one kernel."""
    swiglu: bool = True
    """Gated feed-forward layers in one kernel."""

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        if ctx.planning:
            raise NotApplicable(
                "liger: Triton kernels cannot be dry-run",
                key="methods",
                value="liger",
                fix="plan with chunked-cross-entropy, which spares the logits too",
            )
        check_liger(ctx.device)
        if args.label_smoothing_factor and self.fused_loss:
            raise NotApplicable(
                "liger: the trainer's label smoothing needs the logits",
                key="label_smoothing_factor",
                value=args.label_smoothing_factor,
                fix="set methods.liger.fused_loss to false",
            )
        kernels = {
            "fused_linear_cross_entropy": self.fused_loss,
            "rms_norm": self.rms_norm,
            "rope": self.rope,
            "swiglu": self.swiglu,
        }
        return {"use_liger_kernel": True, "liger_kernel_config": kernels}

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        from liger_kernel.transformers import monkey_patch  # pyright: ignore[reportMissingImports]

        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        kind = getattr(getattr(base, "config", None), "model_type", None)
        if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise NotApplicable(
                f"liger: liger-kernel has no kernels for {type(base).__name__} (model_type {kind})",
                key="methods",
                value="liger",
                fix="use chunked-cross-entropy and compile, which work with any model",
            )
        return model


def check_liger(device: torch.device) -> None:
    """Raises `NotApplicable` where liger-kernel is missing, or the device runs no Triton."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise NotApplicable(
            "liger: liger-kernel is not installed", key="methods", value="liger", fix="pip install thrifty[liger]"
        )
    if device.type not in ("cuda", "xpu", "npu") or importlib.util.find_spec("triton") is None:
        raise NotApplicable(
            f"liger: its kernels are written in Triton, which does not run on the device {device.type}",
            key="methods",
            value="liger",
            fix="use chunked-cross-entropy: it saves the logits on any device",
        )
