"""One progress bar for a run: loss, learning rate, non-padding tokens per second and the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm
from transformers import TrainerCallback

from thrifty.report import text
from thrifty.report.throughput import Pace, TokenCounter

__all__ = ["ProgressCallback", "TokenCounter"]

_BAR_FORMAT = "{desc} {percentage:3.0f}% {bar} {n_fmt}/{total_fmt} steps{postfix}"
_MIN_FRACTION = 0.02  # of a run's steps, between two plain lines


class ProgressCallback(TrainerCallback):
    """Shows how training goes: a bar in a terminal or a notebook, plain lines now and then in a log file.

    The loss and the token count are read at logging steps only, when the Trainer has waited for the device anyway;
    between them nothing here touches a tensor. Evaluations add one line each.

    Args:
        counter: The token counter that the trainer feeds; without one no tokens per second are shown.
        stream: Where to write; standard error by default.
        plain: True for lines, False for a bar; by default a bar where the stream is a terminal or this is a notebook.
        seconds_between_lines: The least time between two plain lines (the first and the last are always printed).
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self,
        counter: TokenCounter | None = None,
        *,
        stream: TextIO | None = None,
        plain: bool | None = None,
        seconds_between_lines: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.plain = not (self.stream.isatty() or _in_notebook()) if plain is None else plain
        self.seconds_between_lines = seconds_between_lines
        self.pace = Pace(counter, clock)
        self._clock = clock
        self._bar: Any = None
        self._eval_bar: Any = None
        self._active = False
        self._shown: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._active = bool(state.is_world_process_zero)
        if not self._active:
            return
        self._first_step, self._first_time = state.global_step, None
        self._last_line: float | None = None
        self._last_line_step = state.global_step
        self._shown = []
        self.pace.begin(state.global_step)
        if not self.plain:
            self._bar = self._new_bar("train", state.max_steps, initial=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._active:
            return
        self.pace.step_end()
        if self._first_time is None:
            # The first step compiles and allocates; counting it would make the time left far too long at first.
            self._first_step, self._first_time = state.global_step, self._clock()
        if self._bar is not None:
            self._bar.set_postfix_str(self._postfix(state), refresh=False)
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not self._active or not logs or "train_runtime" in logs:
            return
        if any(key.startswith("eval_") for key in logs):
            self._close_eval_bar()  # before the line, so that no rest of it stays under the line
            self._line(f"step {state.global_step:,}: validation  {_eval_text(logs)}")
            return
        self._shown = _train_parts(logs, self.pace.logged(state.global_step))
        if self._bar is not None:
            self._bar.set_postfix_str(self._postfix(state))
        elif self._due(state):
            percent = 100 * state.global_step / max(1, state.max_steps)
            head = f"step {state.global_step:,}/{state.max_steps:,} ({percent:.0f}%)"
            self._line(f"{head}: {'  '.join([*self._shown, *self._left(state)])}")
            self._last_line, self._last_line_step = self._clock(), state.global_step

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        # The bar of the evaluation lives under that of the training and vanishes with it.
        if not self._active or self.plain or not hasattr(eval_dataloader, "__len__"):
            return
        if self._eval_bar is None:
            self._eval_bar = self._new_bar("evaluate", len(eval_dataloader), leave=False)
        self._eval_bar.update(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._active:
            return
        self.pace.pause_end()
        self._close_eval_bar()

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_evaluate(args, state, control, **kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pace.pause_end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bar. Safe to call at any time, also after an error in training."""
        self._close_eval_bar()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _close_eval_bar(self) -> None:
        if self._eval_bar is not None:
            self._eval_bar.close()
            self._eval_bar = None

    def _postfix(self, state: Any) -> str:
        return "  ".join([*self._shown, *self._left(state)])

    def _left(self, state: Any) -> list[str]:
        done = state.global_step - self._first_step
        if self._first_time is None or done <= 0 or state.global_step >= state.max_steps:
            return []
        # Evaluations so far are part of the mean, since those to come will cost as much.
        per_step = (self._clock() - self._first_time) / done
        return [f"{text.duration(per_step * (state.max_steps - state.global_step))} left"]

    def _due(self, state: Any) -> bool:
        if self._last_line is None or state.global_step >= state.max_steps:
            return True
        enough_steps = state.global_step - self._last_line_step >= _MIN_FRACTION * state.max_steps
        return enough_steps and self._clock() - self._last_line >= self.seconds_between_lines

    def _line(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=None if _in_notebook() else self.stream)
        else:
            print(line, file=self.stream, flush=True)

    def _new_bar(self, name: str, total: int, initial: int = 0, leave: bool = True) -> Any:
        options: dict[str, Any] = {"desc": name, "total": total, "initial": initial, "leave": leave}
        if _in_notebook():
            from tqdm.auto import tqdm as notebook_tqdm  # falls back to text where ipywidgets is not installed

            return notebook_tqdm(**options)
        return tqdm(**options, file=self.stream, dynamic_ncols=True, bar_format=_BAR_FORMAT)


def _train_parts(logs: dict[str, Any], pace: dict[str, Any]) -> list[str]:
    parts = []
    if logs.get("loss") is not None:
        parts.append(f"loss {float(logs['loss']):.4f}")
    if logs.get("learning_rate") is not None:
        parts.append(f"lr {text.scientific(float(logs['learning_rate']))}")
    if pace.get("tokens_per_second") is not None:
        parts.append(f"{text.count(pace['tokens_per_second'])} tokens/s")
    return parts


def _eval_text(logs: dict[str, Any]) -> str:
    hidden = ("runtime", "_per_second", "model_preparation_time")
    values = {k.removeprefix("eval_"): v for k, v in logs.items() if k.startswith("eval_") and not k.endswith(hidden)}
    return "  ".join(f"{name.replace('_', ' ')} {text.measured(value)}" for name, value in values.items())


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
