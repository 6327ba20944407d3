"""The peak memory of training steps: the allocator's own events on a processor, the allocator's own maximum on CUDA."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from thrifty.planner.measure import living_storages


class PeakMemory(TrainerCallback):
    """Records the highest memory of any step but the first, in which nothing has its final size yet.

    On a processor every step is profiled: what lives when it begins (weights, optimizer state, the methods' own
    tensors, the batch), plus the highest sum of the allocations and frees in it. So it must not time steps as well.

    Args:
        device: Where the run is.
        before: What `living_storages` found before the run began: constants of libraries are not the run's.
    """

    def __init__(self, device: torch.device, before: Mapping[int, int] | None = None) -> None:
        self.device = device
        self._before = before or {}
        self.peak: int | None = None
        self._base = 0
        self._profile: torch.profiler.profile | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device.type != "cpu" or state.global_step == 0:
            return
        gc.collect()
        self._base = sum(size for key, size in living_storages().items() if key not in self._before)
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profile is not None:
            from thrifty.planner._private import profiled_allocations

            self._profile.__exit__(None, None, None)
            changes = profiled_allocations(self._profile)
            self._profile = None
            self._note(self._base + max(0, int(np.cumsum(changes).max(initial=0))))
        elif self.device.type == "cuda" and state.global_step > 0:
            torch.cuda.synchronize(self.device)
            self._note(torch.cuda.max_memory_allocated(self.device))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # the peak is that of training

    def _note(self, peak: int) -> None:
        self.peak = max(self.peak or 0, peak)
