"""The bar of a bench on a terminal; elsewhere a plain line from time to time."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from thrifty.report import text

_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Counts measurements, of which the number may grow.

    Args:
        stream: Where to; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.done = 0
        self.total = 0
        self._begun = time.monotonic()
        self._last = 0.0
        self._bar: Any = None
        if self.stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=0, desc="bench", file=self.stream, dynamic_ncols=True, leave=False,
                bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {postfix}",
            )  # fmt: skip

    def expect(self, more: int) -> None:
        """Adds measurements that are to come."""
        self.total += more
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.refresh()

    def begin(self, what: str, seconds_left: float | None) -> None:
        """Says what is measured next."""
        left = "" if seconds_left is None else f", {text.duration(max(0.0, seconds_left))} left"
        if self._bar is not None:
            self._bar.set_postfix_str(f"{what}{left}")
        elif time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            self.say(f"{self.done}/{self.total} measurements: {what}{left}")

    def advance(self) -> None:
        """One is done."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(1)

    def say(self, line: str) -> None:
        """Writes a line that stays."""
        if self._bar is not None:
            self._bar.write(line, file=self.stream)
        else:
            print(line, file=self.stream, flush=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
