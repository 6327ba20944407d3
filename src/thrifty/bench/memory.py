"""The peak memory of training steps: the allocator's own events on a processor, the allocator's own maximum on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerCallback

from thrifty.planner.measure import AllocationLog


class PeakMemory(TrainerCallback):
    """Records the highest memory of any step but the first, in which nothing has its final size yet.

    On a processor all steps are profiled, so it must not time them as well.

    Args:
        device: Where the run is.
        before: What `living_storages` found before the run began: constants of libraries are not the run's.
    """

    def __init__(self, device: torch.device, before: Mapping[int, int] | None = None) -> None:
        self.device = device
        self.peak: int | None = None
        self._log = AllocationLog(before or {}) if device.type == "cpu" else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log is None:
            return
        if self._log.is_open:
            self._log.begin_step()
        else:  # the first step of training, or of a stretch of it
            self._log.open()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log is not None:
            self._log.end_step()
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._note(torch.cuda.max_memory_allocated(self.device))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log is not None and self._log.is_open:
            for peak in self._log.close():
                self._note(peak)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # the peak is that of training

    def _note(self, peak: int) -> None:
        self.peak = max(self.peak or 0, peak)
