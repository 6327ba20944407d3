"""fp16 mixed precision with dynamic loss scaling.

What it does: runs matrix products in float16 and keeps the weights in float32; the loss is multiplied by a scale that
grows after 2,000 good steps and halves when a gradient overflows, in which case the step and the schedule are held.

Helps: on NVIDIA GPUs from Volta on, above all those without bf16 (V100, T4): faster, and half the activation memory.
Does not help: on a CPU, where it is slower than float32 (it runs there, so that a recipe can be tested).
Limits: the weights must be in float32; a model whose activations exceed 65,504 cannot be trained in it: use bf16.
Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
Library: torch.amp.GradScaler through accelerate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thrifty._hf import enable_cpu_fp16
from thrifty.method import Method, NotApplicable, Paper, register


class LossScaler:
    """Dynamic loss scaling for one's own loop, on any device.

    >>> scaler = LossScaler("cpu")
    >>> # with torch.autocast("cpu", torch.float16): loss = model(**batch).loss
    >>> # scaler.step(loss, optimizer, max_norm=1.0)
    """

    def __init__(self, device: torch.device | str, **kwargs: Any) -> None:
        self.scaler = torch.amp.GradScaler(torch.device(device).type, **kwargs)

    def step(
        self,
        loss: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float | None = None,
        schedule: Callable[[], None] | None = None,
    ) -> bool:
        """Backward, unscale, clip, update. Returns whether the weights were updated; only then the schedule steps."""
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        if max_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, max_norm)
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        updated = self.scaler.get_scale() >= before
        if updated and schedule is not None:
            schedule()
        return updated


@register(
    "fp16",
    title="fp16 mixed precision",
    section="precision",
    sources=[Paper("Micikevicius et al.", 2018, "arXiv:1710.03740")],
    exact=False,
    micro_batch_invariant=False,
    claims=("precision",),
    library="torch.amp",
    choices={"allow": [{}]},
    bench_order=11,
)
@dataclass(kw_only=True)
class FP16(Method):
    """Mixed precision in float16 with dynamic loss scaling."""

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        return {"fp16": True}

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        halves = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
        if halves:
            raise NotApplicable(
                f"fp16: {len(halves)} trainable weights are themselves float16 (first: {halves[0]}), and gradients in "
                "float16 cannot be unscaled",
                fix="load the model with dtype='float32'; autocast does the rest",
            )
        return model

    def attach(self, accelerator: Any, ctx: Any) -> None:
        if ctx.device.type == "cpu":
            enable_cpu_fp16(accelerator)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        _skip_in_the_open(getattr(kw["optimizer"], "optimizer", kw["optimizer"]))

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        if ctx.optimizer is not None:  # before training there is none yet
            _skip_in_the_open(ctx.optimizer)


def _skip_in_the_open(optimizer: Any) -> None:
    # A fused optimizer skips an overflowing step inside its kernel, where accelerate does not see it: the schedule
    # would go on. Without this mark the scaler does not call the optimizer at all.
    optimizer._step_supports_amp_scaling = False
