"""How fast a run goes: tokens counted without waiting for the device, and time without evaluation and saving."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class TokenCounter:
    """Counts the non-padding tokens that training has consumed, over the whole run.

    `add` takes a number or a tensor with one element; tensors are summed on their device, and only `total` waits for
    it. So counting costs no synchronisation between logging steps.
    """

    def __init__(self) -> None:
        self._number = 0
        self._tensor: Any = None

    def add(self, n: Any) -> None:
        """Adds `n` tokens.

        Args:
            n: An int, or an integer tensor with one element on any device.
        """
        if hasattr(n, "device"):
            n = n.detach().reshape(()).long()  # a mask may be bool, and int32 sums overflow after two billion tokens
            self._tensor = n if self._tensor is None else self._tensor + n.to(self._tensor.device, non_blocking=True)
        else:
            self._number += int(n)

    def total(self) -> int:
        """Returns the count. Waits for the device where tensors were added."""
        if self._tensor is not None:
            self._number += int(self._tensor.item())
            self._tensor = None
        return self._number

    def state_dict(self) -> dict[str, int]:
        """Returns what a checkpoint must hold for the count to go on."""
        return {"tokens": self.total()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Replaces the count."""
        self._number, self._tensor = int(state["tokens"]), None


class Pace:
    """Measures the interval between two logging steps, the time spent on evaluation and saving left out.

    Call `step_end` after each step, `logged` at a logging step, and `pause_end` when an evaluation or a checkpoint is
    done; what lies between the last of these calls and `pause_end` does not count as training.

    Args:
        counter: The counter that the trainer feeds, or None.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, counter: TokenCounter | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.counter = counter
        self._clock = clock
        self.begin(0)

    def begin(self, step: int, wall_seconds: float = 0.0) -> None:
        """Starts measuring at `step`; `wall_seconds` is what earlier parts of the run took."""
        now = self._clock()
        self._start = now - wall_seconds
        self._mark = self._interval_start = now
        self._paused = 0.0
        self._step = step
        self._tokens = 0 if self.counter is None else self.counter.total()

    def step_end(self) -> None:
        """Notes that a step was issued to the device."""
        self._mark = self._clock()

    def pause_end(self) -> None:
        """Notes that an evaluation or a checkpoint has just ended."""
        now = self._clock()
        self._paused += now - self._mark
        self._mark = now

    def logged(self, step: int) -> dict[str, Any]:
        """Closes the interval at a logging step.

        Returns:
            `tokens` (since the start of the run), `tokens_per_second` (None without a counter or without a step since
            the last call), `step_seconds` (mean of the interval) and `wall_seconds`. The token values are left out
            where there is no counter.
        """
        values: dict[str, Any] = {}
        tokens = 0
        if self.counter is not None:
            tokens = self.counter.total()  # waits for the device, so the clock is read after it
        now = self._clock()
        seconds = now - self._interval_start - self._paused
        steps = step - self._step
        if self.counter is not None:
            values["tokens"] = tokens
            values["tokens_per_second"] = (tokens - self._tokens) / seconds if steps > 0 and seconds > 0 else None
        values["step_seconds"] = seconds / steps if steps > 0 else None
        values["wall_seconds"] = now - self._start
        self._mark = self._interval_start = now
        self._paused, self._step, self._tokens = 0.0, step, tokens
        return values
