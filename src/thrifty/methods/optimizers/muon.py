"""Muon.

What it does: orthogonalises the momentum of every hidden weight matrix by five Newton-Schulz steps, so that all
directions of the update have about the same size. Embeddings, head, norms and biases are trained with AdamW.

Helps: pre-training: fewer steps to a loss than AdamW in many reports (about half the compute in Liu et al., 2025).
Does not help: adapters and fine-tuning of a model that was trained with AdamW.
Limits: needs whole matrices: not with row shards. Fused query-key-value matrices are split before they are
    orthogonalised.
Source: Jordan et al., "Muon: An optimizer for hidden layers", 2024; Liu et al., "Muon is Scalable for LLM Training",
    2025.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from thrifty.architecture import block_linears, find_blocks
from thrifty.hardware.detect import detect
from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods.optimizers._adam import ByParameter, adamw_step
from thrifty.methods.optimizers._groups import refuse_sharding, split

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
FUSED = {"c_attn": 3, "query_key_value": 3, "qkv": 3, "qkv_proj": 3, "Wqkv": 3}
BATCHED_NUMBERS = 2**22
"""Matrices of equal shape are orthogonalised together, up to so many numbers: small ones waste time one by one, and
large ones gain nothing but would need the memory."""
BF16_SIDE = 64
"""Below it, a processor's bf16 units gain nothing on a product."""


