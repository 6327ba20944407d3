"""The optimizer's step inside the backward pass.

What it does: updates each parameter as soon as its gradient is complete, and frees the gradient at once. The gradients
of the whole model never exist together; the weights are to the bit those of the usual step.

Helps: when weights, gradients and optimizer states are the peak, as with full fine-tuning at small batches: 4 bytes (2
in half precision) a parameter are saved.
Does not help: when activations are the peak; speed.
Limits: no gradient accumulation, gradient clipping, gradient scaler, or second process, since all of these need the
whole gradient. The trainer's default of clipping at 1.0 is switched off. A step whose gradient is not finite cannot be
taken back: the run ends there, and a micro-batch that runs out of memory is not split.
Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", 2023; PyTorch's
tutorial on optimizer steps in the backward pass, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.errors import InputError
from thrifty.method import Method, NotApplicable, Paper, overrides, register


class StepInBackward:
    """Hooks that step an optimizer parameter by parameter during `backward`, for any loop.

    Go on calling `optimizer.step()` in the loop (schedulers count it): it finds no gradients, and does nothing.

    Args:
        optimizer: Any that skips parameters without gradient and keeps its state by parameter.
        held: For a dry run, whose hooks do not step: the bytes that a parameter's update takes for a moment.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, held: Callable[[Tensor], int] | None = None) -> None:
        self.optimizer = optimizer
        self.skip = False
        """Set it before `backward` to drop the gradients without an update."""
        self.norms: list[Tensor] = []
        """Norms of the gradients since `clear`."""
        self._held = held
        self._checked = False
        self._handles = [
            p.register_post_accumulate_grad_hook(self._update)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        ]

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()

    def norm(self) -> Tensor:
        """The norm of the whole gradient since `clear`: a scalar."""
        return torch.linalg.vector_norm(torch.stack(self.norms)) if self.norms else torch.zeros(())

    def clear(self) -> None:
        """Forgets the norms of the last step."""
        self.norms.clear()

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        if self._held is not None:
            torch.empty(self._held(parameter), dtype=torch.uint8, device=parameter.device)
        elif parameter.grad is not None:
            self.norms.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32))
            if not self.skip:
                self._step_one()
        parameter.grad = None

    def _step_one(self) -> None:
        # This parameter is the only one with a gradient, so that the optimizer's own step touches no other. The class's
        # step: schedulers and the trainer put wrappers of their own on the instance.
        optimizer: Any = self.optimizer
        before = None if self._checked else _shared(optimizer)
        type(optimizer).step(optimizer)
        if before is not None and before != _shared(optimizer):
            raise NotApplicable(
                f"optimizer-in-backward: {type(optimizer).__name__} counts its steps for all parameters together",
                fix="use adamw, or remove optimizer-in-backward from the methods",
            )
        self._checked = True


