"""Progressive layer dropping.

What it does: skips whole blocks at random, more of them as training goes on and the deeper they are. A skipped block
runs no kernel; the branches of the others are scaled up so that the expected output stays.

Helps: pre-training of deep pre-norm models: less time a step (about a quarter at the end of the schedule, for theta
0.5).
Does not help: short fine-tuning; and Kaddour et al. (2023) saw no gain over a fully decayed baseline at a fixed
budget.
Limits: pre-norm models only: post-norm ones (BERT) diverge, so they are refused. The gates of a step are equal on all
processes and micro-batches.
Source: Zhang and He, "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping",
NeurIPS 2020.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thrifty.architecture import branch_outputs, is_post_norm, main_blocks
from thrifty.method import Method, NotApplicable, Paper, Phase, register
from thrifty.methods.growth._gates import Gate, keep_probability


def theta_bar(step: int, total_steps: int, theta: float = 0.5, gamma: float | None = None) -> float:
    """The schedule of the keep probability: 1 at the start, falling to `theta`.

    >>> [round(theta_bar(t, 1000), 4) for t in (0, 10, 50, 100)]
    [1.0, 0.6839, 0.5034, 0.5]
    """
    rate = 100 / total_steps if gamma is None else gamma
    return (1 - theta) * math.exp(-rate * step) + theta


class LayerDropper:
    """Gates on all blocks of a model, for one's own loop: call `set_step` before each optimizer step.

    Args:
        model: A pre-norm Hugging Face model.
        total_steps: Length of the run.
        theta: Keep probability at the end of the schedule (mean over depth is higher).
        gamma: Speed of the schedule; None is 100 / total_steps.

    Raises:
        NotApplicable: The model is post-norm, or its blocks are not recognised.
    """

    def __init__(self, model: nn.Module, total_steps: int, theta: float = 0.5, gamma: float | None = None) -> None:
        self.total_steps, self.theta, self.gamma = total_steps, theta, gamma
        self.keep_one = False
        blocks = main_blocks(model, "layer-drop")
        if is_post_norm(blocks.layers[0]):
            raise NotApplicable(
                f"layer-drop: {type(model).__name__} normalises after the residual addition, and diverges when blocks "
                "are skipped",
                fix="use a pre-norm model (Llama, GPT-2, ViT, ...), or remove layer-drop",
            )
        self.gates = [Gate(block, branch_outputs(block, "layer-drop")) for block in blocks]

    def set_step(self, step: int, rng: torch.Generator) -> None:
        """Draws the gates of this step; `rng` must be equal on all processes."""
        now = theta_bar(step, self.total_steps, self.theta, self.gamma)
        draws = torch.rand(len(self.gates), generator=rng).tolist()
        for index, (gate, draw) in enumerate(zip(self.gates, draws, strict=True), start=1):
            gate.probability = keep_probability(index, len(self.gates), now)
            gate.keep = draw < gate.probability
        if self.keep_one and not any(gate.keep for gate in self.gates):
            self.gates[0].keep = True

    def remove(self) -> None:
        """Gives the model its own blocks back."""
        for gate in self.gates:
            gate.remove()


@register(
    "layer-drop",
    title="Progressive layer dropping",
    section="growth",
    sources=[Paper("Zhang and He", 2020, "arXiv:2010.13369")],
    exact=False,
    claims=("layer-schedule",),
    preset={"theta": 0.1, "gamma": 10.0},
    bench_order=72,
)
@dataclass(kw_only=True)
class LayerDrop(Method):
    """Skips blocks at random, on a schedule."""

    theta: float = 0.5
    """Keep probability of the deepest block at the end of the schedule."""
    gamma: float | None = None
    """Speed of the schedule: exp(-gamma * step); None is 100 / total steps."""

    dropper: LayerDropper | None = field(default=None, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.theta <= 1:
            raise ValueError(f"theta must be above 0 and at most 1, got {self.theta}")
        if self.gamma is not None and self.gamma < 0:
            raise ValueError(f"gamma must not be negative, got {self.gamma}")

    def phases(self, model_config: Any, total_steps: int) -> list[Phase]:
        layers, pieces = model_config.num_hidden_layers, min(10, total_steps)
        bounds = [round(total_steps * i / pieces) for i in range(pieces + 1)]

        def kept(step: float) -> float:
            now = theta_bar(round(step), total_steps, self.theta, self.gamma)
            return sum(keep_probability(layer, layers, now) for layer in range(1, layers + 1)) / layers

        return [
            Phase(steps=stop - start, description=f"steps {start} to {stop}", depth=kept((start + stop) / 2))
            for start, stop in itertools.pairwise(bounds)
        ]

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        # A skipped block gets no gradient in that step, which DDP has to be told.
        return {"ddp_find_unused_parameters": True} if ctx.world_size > 1 else {}

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.ctx = ctx
        self.dropper = LayerDropper(model, ctx.total_steps, self.theta, self.gamma)
        return model

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        # Where only the blocks are trained (adapters), a step that skips all of them would have nothing to train.
        assert self.dropper is not None
        inside = {id(p) for gate in self.dropper.gates for p in gate.block.parameters()}
        self.dropper.keep_one = not any(p.requires_grad and id(p) not in inside for p in kw["model"].parameters())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        assert self.dropper is not None
        self.dropper.set_step(state.global_step, self.ctx.rng("layer-drop", step=state.global_step))

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        blocks = main_blocks(model, "layer-drop")
        gates = [vars(block).get("forward") for block in blocks]
        if all(isinstance(gate, Gate) for gate in gates):
            assert self.dropper is not None
            self.dropper.gates = gates  # type: ignore[assignment]
        else:
            self.dropper = LayerDropper(model, ctx.total_steps, self.theta, self.gamma)

    def restore_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.on_replace(model, {}, ctx)
        return model

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        assert self.dropper is not None
        self.dropper.remove()
        return model
