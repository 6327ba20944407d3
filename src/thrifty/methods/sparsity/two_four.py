"""2:4 sparsity.

What it does: in each group of four neighbouring inputs of a linear layer only the two largest weights are used, a
pattern that sparse tensor cores multiply at up to twice the rate. The pattern is fixed from the start, or chosen anew
at every step while the dense weights are trained on beneath (SR-STE).

Helps: inference on Ampere and later NVIDIA GPUs, with the sparse kernels of torch; half of the weights to store.
Does not help: the speed of training: weights change at every step, and the transposed weight of the backward pass is
not 2:4. On other devices zeros are multiplied like other numbers.
Limits: linear layers inside the blocks whose inputs are a multiple of 4. The kernels want bf16 or fp16 and sizes that
are multiples of 64, and are used in evaluation only; elsewhere, and on a CPU, it is masks only.
Source: Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021; Zhou et al., "Learning N:M Fine-grained
Structured Sparse Neural Networks From Scratch", ICLR 2021.
Library: torch.sparse.to_sparse_semi_structured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from thrifty._hf import write_line
from thrifty.architecture import block_linears, main_blocks
from thrifty.method import Paper, register
from thrifty.methods.sparsity._masks import MaskedMethod, MaskedWeights


def two_four_mask(weight: Tensor) -> Tensor:
    """Keeps the two largest magnitudes in each group of four along the last dimension.

    >>> two_four_mask(torch.tensor([[4.0, 1.0, -3.0, 2.0]])).int()
    tensor([[1, 0, 1, 0]], dtype=torch.int32)
    """
    groups = weight.detach().abs().unflatten(-1, (-1, 4))
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, groups.topk(2, dim=-1).indices, True).flatten(-2)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks' linear layers that can be 2:4: trained, with a multiple of four inputs."""
    chosen = {}
    for name, module in block_linears(main_blocks(model, "two-four")).items():
        weight: Any = module.weight
        inputs = weight.shape[0 if isinstance(module, Conv1D) else 1]
        if weight.requires_grad and inputs % 4 == 0:
            chosen[name] = module
    return chosen


class TwoFour(MaskedWeights):
    """2:4 masks on linear layers, for one's own loop.

    Fixed: after each backward `mask_gradients()`, after each optimizer step `apply(optimizer)`. SR-STE: after each
    backward `pull(decay)`, before each optimizer step `bare()`, after it `cover()`.

    Args:
        modules: Linear layers by name, with weights of shape (out, in), or `Conv1D` with (in, out).
        dense: Keep the dense weights, for SR-STE.
    """

    def __init__(self, modules: Mapping[str, nn.Module], dense: bool = False) -> None:
        self.modules = dict(modules)
        self.parameters: dict[str, Any] = {f"{n}.weight": m.weight for n, m in modules.items()}
        self.masks: dict[str, Tensor] = {}
        self.dense: dict[str, Tensor] = {}
        if dense:
            self.cover()
        else:
            self.choose()
            self.apply()

    def choose(self) -> None:
        """The masks of the weights as they are."""
        for name, module in self.modules.items():
            weight: Any = module.weight
            by_input = weight.mT if isinstance(module, Conv1D) else weight
            mask = two_four_mask(by_input.contiguous())
            self.masks[f"{name}.weight"] = mask.mT.contiguous() if isinstance(module, Conv1D) else mask

    @torch.no_grad()
    def bare(self) -> None:
        """Puts the dense weights back, for the optimizer."""
        for name, p in self.parameters.items():
            p.copy_(self.dense[name].to(p.device))

    @torch.no_grad()
    def cover(self) -> None:
        """Notes the dense weights, chooses the masks anew and zeroes the rest, for forward and backward."""
        self.choose()
        for name, p in self.parameters.items():
            self.dense[name] = p.detach().clone()
            p.mul_(self.masks[name])

    @torch.no_grad()
    def pull(self, decay: float) -> None:
        """Adds decay * (1 - mask) * dense weight to the gradients: the masked weights are pulled to zero."""
        for name, p in self.parameters.items():
            if p.grad is not None:
                p.grad.add_(torch.where(self.masks[name].to(p.device), 0.0, self.dense[name].to(p.device)), alpha=decay)


def has_kernels(module: nn.Module) -> bool:
    """Can torch multiply by this layer's weight with its sparse kernels, once it is 2:4 and in half precision?"""
    weight: Any = module.weight
    return (
        isinstance(module, nn.Linear)
        and weight.is_cuda
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)
        and weight.shape[0] % 64 == weight.shape[1] % 64 == 0
    )


