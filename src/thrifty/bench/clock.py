"""Times training steps: from the end of one to the end of the next, so that loading and choosing samples count too."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from thrifty.bench.statistics import typical

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from thrifty.bench.measure import Outcome
    from thrifty.report.throughput import TokenCounter

TURN = "turn"


class Turns:
    """Lets several measuring processes take turns, some steps each, so that all of them see the same moments.

    Args:
        connection: Says that a turn is over, and waits for the next one.
        steps: Of a turn.
    """

    def __init__(self, connection: Connection, steps: int) -> None:
        self.connection, self.steps = connection, steps

    def wait(self) -> None:
        """Ends the turn and returns when the next one begins."""
        self.connection.send(TURN)
        self.connection.recv()


turns: Turns | None = None
"""Of this process; None where it measures alone."""


class StepClock(TrainerCallback):
    """Seconds and tokens of every step, and the validation loss against both; evaluations do not count as time.

    Args:
        counter: The trainer's counter of tokens.
        device: Waited for at the end of every step.
        prepare_seconds: What the methods took before training; the curve begins there.
    """

    def __init__(self, counter: TokenCounter, device: torch.device, prepare_seconds: float) -> None:
        self.counter, self.device, self.prepare_seconds = counter, device, prepare_seconds
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        """Total after each step."""
        self._losses: list[tuple[int, float]] = []
        self._mark = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if turns is not None:
            turns.wait()
        self._mark = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        now = time.perf_counter()
        self.seconds.append(now - self._mark)
        self.tokens.append(self.counter.total())
        if turns is not None and len(self.seconds) % turns.steps == 0:
            turns.wait()
        self._mark = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if metrics and "eval_loss" in metrics:
            self._losses.append((state.global_step, float(metrics["eval_loss"])))
        self._mark = time.perf_counter()

    def fill(self, found: Outcome) -> None:
        """Writes the timings into `found`."""
        from thrifty.bench.measure import WARM_UP_STEPS

        warm_up, timed = self.seconds[:WARM_UP_STEPS], self.seconds[WARM_UP_STEPS:]
        if not timed:
            return
        found.step_seconds = typical(timed)
        found.warm_up_seconds = sum(warm_up)
        tokens = self.tokens[-1] - self.tokens[len(warm_up) - 1]
        found.tokens_per_second = tokens / len(timed) / found.step_seconds
        found.train_seconds = self._until(len(self.seconds))

    def curve(self) -> list[tuple[int, int, float, float]]:
        """(step, tokens, seconds, validation loss) of every evaluation during training."""
        return [(step, self.tokens[step - 1], self._until(step), loss) for step, loss in self._losses]

    def _until(self, step: int) -> float:
        """Seconds up to a step, the warm-up at the pace of the steps after it."""
        from thrifty.bench.measure import WARM_UP_STEPS

        pace = typical(self.seconds[WARM_UP_STEPS:] or self.seconds)
        warm_up = min(step, WARM_UP_STEPS)
        return self.prepare_seconds + warm_up * pace + sum(self.seconds[WARM_UP_STEPS:step])


class StopAfter(TrainerCallback):
    """Ends a training early."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.steps:
            control.should_training_stop = True
