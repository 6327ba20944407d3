"""Weights in bf16.

What it does: holds weights and gradients in bfloat16 and keeps no float32 copy of them. The optimizer computes each
update in float32; what rounding the weight cuts off is either kept and added to the next update (Kahan), or decided by
chance so that it is right on average (stochastic rounding).

Helps: memory: 2 bytes a parameter for weights, gradients and (Kahan) the compensation each, where bf16 mixed precision
has 4 for weights and gradients; and speed on hardware with bf16 units, since nothing is cast.
Does not help: on devices that emulate bf16. The optimizer's states stay in float32; for smaller ones see
adamw-anyprecision, which does its own compensation, or the 8-bit optimizers.
Limits: normalisations and reductions run in bf16 where the model does not ask for float32 itself; gradients are added
up in bf16. Rounding `nearest` loses every update below 1/256 of its weight: it is there to show that.
Source: Zamirai et al., "Revisiting BFloat16 Training", 2020; Kahan, 1965; Gupta et al., "Deep Learning with Limited
Numerical Precision", 2015.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty import _hf
from thrifty.errors import NotApplicable
from thrifty.method import Method, Paper, register

Rounding = Literal["kahan", "stochastic", "nearest"]
PIECE = 64 * 2**20  # elements that are updated together, in float32 copies


def to_bf16(model: nn.Module) -> int:
    """Casts the parameters to bfloat16, but neither buffers (rotary frequencies) nor what the model keeps in float32.

    Returns:
        How many parameter tensors were cast.
    """
    count = 0
    for name, p in model.named_parameters():
        if p.dtype in (torch.float32, torch.float16) and not _hf.stays_in_fp32(model, name, strict=True):
            p.data = p.data.to(torch.bfloat16)
            count += 1
    if hasattr(model, "config"):
        model.config.dtype = torch.bfloat16  # type: ignore[union-attr]
    model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
    return count


def _cast_inputs(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Images and features come in float32, and not every model casts them to the type of its weights."""
    inputs = ("pixel_values", "input_features", "input_values")
    return args, {k: v.to(torch.bfloat16) if k in inputs and v is not None else v for k, v in kwargs.items()}