class SparseForward:
    """A linear layer's `forward` with its weight compressed, for inference. The weight itself is left alone.

    Args:
        module: A layer whose weight is 2:4.
        compress: Makes the weight that `linear` takes.
    """

    def __init__(self, module: nn.Linear, compress: Callable[[Tensor], Tensor]) -> None:
        self.module, self.compress = module, compress
        self.weight: Tensor | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.module.weight.dtype
        if dtype not in (torch.float16, torch.bfloat16):
            return type(self.module).forward(self.module, x)
        if self.weight is None:  # only now, since saving needs none
            self.weight = self.compress(self.module.weight.detach().to(dtype))
        bias = None if self.module.bias is None else self.module.bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            return nn.functional.linear(x.to(dtype), self.weight, bias)


@contextlib.contextmanager
def sparse_kernels(
    modules: Mapping[str, nn.Module],
    able: Callable[[nn.Module], bool] = has_kernels,
    compress: Callable[[Tensor], Tensor] = torch.sparse.to_sparse_semi_structured,
) -> Iterator[list[SparseForward]]:
    """Inside, the layers that can (see `has_kernels`) multiply by sparse kernels, without gradients."""
    used: list[SparseForward] = []
    for module in modules.values():
        if able(module):
            assert isinstance(module, nn.Linear)
            used.append(SparseForward(module, compress))
            module.forward = used[-1]  # type: ignore[method-assign]
    try:
        yield used
    finally:
        for forward in used:
            del forward.module.forward


@register(
    "two-four",
    title="2:4 sparsity",
    section="sparsity",
    sources=[Paper("Mishra et al.", 2021, "arXiv:2104.08378"), Paper("Zhou et al.", 2021, "arXiv:2102.04010")],
    exact=False,
    claims=("mask",),
    library="torch.sparse.to_sparse_semi_structured",
)
@dataclass(kw_only=True)
class TwoFourSparsity(MaskedMethod):
    """Two of every four weights are zero."""

    mode: Literal["fixed", "sr-ste"] = "fixed"
    """fixed: the pattern of the first weights stays; sr-ste: it is chosen at each step from dense weights."""
    decay: float = 2e-4
    """SR-STE: how strongly masked weights are pulled to zero."""
    kernels: Literal["auto", "off"] = "auto"
    """Evaluate with the device's sparse kernels where it has them."""

    weights: TwoFour | None = field(default=None, init=False, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.mode not in ("fixed", "sr-ste"):
            raise ValueError(f"mode is 'fixed' or 'sr-ste', got {self.mode!r}")
        if self.decay < 0:
            raise ValueError(f"decay must not be negative, got {self.decay}")
        if self.kernels not in ("auto", "off"):
            raise ValueError(f"kernels is 'auto' or 'off', got {self.kernels!r}")

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return {f"{name}.weight": module.weight for name, module in layers(model).items()}  # type: ignore[misc]

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        super().prepare_model(model, ctx)
        if ctx.planning and self.mode == "sr-ste":
            for module in layers(model).values():
                module.register_buffer("dense", torch.empty_like(module.weight), persistent=False)  # type: ignore[arg-type]
        return model

    def choose(self, model: nn.Module, parameters: dict[str, nn.Parameter], ctx: Any) -> TwoFour:
        return TwoFour(layers(model), dense=self.mode == "sr-ste")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        super().on_train_begin(args, state, control, **kw)
        if self.ctx.planning:
            return
        assert self.weights is not None
        self.weights.modules = layers(kw["model"])
        if self.kernels == "auto" and not any(map(has_kernels, self.weights.modules.values())):
            write_line(f"two-four: masks only, since {self.ctx.device.type} has no sparse kernels for these weights")

    def masks_gradients(self) -> bool:
        if self.mode == "sr-ste":
            assert self.weights is not None
            # Under fp16 the gradients are scaled at this point.
            scaler = self.ctx.trainer.accelerator.scaler
            self.weights.pull(self.decay * (scaler.get_scale() if scaler is not None else 1.0))
        return self.mode == "fixed"

    def wrap_update(self, update: Callable[[], None], ctx: Any) -> Callable[[], None]:
        if self.mode == "fixed":
            return super().wrap_update(update, ctx)

        def dense_update() -> None:
            assert self.weights is not None
            self.weights.bare()
            update()
            self.weights.cover()

        return dense_update

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        with sparse_kernels(layers(model) if self.kernels == "auto" else {}):
            yield

    def on_replace(self, model: nn.Module, parameter_map: Mapping[str, str | None], ctx: Any) -> None:
        assert self.weights is not None
        old = self.weights.dense
        super().on_replace(model, parameter_map, ctx)
        self.weights.modules = layers(model)
        for name in self.weights.parameters if self.mode == "sr-ste" else ():
            source = parameter_map.get(name, name) or name
            dense: Any = old.get(source, old.get(name, self.weights.parameters[name]))
            self.weights.dense[name] = dense.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        assert self.weights is not None
        return {**super().state_dict(), "dense": {n: w.cpu() for n, w in self.weights.dense.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert self.weights is not None
        self.weights.dense = dict(state["dense"])
