"""LiGO: a learned growth operator.

What it does: trains a narrower and shallower model first. When it grows, the full model's weights are linear maps of
the small one's: mixtures of blocks, with widening matrices that all parameters of an axis share. These maps are trained
for some steps on the task before the full model takes over.

Helps: pre-training from scratch: the first part of the run is cheaper, and the grown model starts lower than a copy.
Does not help: fine-tuning; and Kaddour et al. (2023) saw no gain of growing over a fully decayed baseline at a fixed
budget.
Costs: `steps` passes of the full model at the growth, and the memory of full and small model together.
Limits: training from scratch. Learned are the added rows of the widening matrices (the old units stay themselves) and
the mixture of blocks of each parameter. What sums over added units is divided as Net2Net does, so that the maps begin
near a copy that keeps the function in width. All parameters start with fresh optimizer states.
Source: Wang et al., "Learning to Grow Pretrained Models for Efficient Transformer Training", ICLR 2023.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from thrifty.architecture import main_blocks
from thrifty.method import Batch, Paper, register
from thrifty.methods.growth._grow import BEFORE, CONFLICTS, GrowOnce, ParameterMap
from thrifty.methods.growth._width import Axis, Pair, growing_axes, is_tied, last_norm, narrowed, unit_maps


class GrowthOperator(nn.Module):
    """Linear maps from the parameters of a small model to those of a full one.

    Args:
        small: The trained model.
        full: A model of the same class with more units or blocks.
        noise: Width of the uniform noise on the copies that the maps begin with; 0 begins with exact copies.
        rng: For noise and drawn units.
    """

    def __init__(self, small: Any, full: Any, noise: float = 0.03, rng: torch.Generator | None = None) -> None:
        super().__init__()
        rng = rng or torch.Generator().manual_seed(0)
        blocks = main_blocks(full, "ligo")
        self.prefix, self.depth, self.layers = blocks.prefix, len(blocks), len(main_blocks(small, "ligo"))
        self.names = [name for name, _ in full.named_parameters()]
        self.axes = growing_axes(small, full, "ligo")
        self.scaled = last_norm(full) if is_tied(full) else None
        self.hidden: Pair = (small.config.hidden_size, full.config.hidden_size)
        device = next(small.parameters()).device

        def normalised(copies: Tensor) -> nn.Parameter:
            noisy = copies + noise * torch.rand(copies.shape, generator=rng)
            return nn.Parameter((noisy / noisy.sum(dim=1, keepdim=True)).to(device))

        self.rows = nn.ParameterDict()
        for pair, units in unit_maps(small.config, full.config, rng).items():
            self.rows[_key(pair)] = normalised(nn.functional.one_hot(units.index[units.old :], units.old).float())
        sources = torch.arange(self.depth) % self.layers
        self.mixtures = nn.ParameterDict()
        for name in self.names:
            if name.startswith(f"{self.prefix}.0."):
                rest = name.removeprefix(f"{self.prefix}.0.")
                self.mixtures[rest.replace(".", "/")] = normalised(nn.functional.one_hot(sources, self.layers).float())

    def forward(self, small: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The full model's parameters by name, from the small model's."""
        found = {}
        for name in self.names:
            if not name.startswith(f"{self.prefix}."):
                found[name] = self._widen(small[name], self.axes[name])
                if self.scaled is not None and name.startswith(f"{self.scaled}.") and _key(self.hidden) in self.rows:
                    found[name] = found[name] / self._copies(self.hidden)  # a tied head sums over copies
                continue
            index, _, rest = name[len(self.prefix) + 1 :].partition(".")
            weights = self.mixtures[rest.replace(".", "/")][int(index)]
            mixed: Any = sum(weights[k] * small[f"{self.prefix}.{k}.{rest}"] for k in range(self.layers))
            found[name] = self._widen(mixed, self.axes[f"{self.prefix}.0.{rest}"])
        return found

    def _matrix(self, pair: Pair) -> Tensor:
        """Shape (new, old): the old units, and below them the learned rows."""
        rows = self.rows[_key(pair)]
        return torch.cat([torch.eye(pair[0], device=rows.device), rows])

    def _copies(self, pair: Pair) -> Tensor:
        matrix = self._matrix(pair).abs()
        return matrix @ matrix.sum(dim=0)

    def _widen(self, tensor: Tensor, axes: tuple[Axis | None, ...]) -> Tensor:
        for axis, kind in enumerate(axes):
            if kind is None:
                continue
            matrix = self._matrix(kind.pair).to(tensor.dtype)
            if kind.incoming:
                matrix = matrix / matrix.abs().sum(dim=0)
            dims: Any = ([1], [axis])
            parts = [torch.tensordot(matrix, part, dims=dims) for part in tensor.chunk(kind.parts, dim=axis)]
            tensor = torch.cat([part.movedim(0, axis) for part in parts], dim=axis)
        return tensor


def learn(
    operator: GrowthOperator,
    small: nn.Module,
    full: nn.Module,
    batches: Iterable[Batch],
    *,
    steps: int = 100,
    lr: float = 0.01,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[float]:
    """Trains the maps on the task: momentum SGD on the loss of the full model that they make.

    Returns:
        The loss of each step.
    """
    old = {name: p.detach() for name, p in small.named_parameters()}
    optimizer = torch.optim.SGD(operator.parameters(), lr=lr, momentum=0.9)
    losses = []
    for batch in itertools.islice(itertools.cycle(batches), steps):
        optimizer.zero_grad()
        with autocast():
            loss = functional_call(full, operator(old), kwargs=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(operator.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def instantiate(operator: GrowthOperator, small: nn.Module, full: nn.Module) -> None:
    """Writes the weights that the maps make into the full model."""
    weights = operator(dict(small.named_parameters()))
    for name, p in full.named_parameters():
        p.copy_(weights[name])


def _key(pair: Pair) -> str:
    return f"{pair[0]}to{pair[1]}"


@register(
    "ligo",
    title="Learned growth (LiGO)",
    section="growth",
    sources=[Paper("Wang et al.", 2023, "arXiv:2303.00980")],
    exact=False,
    claims=("growth",),
    conflicts_with=CONFLICTS,
    # The maps are learned on batches of the process's own size.
    micro_batch_invariant=False,
    preset={"at": 0.34, "steps": 2},
    runs_before=BEFORE,
)
@dataclass(kw_only=True)
class Ligo(GrowOnce):
    """Growth by linear maps that are learned on the task."""

    steps: int = 100
    """Steps for which the maps are trained."""
    lr: float = 0.01
    """Learning rate of the maps."""
    noise: float = 0.03
    """Width of the uniform noise on the copies that the maps begin with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, got {self.steps}")
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")
        if self.noise < 0:
            raise ValueError(f"noise must not be negative, got {self.noise}")

    def small_config(self, config: Any) -> Any:
        return narrowed(config, self.width, self.layers_at_start(config.num_hidden_layers), self.name)

    def grow(self, small: Any, full: Any, ctx: Any) -> ParameterMap:
        operator = GrowthOperator(small, full, self.noise, ctx.rng("ligo"))
        if self.steps:
            batches = ctx.batches(min(self.steps, 100), full)
            learn(operator, small, full, batches, steps=self.steps, lr=self.lr,
                  autocast=ctx.trainer.accelerator.autocast)  # fmt: skip
        instantiate(operator, small, full)
        return dict.fromkeys(operator.names)