def _shared(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    return [{k: str(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


_WHOLE = "it needs the gradients of all parameters at once, which never exist"


@register(
    "optimizer-in-backward",
    title="Optimizer step in the backward pass",
    section="optimizers",
    sources=[Paper("Lv et al.", 2023, "arXiv:2306.09782"), Paper("PyTorch", 2023, "tutorial")],
    exact=True,
    micro_batch_invariant=False,
    processes=False,
    claims=("update",),
    conflicts_with={
        "gradient-accumulation": "the weights would change after the first micro-batch",
        "fp16": "a gradient scaler decides about the step when the whole gradient is known",
        "schedule-free": "it counts its steps for all parameters together",
        "section:sparsity": "masks act between the backward pass and the step",
        "optimizer-offload": "an offloaded optimizer collects the gradients",
        "nvme-offload": "an offloaded optimizer collects the gradients",
    },
    choices={"allow": [{}]},
    bench_order=60,
)
@dataclass(kw_only=True)
class OptimizerInBackward(Method):
    """The step of the run's optimizer, during the backward pass."""

    stepper: StepInBackward | None = field(default=None, init=False, repr=False)
    updates_inside = True
    """For the planner: the update is part of the pass."""
    _held: Callable[[Tensor], int] | None = field(default=None, init=False, repr=False)
    _inside: bool = field(default=False, init=False, repr=False)
    _losses: int = field(default=0, init=False, repr=False)

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        who, self._held = "optimizer-in-backward", ctx.update_bytes if ctx.planning else None
        if args.gradient_accumulation_steps > 1:
            raise NotApplicable(
                f"{who}: the weights would change after the first micro-batch",
                key="gradient_accumulation_steps",
                value=args.gradient_accumulation_steps,
                fix=f"set it to 1, or remove {who} from the methods",
            )
        if args.fp16:
            raise NotApplicable(f"{who}: {_WHOLE} by the gradient scaler", key="fp16", value=True, fix="use bf16")
        if args.world_size > 1 or getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise NotApplicable(
                f"{who}: gradients are averaged over processes after the backward pass of each",
                fix=f"use one process, or remove {who} from the methods",
            )
        if "lomo" in str(args.optim) or "layerwise" in str(args.optim):
            raise NotApplicable(f"{who}: this optimizer steps in the backward pass", key="optim", value=args.optim)
        return {"max_grad_norm": 0.0} if args.max_grad_norm else {}

    def attach(self, accelerator: Any, ctx: Any) -> None:
        if accelerator.scaler is not None:
            raise NotApplicable("optimizer-in-backward: " + _WHOLE, key="fp16", fix="use bf16")
        for other in ctx.trainer.recipe:
            if other is not self and overrides(other, "wrap_update"):
                raise NotApplicable(
                    f"optimizer-in-backward and {other.name} cannot be combined: {_WHOLE}", fix="remove one of the two"
                )
        ctx.trainer.gradient_norm = self._norm

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self._hook(kw["optimizer"])

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        if ctx.optimizer is not None:  # before training there is none yet
            self._hook(ctx.optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if self.stepper is not None:
            self.stepper.clear()

    def _hook(self, optimizer: Any) -> None:
        if self.stepper is not None and self._held is None:  # a dry run holds several models at a time
            self.stepper.remove()
        self.stepper = StepInBackward(getattr(optimizer, "optimizer", optimizer), held=self._held)

    def _norm(self) -> Tensor:
        assert self.stepper is not None
        return self.stepper.norm()

    def wrap_training_step(self, step: Callable[..., Tensor], ctx: Any) -> Callable[..., Tensor]:
        def one_step(*args: Any, **kwargs: Any) -> Tensor:
            self._inside, self._losses = True, 0
            try:
                return step(*args, **kwargs)
            finally:
                self._inside = False

        return one_step

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        def guarded(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            self._losses += 1
            if self._inside and self._losses > 1:
                raise InputError(
                    "out of memory in the backward pass, when some weights were updated already: the micro-batch "
                    "cannot be split",
                    key="per_device_train_batch_size",
                    value=ctx.args.per_device_train_batch_size,
                    fix="make it smaller and resume from the last checkpoint",
                )
            loss = compute_loss(model, inputs, num_items_in_batch)
            if self.stepper is not None and not ctx.planning:
                self.stepper.skip = _guarded(ctx) and not math.isfinite(float(loss.detach()))
            return loss

        return guarded

    def wrap_update(self, update: Callable[[], None], ctx: Any) -> Callable[[], None]:
        def already_done() -> None:
            assert self.stepper is not None
            if _guarded(ctx) and not self.stepper.skip and not math.isfinite(float(self.stepper.norm())):
                raise InputError(
                    "optimizer-in-backward: the gradient is not finite, and the weights have been updated with it",
                    key="on_non_finite",
                    fix="resume from the last checkpoint with a lower learning rate, or without optimizer-in-backward",
                )

        return already_done


def _guarded(ctx: Any) -> bool:
    return ctx.trainer is not None and ctx.trainer.guards.on_non_finite != "ignore"
