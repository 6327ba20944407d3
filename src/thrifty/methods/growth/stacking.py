"""Progressive stacking.

What it does: trains a shallow model first, copies its stack of blocks on top of itself at set points of the run, and
goes on, until the model has its full depth. Optimizer states are copied with the blocks.

Helps: pre-training from scratch: the first stages are cheaper by the share of blocks that do not exist yet.
Does not help: fine-tuning; the loss jumps at each doubling, and Kaddour et al. (2023) saw no gain over a fully
decayed baseline at a fixed budget.
Limits: training from scratch; the blocks must be equal. Doubling is not function preserving.
Source: Gong et al., "Efficient Training of BERT by Progressively Stacking", ICML 2019.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from thrifty.architecture import copy_layer, main_blocks, set_layers
from thrifty.method import Method, NotApplicable, Paper, Phase, register


def stack(model: nn.Module, depth: int) -> dict[str, str | None]:
    """Grows (or cuts) the model's main stack in place to `depth` blocks by repeating it, for one's own loop.

    Block `i` of the new stack is block `i` for the old ones and a copy of block `i % old depth` above.

    Returns:
        {new parameter name: old parameter name}, to carry optimizer states over.
    """
    blocks = main_blocks(model, "stacking")
    old = list(blocks)
    layers = [old[i] if i < len(old) else copy_layer(old[i % len(old)]) for i in range(depth)]
    set_layers(model, blocks, layers)
    mapping: dict[str, str | None] = {}
    for i, layer in enumerate(layers):
        for name, _ in layer.named_parameters():
            mapping[f"{blocks.prefix}.{i}.{name}"] = f"{blocks.prefix}.{i % len(old)}.{name}"
    return mapping


def stages(depth: int, start: int, boundaries: Sequence[float], total_steps: int) -> list[tuple[int, int]]:
    """The schedule: (first step, number of blocks) of each stage.

    >>> stages(12, 3, (0.125, 0.3), 400)
    [(0, 3), (50, 6), (120, 12)]
    """
    plan, layers = [(0, start)], start
    for fraction in boundaries:
        if layers >= depth:
            break
        layers = min(2 * layers, depth)
        plan.append((max(round(fraction * total_steps), plan[-1][0] + 1), layers))
    if layers < depth:
        plan[-1] = (plan[-1][0], depth)
    return plan


@register(
    "stacking",
    title="Progressive stacking",
    section="growth",
    sources=[Paper("Gong et al.", 2019, "ICML 2019, PMLR 97:2337")],
    exact=False,
    claims=("growth",),
    preset={"start_layers": 1, "boundaries": [0.2]},
    # It cuts the model down first, and the others work on the blocks that are left.
    runs_before=("layer-drop", "section:initialization", "section:sparsity"),
    bench_order=70,
)
@dataclass(kw_only=True)
class Stacking(Method):
    """Grows the model by doubling its stack of blocks."""

    start_layers: int | None = None
    """Blocks at the start; None is a quarter of the full depth."""
    boundaries: tuple[float, ...] = (0.125, 0.3)
    """Points of the run, as shares of its steps, at which the stack doubles (the last one reaches the full depth)."""
    optimizer_state: str = "copy"
    """copy: blocks inherit the states of those they are copied from; reset: fresh states, as in the paper."""

    depth: int = field(default=0, init=False, repr=False)
    plan: list[tuple[int, int]] = field(default_factory=list, init=False, repr=False)
    layers: int = field(default=0, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.optimizer_state not in ("copy", "reset"):
            raise ValueError(f"optimizer_state is 'copy' or 'reset', got {self.optimizer_state!r}")
        if self.start_layers is not None and self.start_layers < 1:
            raise ValueError(f"start_layers must be at least 1, got {self.start_layers}")
        if not self.boundaries:
            raise ValueError("boundaries must name at least one point of the run, or the model would stay shallow")
        if list(self.boundaries) != sorted(self.boundaries) or not all(0 < b < 1 for b in self.boundaries):
            raise ValueError(f"boundaries must rise between 0 and 1, got {list(self.boundaries)}")

    def _start(self, depth: int) -> int:
        return self.start_layers or max(1, depth // 4)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.ctx = ctx
        self.depth = len(main_blocks(model, "stacking"))
        start = self._start(self.depth)
        if start >= self.depth:
            raise NotApplicable(
                f"stacking: the model has {self.depth} blocks, so there is nothing to grow",
                key="methods.stacking.start_layers",
                value=start,
                fix=f"set it below {self.depth}",
            )
        self.plan = stages(self.depth, start, self.boundaries, ctx.total_steps)
        if self.plan[-1][0] >= ctx.total_steps:
            raise NotApplicable(
                f"stacking: the run has {ctx.total_steps} steps, too few to reach the full depth",
                key="methods.stacking.boundaries",
                value=list(self.boundaries),
                fix="train longer, or start deeper",
            )
        self.layers = start
        stack(model, start)
        return model

    def phases(self, model_config: Any, total_steps: int) -> list[Phase]:
        depth = model_config.num_hidden_layers
        plan = [*stages(depth, self._start(depth), self.boundaries, total_steps), (total_steps, 0)]

        return [
            Phase(steps=after - first, description=f"{layers} layers", depth=layers / depth)
            for (first, layers), (after, _) in itertools.pairwise(plan)
        ]

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        due = [layers for first, layers in self.plan if first == state.global_step]
        if not due or due[0] == self.layers or state.global_step == 0:
            return
        self.layers = due[0]
        model = kw["model"]
        mapping = stack(model, self.layers)
        if self.optimizer_state == "reset":
            mapping = dict.fromkeys((name for name, _ in model.named_parameters()), None)
        self.ctx.replace_model(model, mapping)

    def state_dict(self) -> dict[str, Any]:
        return {"layers": self.layers, "plan": [list(stage) for stage in self.plan], "depth": self.depth}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.layers, self.depth = state["layers"], state["depth"]
        self.plan = [(first, layers) for first, layers in state["plan"]]

    def restore_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if len(main_blocks(model, "stacking")) != self.layers:
            stack(model, self.layers)
        return model
