"""Data loading beside the training step.

What it does: measures how long a batch takes to make and how long a step takes to compute, and starts as many loader
processes as are needed to have the next batch ready in time, with prefetching and pinned memory. It reports the share
of the time in which training waited for data.

Helps: samples that are decoded or tokenized while training runs, on a fast device.
Does not help: tokens that lie ready: then no process is started, since it would cost more than it hides.
Limits: at most one process a spare core; on a CPU they take cores from the computation. On an accelerator the host runs
ahead, so that the reported share is an upper bound. The order of the samples does not depend on the number of
processes; random changes inside a data set may.
Source: PyTorch, torch.utils.data; Hugging Face, single-GPU guide, 2024.
Library: torch.utils.data.DataLoader through transformers.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thrifty.errors import InputError
from thrifty.method import Batch, Method, NotApplicable, Paper, register
from thrifty.safety.oom import is_oom, rng_snapshot, split_batch

SAMPLED = 4  # batches that are made to measure
NEGLIGIBLE = 0.02  # share of a step below which making a batch is not worth a process


def choose_workers(batch_seconds: float, step_seconds: float, spare_cores: int) -> int:
    """Loader processes that make batches as fast as they are used, as far as there are cores.

    Args:
        batch_seconds: What one core needs to make a batch.
        step_seconds: What the device needs to compute it.
        spare_cores: Cores that nothing else uses.

    >>> [choose_workers(seconds, 1.0, 4) for seconds in (0.001, 0.5, 2.5, 9.0)]
    [0, 1, 3, 4]
    """
    if batch_seconds <= NEGLIGIBLE * step_seconds:
        return 0
    return min(math.ceil(batch_seconds / step_seconds), spare_cores)


def spare_cores(processes: int = 1) -> int:
    """Cores of this machine that each of so many training processes may use besides its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, cores // processes - 1)