def round_stochastically(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Rounds float32 to bfloat16, up or down with the probabilities that make it right on average.

    >>> round_stochastically(torch.tensor([1.5, -2.0])).tolist()
    [1.5, -2.0]
    """
    # A bfloat16 is the upper half of a float32: noise below it carries into it as often as the lower half is large.
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = (values.view(torch.int32) + noise).bitwise_and_(-(1 << 16))
    rounded = bits.view(torch.float32).to(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, values.to(torch.bfloat16))


class PreciseUpdates:
    """Makes an optimizer compute the updates of bfloat16 weights in float32, for any loop.

    The weights of a piece are copied to float32, with what is known of their lower bits, and the optimizer's own step
    is run on the copies. Its states are thus float32, and are kept under the weights; the compensation is one of them.

    Args:
        optimizer: Any whose state is kept by parameter.
        rounding: `kahan` or `stochastic`.
        seed: Of the stochastic rounding, which depends on it and on the number of the step only.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rounding: Rounding = "kahan", *, seed: int = 0) -> None:
        self.rounding, self.seed = rounding, seed
        self._inside = False
        self._saved: dict[str, Any] = {}
        mark: Any = optimizer
        mark.keeps_low_bits = True  # as optimizers say that do this themselves
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    @torch.no_grad()
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Does the whole update of the weights that are bfloat16; the step that follows finds no gradients there."""
        if self._inside:
            return
        groups, self._inside = optimizer.param_groups, True
        try:
            for number, group in enumerate(groups):
                for indices in _pieces(group["params"]):
                    self._update(optimizer, number, group, indices)
        finally:
            optimizer.param_groups, self._inside = groups, False

    def _update(self, optimizer: Any, number: int, group: dict[str, Any], indices: list[int]) -> None:
        weights = [group["params"][i] for i in indices]
        states = [optimizer.state.pop(p, {}) for p in weights]
        lost = [state.pop("compensation", None) for state in states]
        values, gradients = _in_float32(weights), _in_float32([p.grad for p in weights])
        known = [(value, part) for value, part in zip(values, lost, strict=True) if part is not None]
        if known:
            torch._foreach_add_(*(list(column) for column in zip(*known, strict=True)))
        copies = []
        for p, value, gradient, state in zip(weights, values, gradients, states, strict=True):
            copy = nn.Parameter(value)
            copy.grad, p.grad = gradient, None
            if state:
                optimizer.state[copy] = state
            copies.append(copy)
        whole = len(group["params"])
        # Some optimizers (Muon) have settings for each parameter of a group.
        part = {k: [v[i] for i in indices] if isinstance(v, list) and len(v) == whole else v for k, v in group.items()}
        optimizer.param_groups = [{**part, "params": copies}]
        before = {k: v for k, v in part.items() if k != "params"}
        type(optimizer).step(optimizer)
        if any(v is not before[k] and v != before[k] for k, v in optimizer.param_groups[0].items() if k in before):
            raise NotApplicable(
                f"bf16-pure: {type(optimizer).__name__} counts its steps for all parameters together",
                fix="use adamw, or bf16 in place of bf16-pure",
            )
        states = [optimizer.state.pop(copy, {}) for copy in copies]
        values = [copy.data for copy in copies]
        if self.rounding == "kahan":
            lost = [torch.empty_like(p) if part is None else part for p, part in zip(weights, lost, strict=True)]
            torch._foreach_copy_(weights, values)
            torch._foreach_sub_(values, weights)
            torch._foreach_copy_(lost, values)
        for index, p, value, part, state in zip(indices, weights, values, lost, states, strict=True):
            if self.rounding == "kahan":
                state["compensation"] = part
            else:
                p.copy_(round_stochastically(value, self._generator(state, p, number, index)))
            optimizer.state[p] = state

    def _generator(self, state: dict[str, Any], p: Tensor, group: int, index: int) -> torch.Generator | None:
        if p.is_meta or type(p.data) is not Tensor:  # a dry run
            return None
        state["draws"] = draws = state.get("draws", torch.zeros((), dtype=torch.int64)) + 1
        seed = hash((self.seed, group, index, int(draws))) % 2**63
        return torch.Generator(device=p.device).manual_seed(seed)

    def _before_load(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["state"]

    def _after_load(self, optimizer: Any) -> None:
        # torch has cast the states to the type of the weights.
        order = [p for group in optimizer.param_groups for p in group["params"]]
        saved: dict[Any, dict[str, Any]] = self._saved
        for index, values in saved.items():
            for key, value in values.items():
                present = optimizer.state[order[index]].get(key)
                if isinstance(value, Tensor) and isinstance(present, Tensor) and present.dtype != value.dtype:
                    optimizer.state[order[index]][key] = value.to(present.device, copy=True)
        self._saved = {}


def _in_float32(tensors: list[Any]) -> list[Tensor]:
    copies = [torch.empty_like(t, dtype=torch.float32) for t in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _pieces(parameters: list[Tensor]) -> Iterator[list[int]]:
    """Indices of the bfloat16 parameters with a gradient, in pieces of at most `PIECE` elements."""
    piece: list[int] = []
    elements = 0
    for index, p in enumerate(parameters):
        if p.grad is None or p.dtype != torch.bfloat16:
            continue
        if piece and elements + p.numel() > PIECE:
            yield piece
            piece, elements = [], 0
        piece.append(index)
        elements += p.numel()
    if piece:
        yield piece


@register(
    "bf16-pure",
    title="Weights in bf16",
    section="precision",
    sources=[Paper("Zamirai et al.", 2020, "arXiv:2010.06192"), Paper("Gupta et al.", 2015, "arXiv:1502.02551")],
    exact=False,
    micro_batch_invariant=False,
    claims=("precision",),
    conflicts_with={
        "schedule-free": "it counts its steps for all parameters together",
        "apollo": "it numbers its parameters, and updates are computed on copies of them",
    },
    choices={"allow": [{}]},
    bench_order=12,
)
@dataclass(kw_only=True)
class BF16Pure(Method):
    """Weights, gradients and activations in bfloat16."""

    rounding: Rounding = "kahan"
    """What becomes of the bits that an update has and the weight has not: kept, drawn by chance, or lost."""

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        for key in ("bf16", "fp16"):
            if getattr(args, key):
                raise NotApplicable(
                    "bf16-pure: mixed precision keeps float32 weights, which this method does without",
                    key=key,
                    value=True,
                    fix=f"remove {key}, or bf16-pure from the methods",
                )
        if not ctx.planning and ctx.device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
            raise NotApplicable(
                f"bf16-pure: the device {torch.cuda.get_device_name(ctx.device)} has no bfloat16 units",
                fix="use fp16, or no precision method",
            )
        return {}

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if to_bf16(model) == 0 and not any(p.dtype == torch.bfloat16 for p in model.parameters()):
            raise NotApplicable("bf16-pure: the model has no parameters that could be bfloat16", fix="remove it")
        return model

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        for key, hook in list(model._forward_pre_hooks.items()):
            if hook is _cast_inputs:
                del model._forward_pre_hooks[key]
                model._forward_pre_hooks_with_kwargs.pop(key, None)
        return model

    def adjust_optimizer(self, optimizer: torch.optim.Optimizer, ctx: Any) -> None:
        # An optimizer that compensates bfloat16 weights itself, or has float32 copies, is left alone.
        alone = getattr(optimizer, "kahan", False) or getattr(optimizer, "keeps_low_bits", False)
        if self.rounding != "nearest" and not alone:
            PreciseUpdates(optimizer, self.rounding, seed=ctx.args.seed)
