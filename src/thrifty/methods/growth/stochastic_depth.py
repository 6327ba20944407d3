"""Stochastic depth.

What it does: leaves blocks (or, for each sample on its own, residual branches) out at random in training, the deeper
the more often, and scales those that stay so that the expected output is the same. Evaluation runs the whole model.

Helps: regularisation of deep networks, above all vision Transformers; with mode batch also speed: about a quarter of
the block passes at survival 0.5.
Does not help: short fine-tuning and small data with few epochs; in mode sample no time is saved.
Limits: mode batch is for pre-norm models: post-norm ones (BERT) would lose a normalisation with the block. Sizes and
checkpoints are those of the plain model.
Source: Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from thrifty.architecture import branch_outputs, is_post_norm, main_blocks
from thrifty.method import Batch, Method, NotApplicable, Paper, Phase, register
from thrifty.methods.growth._gates import BranchMask, Gate, keep_probability

Mode = Literal["sample", "batch"]


class StochasticDepthGates:
    """Gates on all blocks of a model, for one's own loop: call `draw` before each forward pass.

    Args:
        model: A Hugging Face model.
        survival: Probability that the last block stays; the others are on a line from 1.
        mode: `sample` leaves out branches for each sample on its own, `batch` whole blocks for all samples.

    Raises:
        NotApplicable: The blocks are not recognised, or the model is post-norm in mode batch.
    """

    def __init__(self, model: nn.Module, survival: float = 0.5, mode: Mode = "sample") -> None:
        self.survival, self.mode = survival, mode
        self.keep_one = False
        blocks = main_blocks(model, "stochastic-depth")
        if mode == "batch" and is_post_norm(blocks.layers[0]):
            raise NotApplicable(
                f"stochastic-depth: {type(model).__name__} normalises after the residual addition, and would lose that "
                "with the block",
                key="methods.stochastic-depth.mode",
                value=mode,
                fix="use mode sample",
            )
        self.gates: list[Any] = []
        for block in blocks:
            present = vars(block).get("forward" if mode == "batch" else "branch_mask")
            if not isinstance(present, Gate | BranchMask):
                kind = Gate if mode == "batch" else BranchMask
                present = kind(block, branch_outputs(block, "stochastic-depth"))
            self.gates.append(present)

    @property
    def survivals(self) -> list[float]:
        """The probability with which each block stays."""
        return [keep_probability(l, len(self.gates), self.survival) for l in range(1, len(self.gates) + 1)]  # noqa: E741

    def draw(self, rng: torch.Generator, rows: int = 1, *, rank: int = 0, world_size: int = 1) -> None:
        """Draws what is left out.

        Args:
            rng: Equal on all processes.
            rows: Samples of the coming pass on each process; mode batch draws once for all of them.
            rank: This process.
            world_size: Number of processes, each with as many rows.
        """
        if self.mode == "batch":
            draws = torch.rand(len(self.gates), generator=rng).tolist()
            for gate, survival, draw in zip(self.gates, self.survivals, draws, strict=True):
                gate.probability, gate.keep = survival, draw < survival
            if self.keep_one and not any(gate.keep for gate in self.gates):
                self.gates[0].keep = True
            return
        branches = [len(gate.branches) for gate in self.gates]
        # Row by row, so that the draws of a step do not depend on how it is cut into micro-batches and processes.
        draws = torch.rand(world_size, rows, sum(branches), generator=rng)[rank].T
        for gate, survival, part in zip(self.gates, self.survivals, draws.split(branches), strict=True):
            gate.factors = (part < survival) / survival

    def remove(self) -> None:
        """Gives the model its own blocks back."""
        for gate in self.gates:
            gate.remove()


@register(
    "stochastic-depth",
    title="Stochastic depth",
    section="growth",
    sources=[Paper("Huang et al.", 2016, "arXiv:1603.09382")],
    exact=False,
    claims=("layer-schedule",),
    preset={"survival": 0.3},
)
@dataclass(kw_only=True)
class StochasticDepth(Method):
    """Leaves blocks or branches out at random."""

    survival: float = 0.5
    """Probability with which the last block stays; the others are on a line from 1."""
    mode: Mode = "sample"
    """sample: branches for each sample on its own; batch: whole blocks, which saves their time."""

    gates: StochasticDepthGates | None = field(default=None, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)
    _rng: tuple[int, torch.Generator] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.survival <= 1:
            raise ValueError(f"survival must be above 0 and at most 1, got {self.survival}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        # A skipped block gets no gradient in that step, which DDP has to be told.
        return {"ddp_find_unused_parameters": True} if self.mode == "batch" and ctx.world_size > 1 else {}

    def phases(self, model_config: Any, total_steps: int) -> list[Phase]:
        if self.mode == "sample":
            return []
        layers = model_config.num_hidden_layers
        mean = sum(keep_probability(i, layers, self.survival) for i in range(1, layers + 1)) / layers
        return [Phase(steps=total_steps, description=f"{mean:.0%} of the blocks", depth=mean)]

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.ctx = ctx
        self.gates = StochasticDepthGates(model, self.survival, self.mode)
        return model

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        # Where only the blocks are trained (adapters), a step that skips all of them would have nothing to train.
        assert self.gates is not None
        inside = {id(p) for gate in self.gates.gates for p in gate.block.parameters()}
        self.gates.keep_one = not any(p.requires_grad and id(p) not in inside for p in kw["model"].parameters())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        assert self.gates is not None
        self._rng = None  # also after a pass outside of the steps
        if self.mode == "batch":
            self.gates.draw(self._generator())

    def _generator(self) -> torch.Generator:
        step = self.ctx.step
        if self._rng is None or self._rng[0] != step:
            self._rng = (step, self.ctx.rng("stochastic-depth", step=step))
        return self._rng[1]

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        if self.mode == "batch" or ctx.planning:
            return compute_loss

        def masked(model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Any:
            assert self.gates is not None
            rows = next(len(v) for v in inputs.values() if torch.is_tensor(v) and v.dim() > 0)
            self.gates.draw(self._generator(), rows, rank=ctx.rank, world_size=ctx.world_size)
            return compute_loss(model, inputs, num_items_in_batch)

        return masked

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        keep_one = self.gates is not None and self.gates.keep_one
        self.gates = StochasticDepthGates(model, self.survival, self.mode)
        self.gates.keep_one = keep_one

    def restore_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.on_replace(model, {}, ctx)
        return model

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        assert self.gates is not None
        self.gates.remove()
        return model