def batch_seconds(dataset: Any, collate: Callable[[list[Batch]], Batch], batch_size: int) -> float:
    """Seconds that one core needs for a batch: the mean of a few. The random state is left as it was."""
    size = min(batch_size, len(dataset))
    count = max(1, min(SAMPLED, len(dataset) // size))
    restore = rng_snapshot()
    try:
        start = time.perf_counter()
        for number in range(count):
            collate([dataset[number * size + i] for i in range(size)])
        return (time.perf_counter() - start) / count
    finally:
        restore()


def step_seconds(model: nn.Module, batch: Batch, *, repeat: int = 2) -> float:
    """Seconds of a forward and backward pass: the shortest of a few after a first one.

    Weights, buffers, gradients and the random state are left as they were. A batch that does not fit is halved.
    """
    restore, modes = rng_snapshot(), [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    times, parts = [], 1
    try:
        model.train()
        while len(times) <= repeat:
            start = time.perf_counter()
            try:
                model(**batch).loss.backward()
                _wait(next(model.parameters()).device)
            except RuntimeError as error:
                if not is_oom(error):
                    raise
                full = True
            else:
                times.append(parts * (time.perf_counter() - start))
                full = False
            model.zero_grad(set_to_none=True)
            if full:  # outside of `except`: the traceback holds the activations
                batch, parts, times = split_batch(batch, 2)[0], 2 * parts, []
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for module, mode in modes:
            module.training = mode
        restore()
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class WaitClock:
    """Adds up the time spent inside a function, and the time since its first call."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._begin: float | None = None
        self._end = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function that fetches data."""

        def fetch(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._begin = start if self._begin is None else self._begin
            try:
                return function(*args, **kwargs)
            finally:
                self._end = time.perf_counter()
                self.waited += self._end - start

        return fetch

    @property
    def share(self) -> float:
        """Share of the time from the first fetch to the last in which nothing else was done."""
        return self.waited / (self._end - self._begin) if self._begin is not None and self._end > self._begin else 0.0


@register(
    "data-loading",
    title="Data loading beside the step",
    section="data_loading",
    sources=[Paper("Hugging Face", 2024, "single-GPU guide"), Paper("PyTorch", 2019, "arXiv:1912.01703")],
    exact=True,
    library="torch.utils.data",
    preset={"num_workers": 1},
)
@dataclass(kw_only=True)
class DataLoading(Method):
    """Loader processes, as many as the step needs."""

    num_workers: int | None = None
    """Loader processes; None measures a few batches and steps and chooses."""
    prefetch_factor: int = 2
    """Batches that each process has ready."""

    workers: int | None = field(default=None, init=False, repr=False)
    measured: tuple[float, float] | None = field(default=None, init=False, repr=False)
    clock: WaitClock | None = field(default=None, init=False, repr=False)
    _ctx: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 0:
            raise ValueError(f"num_workers must not be negative, got {self.num_workers}")
        if self.prefetch_factor < 1:
            raise ValueError(f"prefetch_factor must be at least 1, got {self.prefetch_factor}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        if ctx.planning:  # loading happens on the host
            return {}
        for key in ("dataloader_num_workers", "dataloader_prefetch_factor"):
            if getattr(args, key):
                raise InputError(
                    "is set twice: by you and by the method 'data-loading'",
                    key=key,
                    value=getattr(args, key),
                    fix=f"remove `{key}`, or the method 'data-loading'",
                )
        return {}

    def attach(self, accelerator: Any, ctx: Any) -> None:
        self._ctx = ctx
        self._use(self._measure(ctx) if self.num_workers is None else self.num_workers)
        self.clock = WaitClock()
        ctx.trainer.get_batch_samples = self.clock.timed(ctx.trainer.get_batch_samples)

    def _measure(self, ctx: Any) -> int:
        data, model = ctx.data, ctx.model
        if data is None or not hasattr(data.train_dataset, "__getitem__") or not hasattr(data.train_dataset, "__len__"):
            raise NotApplicable(
                "data-loading: the samples of an iterable data set cannot be looked at before training",
                key="methods.data-loading.num_workers",
                fix="give a number",
            )
        size = ctx.args.train_batch_size
        kept = _Inputs(data.train_dataset, ctx, model)
        making = batch_seconds(kept, data.data_collator, size)
        restore = rng_snapshot()
        try:
            batch = data.data_collator([kept[i] for i in range(min(size, len(kept)))])
        finally:
            restore()
        computing = step_seconds(model, ctx.to_device({k: v for k, v in batch.items() if k != "sample_id"}))
        self.measured = making, computing
        return choose_workers(making, computing, spare_cores(ctx.world_size))

    def _use(self, workers: int) -> None:
        self.workers = workers
        args = self._ctx.trainer.args
        args.dataloader_num_workers = workers
        args.dataloader_persistent_workers = workers > 0
        args.dataloader_prefetch_factor = self.prefetch_factor if workers else None

    def state_dict(self) -> dict[str, Any]:
        return {"workers": self.workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Random changes inside a data set may depend on the number of processes: it stays that of the first part.
        if self._ctx is not None and state["workers"] is not None:
            self._use(state["workers"])

    @property
    def state_per_rank(self) -> bool:
        return True

    def facts(self) -> dict[str, Any]:
        if self.clock is None:
            return {}
        found: dict[str, Any] = {"loader processes": self.workers}
        if self.measured is not None:
            found["a batch is made in"] = f"{self.measured[0]:.3g} s"
            found["and computed in"] = f"{self.measured[1]:.3g} s"
        return {**found, "waiting for data": f"{self.clock.share:.1%} of the time"}


class _Inputs:
    """A data set without the columns that the model does not take."""

    def __init__(self, dataset: Any, ctx: Any, model: nn.Module) -> None:
        self.dataset, self.ctx, self.model = dataset, ctx, model

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Batch:
        return self.ctx.only_inputs(self.dataset[index], self.model)