def orthogonalise(matrix: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """The nearest matrix with singular values around 1 (0.68 to 1.13), by Newton-Schulz steps.

    Args:
        matrix: Shape (..., rows, columns), each matrix for itself.
        steps: Newton-Schulz steps.
        dtype: Of the products. None is float32 on a CPU, where products in bfloat16 may be slow, and bfloat16
            elsewhere.

    Returns:
        float32, in the shape of `matrix`.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype or (torch.float32 if matrix.device.type == "cpu" else torch.bfloat16))
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).reshape(-1, *(reversed(x.shape[-2:]) if tall else x.shape[-2:]))
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrix.shape).float()


@functools.cache
def _processor_has_bf16() -> bool:
    return detect(use_cpu=True).bf16


def products_for(shape: torch.Size, device: torch.device) -> torch.dtype:
    """The data type in which the device multiplies matrices of a shape fastest, at the precision that Muon needs."""
    if device.type != "cpu" or (min(shape) >= BF16_SIDE and _processor_has_bf16()):
        return torch.bfloat16
    return torch.float32


class MuonWithAdamW(ByParameter):
    """Muon for the groups with `muon=True`, AdamW for the others.

    Args:
        params: Groups. Muon's may have `parts`, for each matrix (dimension, number) of a fused one that is split, or
            None, and `transposed`, whether it is stored as (inputs, outputs).
        lr: Learning rate of AdamW's groups; Muon's bring their own.
        momentum: Muon's momentum, with Nesterov's look-ahead.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: Decoupled, of both.
        scale: `original` multiplies by sqrt(max(1, outputs / inputs)); `match_rms` by 0.2 sqrt(max(outputs, inputs)),
            for which AdamW's learning rate fits.
        products: The data type of Newton-Schulz's products; None is what `orthogonalise` takes, and a function is
            asked for each shape and device.
        ns_steps: Newton-Schulz steps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        scale: str = "original",
        products: torch.dtype | Callable[[torch.Size, torch.device], torch.dtype] | None = None,
        ns_steps: int = 5,
    ) -> None:
        self.scale, self.products, self.ns_steps = scale, products, ns_steps
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "muon": False,
            "parts": None,
            "transposed": None,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            present = [(index, p) for index, p in enumerate(group["params"]) if p.grad is not None]
            if group["muon"]:
                self._muon(group, present)
                continue
            for index, p in present:
                self.update(p, p.grad, group, index)  # type: ignore[arg-type]
        return loss

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        adamw_step(p, gradient, self.state[p], group)

    def _muon(self, group: dict[str, Any], present: list[tuple[int, Tensor]]) -> None:
        if not present:
            return
        weights = [p for _, p in present]
        gradients: list[Any] = [p.grad for p in weights]
        for p in weights:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in weights]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        pieces: dict[tuple[Any, ...], list[tuple[Tensor, ...]]] = {}
        for (index, p), gradient, buffer in zip(present, gradients, buffers, strict=True):
            dim, number = (group["parts"][index] if group["parts"] else None) or (0, 1)
            inputs_first = bool(group["transposed"] and group["transposed"][index])
            whole = (p, gradient, buffer)
            for parts in [whole] if number == 1 else zip(*(t.chunk(number, dim) for t in whole), strict=True):
                key = (parts[0].shape, p.dtype, p.device, inputs_first)
                pieces.setdefault(key, []).append(parts)
        for (shape, _, device, inputs_first), equal in pieces.items():
            dtype = self.products(shape, device) if callable(self.products) else self.products
            size = max(1, BATCHED_NUMBERS // shape.numel())
            for start in range(0, len(equal), size):
                some = equal[start : start + size]
                targets, slopes, means = (list(column) for column in zip(*some, strict=True))
                look_ahead = torch.stack(torch._foreach_lerp(slopes, means, group["momentum"]))
                made = self._scaled(orthogonalise(look_ahead, self.ns_steps, dtype), inputs_first)
                updates = list(made.to(targets[0].dtype).unbind())
                torch._foreach_add_(targets, updates, alpha=-group["lr"])

    def _scaled(self, update: Tensor, transposed: bool) -> Tensor:
        outputs, inputs = reversed(update.shape[-2:]) if transposed else update.shape[-2:]
        if self.scale == "original":
            return update * max(1.0, outputs / inputs) ** 0.5
        return update * 0.2 * max(outputs, inputs) ** 0.5


def hidden_matrices(model: nn.Module) -> dict[str, tuple[tuple[int, int] | None, bool]]:
    """The weights that Muon trains, by name: (how a fused one is split, or None; whether it is stored inputs first)."""
    found = {}
    for blocks in find_blocks(model):
        for name, module in block_linears(blocks).items():
            inputs_first = isinstance(module, Conv1D)
            number = FUSED.get(name.rpartition(".")[2])
            # Only equal parts can be told apart by their number; grouped queries in one matrix stay whole.
            shape: Any = module.weight.shape
            width = shape[1] if inputs_first else shape[0]
            equal = number is not None and width == number * (shape[0] if inputs_first else shape[1])
            found[f"{name}.weight"] = ((1 if inputs_first else 0, number) if equal else None, inputs_first)
    return found


def muon_groups(
    groups: list[dict[str, Any]], model: nn.Module, lr: float, adamw_lr: float | None = None
) -> list[dict[str, Any]]:
    """Splits the trainer's groups into Muon's and AdamW's. A group's own rate counts as a share of `adamw_lr`."""
    hidden = hidden_matrices(model)
    parts = split(groups, lambda name, p: p.ndim == 2 and name.removeprefix("module.") in hidden)
    for part in parts:
        names = part.pop("names")
        part["muon"] = part.pop("chosen")
        if part["muon"]:
            part["lr"] = lr * part["lr"] / adamw_lr if adamw_lr and "lr" in part else lr
            part["parts"] = [hidden[name.removeprefix("module.")][0] for name in names]
            part["transposed"] = [hidden[name.removeprefix("module.")][1] for name in names]
    return parts


@register(
    "muon",
    title="Muon",
    section="optimizers",
    sources=[
        Paper("Jordan et al.", 2024, "kellerjordan.github.io/posts/muon"),
        Paper("Liu et al.", 2025, "arXiv:2502.16982"),
    ],
    exact=False,
    claims=("optimizer",),
    conflicts_with={"lora": "adapters are thin factors, whose orthogonalised update is not that of the weight"},
    bench_order=62,
)
@dataclass(kw_only=True)
class Muon(Method):
    """Orthogonalised momentum for hidden matrices, AdamW for the rest (at the run's learning rate)."""

    lr: float = 0.02
    """Learning rate of the matrices; with scale `match_rms`, that of AdamW fits."""
    momentum: float = 0.95
    """Momentum of the matrices."""
    scale: Literal["original", "match_rms"] = "original"
    """How the size of an update depends on the shape of its matrix."""
    ns_steps: int = 5
    """Newton-Schulz steps: fewer are cheaper, and leave the update further from orthogonal."""
    products: Literal["auto", "float32", "bfloat16"] = "auto"
    """What Newton-Schulz's products run in; auto is bfloat16 where the device has units for it."""

    def __post_init__(self) -> None:
        if self.ns_steps < 1:
            raise ValueError(f"ns_steps must be at least 1, got {self.ns_steps}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        refuse_sharding("muon", args)
        return {}

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        model = ctx.model
        parts = muon_groups(groups, model, self.lr, ctx.args.learning_rate)
        if not any(part["muon"] for part in parts):
            raise NotApplicable(
                f"muon: no hidden matrix of {type(model).__name__} is trained", fix="use adamw, or unfreeze the blocks"
            )
        return MuonWithAdamW(
            parts,
            lr=ctx.args.learning_rate,
            momentum=self.momentum,
            betas=(ctx.args.adam_beta1, ctx.args.adam_beta2),
            eps=ctx.args.adam_epsilon,
            scale=self.scale,
            products=products_for if self.products == "auto" else getattr(torch, self.products),
            ns_steps=self.ns_steps,
        )
