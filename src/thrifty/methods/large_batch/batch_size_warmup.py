"""Batch-size warm-up.

What it does: starts with a small global batch and lets it grow in equal increments to the full one, at points of the
run that are counted in samples. A step with a smaller batch runs fewer micro-batches.

Helps: pre-training from scratch with large batches: early gradients point the same way, so that small batches learn as
much a step for less.
Does not help: fine-tuning with small batches. Samples that early steps leave out are seen by later ones, so that a
number of samples takes more steps.
Limits: the length of the run is given by max_steps, since steps hold unequal numbers of samples. On several processes
each takes its share of its own samples, so that the order differs from that of one process. The learning rate is not
changed with the batch.
Source: Brown et al., "Language Models are Few-Shot Learners", 2020; McCandlish et al., 2018; Smith et al., 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from thrifty.method import Batch, Method, NotApplicable, Paper, Phase, TrainingData, register
from thrifty.samples import join_samples, split_samples


def batch_size_at(samples: int, start: int, full: int, increment: int, ramp_samples: int) -> int:
    """The global batch of the step that begins after `samples` samples.

    >>> [batch_size_at(n, 16, 64, 16, 300) for n in (0, 99, 100, 200, 300, 10_000)]
    [16, 16, 32, 48, 64, 64]
    """
    stages = -(-(full - start) // increment)
    if stages <= 0 or samples >= ramp_samples:
        return full
    return min(full, start + increment * (samples * stages // ramp_samples))


def steps_for(total_samples: int, start: int, full: int, increment: int, ramp_samples: int) -> int:
    """Optimizer steps in which at least `total_samples` samples are seen.

    >>> steps_for(300 + 64, 16, 64, 16, 300)
    13
    """
    seen = steps = 0
    while seen < min(total_samples, ramp_samples):
        seen += batch_size_at(seen, start, full, increment, ramp_samples)
        steps += 1
    return steps + max(0, -(-(total_samples - seen) // full))


class BatchCutter:
    """Cuts a stream of micro-batches into steps of any number of samples; keeps what is left over.

    Args:
        next_batch: Gives the next micro-batch: a mapping of tensors with the batch as first dimension.
        size: Samples of a full micro-batch.
    """

    def __init__(self, next_batch: Callable[[], Batch], size: int) -> None:
        self.next_batch, self.size = next_batch, size
        self.queue: list[Batch] = []

    def take(self, samples: int) -> list[Batch]:
        """The next `samples` samples, in as few micro-batches as hold them; only the last may be smaller."""
        while len(self.queue) < samples:
            batch = self.next_batch()
            rows = max(len(v) for v in batch.values() if torch.is_tensor(v) and v.dim() > 0)
            self.queue += split_samples(batch, torch.ones(rows, dtype=torch.bool))
        taken, self.queue = self.queue[:samples], self.queue[samples:]
        return [join_samples(taken[i : i + self.size]) for i in range(0, samples, self.size)]


@register(
    "batch-size-warmup",
    title="Batch-size warm-up",
    section="large_batch",
    sources=[
        Paper("Brown et al.", 2020, "arXiv:2005.14165"),
        Paper("McCandlish et al.", 2018, "arXiv:1812.06162"),
        Paper("Smith et al.", 2018, "arXiv:1711.00489"),
    ],
    exact=False,
    claims=("draw",),
    # Each process takes the first rows of its own micro-batches.
    processes=False,
    preset={"start": 1, "ramp_samples": 4},
)
@dataclass(kw_only=True)
class BatchSizeWarmup(Method):
    """Lets the global batch grow to that of the run."""

    start: int | None = None
    """Samples of the first steps; None is a quarter of the full batch."""
    increment: int | None = None
    """Samples by which the batch grows at a time; None is as many as it starts with."""
    ramp_samples: int | None = None
    """Samples after which the batch is full; None is 0.2 x max_steps x full batch."""

    seen: int = field(default=0, init=False, repr=False)
    cutter: BatchCutter | None = field(default=None, init=False, repr=False)
    _rows: int = field(default=0, init=False, repr=False)
    _waiting: list[Batch] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        for key in ("start", "increment", "ramp_samples"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")

    def schedule(self, full: int, max_steps: int) -> tuple[int, int, int, int]:
        """Start, full batch, increment and samples of the ramp, with the defaults filled in."""
        start = self.start or max(1, full // 4)
        return start, full, self.increment or start, self.ramp_samples or max(1, round(0.2 * max_steps * full))

    def phases(self, model_config: Any, total_steps: int) -> list[Phase]:
        if self.start or self.increment or self.ramp_samples:
            return []  # numbers of samples, whose share of the batch is not known here
        quarters = (0.25, 0.5, 0.75)
        ramp = 0.2 * total_steps  # in full batches
        rising = [
            Phase(steps=max(1, round(ramp / len(quarters) / share)), description=f"{share:.0%} batch", batch=share)
            for share in quarters
        ]
        rest = max(0, total_steps - sum(phase.steps for phase in rising))
        return [*rising, Phase(steps=rest, description="full batch")]

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        full = _full_batch(args, ctx)
        if not ctx.planning and self.start is not None and self.start >= full > 1:
            raise NotApplicable(
                f"batch-size-warmup: the full batch has {full} samples, so there is nothing to grow",
                key="methods.batch-size-warmup.start",
                value=self.start,
                fix=f"set it below {full}",
            )
        return {}

    def prepare_data(self, data: TrainingData, ctx: Any) -> TrainingData:
        args = ctx.args
        if args.max_steps > 0:
            return data
        total = round(args.num_train_epochs * len(data.train_dataset))
        full = _full_batch(args, ctx)
        plan = self.schedule(full, max(1, total // full))
        raise NotApplicable(
            "batch-size-warmup: steps hold unequal numbers of samples, so epochs do not give the length of the run",
            key="max_steps",
            value=args.max_steps,
            fix=f"set max_steps: {steps_for(total, *plan)}, which sees {total} samples "
            f"({args.num_train_epochs:g} epochs)",
        )

    def draw(self, next_batch: Callable[[], Batch], count: int, ctx: Any) -> list[Batch]:
        args, world = ctx.args, ctx.world_size
        if self.cutter is None:
            self.cutter = BatchCutter(next_batch, args.train_batch_size)
            self.cutter.queue, self._waiting = self._waiting, []
        wanted = batch_size_at(self.seen, *self.schedule(_full_batch(args, ctx), args.max_steps))
        mine = max(1, wanted // world)
        self.seen += mine * world
        self._rows = mine
        batches = [ctx.to_device(batch) for batch in self.cutter.take(mine)]
        # The loop counts on `count` micro-batches. Empty ones come first: gradients are synchronised at the last.
        empty = {k: v[:0] if torch.is_tensor(v) and v.dim() > 0 else v for k, v in batches[0].items()}
        return [dict(empty) for _ in range(count - len(batches))] + batches

    def wrap_training_step(self, step: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        def sized(model: Any, inputs: Batch, num_items_in_batch: Any = None) -> Any:
            rows = max((len(v) for v in inputs.values() if torch.is_tensor(v) and v.dim() > 0), default=0)
            if rows == 0:
                return torch.zeros((), device=ctx.device)
            # What the parent divides a mean loss by, so that each sample of the step weighs the same.
            ctx.trainer.current_gradient_accumulation_steps = self._rows / rows
            return step(model, inputs, num_items_in_batch)

        return sized

    @property
    def state_per_rank(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        queue = self.cutter.queue if self.cutter is not None else self._waiting
        return {"seen": self.seen, "queue": [dict(sample) for sample in queue]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self._waiting, self.cutter = state["seen"], [dict(s) for s in state["queue"]], None


def _full_batch(args: Any, ctx: Any) -> int:
    return args.train_batch_size * args.gradient_accumulation_steps * ctx.world_size
