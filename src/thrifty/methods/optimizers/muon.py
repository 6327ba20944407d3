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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from thrifty.architecture import block_linears, find_blocks
from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods.optimizers._adam import ByParameter, adamw_step
from thrifty.methods.optimizers._groups import refuse_sharding, split

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
FUSED = {"c_attn": 3, "query_key_value": 3, "qkv": 3, "qkv_proj": 3, "Wqkv": 3}


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrix with singular values around 1 (0.68 to 1.13), by Newton-Schulz steps.

    Args:
        matrix: Shape (rows, columns).
        steps: Newton-Schulz steps.

    Returns:
        float32 on a CPU, where products in bfloat16 are slow; bfloat16 products elsewhere.
    """
    a, b, c = COEFFICIENTS
    x = matrix.float() if matrix.device.type == "cpu" else matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).float()


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
    ) -> None:
        self.scale = scale
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

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        if group["muon"]:
            self._muon(p, gradient, group, index)
        else:
            adamw_step(p, gradient, self.state[p], group)

    def _muon(self, p: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        buffer.lerp_(gradient, 1 - group["momentum"])
        look_ahead = gradient.lerp(buffer, group["momentum"])
        fused = group["parts"][index] if group["parts"] else None
        stored_as_inputs_first = bool(group["transposed"] and group["transposed"][index])
        pieces = look_ahead.chunk(fused[1], dim=fused[0]) if fused else (look_ahead,)
        updates = [self._scaled(orthogonalise(piece), stored_as_inputs_first) for piece in pieces]
        update = torch.cat(updates, dim=fused[0]) if fused else updates[0]
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(p.dtype), alpha=-group["lr"])

    def _scaled(self, update: Tensor, transposed: bool) -> Tensor:
        outputs, inputs = reversed(update.shape) if transposed else update.shape
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
        )
