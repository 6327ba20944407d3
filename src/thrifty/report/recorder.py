"""The callback that writes `metrics.jsonl` while `transformers.Trainer` trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from thrifty.report.metrics import METRICS_FILE, MetricsLog, current_memory_bytes
from thrifty.report.throughput import Pace, TokenCounter


class MetricsRecorder(TrainerCallback):
    """Records every log of the Trainer in `metrics.jsonl` of the output folder, on the main process only.

    A run that resumes goes on in the same file: rows after the checkpoint's step are dropped, and tokens and wall
    seconds go on counting. An evaluation after training is recorded too.

    Args:
        counter: The token counter that the trainer feeds; without one the rows have no token values.
        path: The file; `metrics.jsonl` in `args.output_dir` by default.
    """

    def __init__(self, counter: TokenCounter | None = None, path: str | Path | None = None) -> None:
        self.counter = counter
        self.path = None if path is None else Path(path)
        self.pace = Pace(counter)
        self._log: MetricsLog | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._log = MetricsLog(self.path or Path(args.output_dir) / METRICS_FILE)
        wall_seconds = 0.0
        if state.global_step > 0:
            last = self._log.resume(state.global_step) or {}
            wall_seconds = last.get("wall_seconds") or 0.0
            # The trainer's checkpoint knows the exact count; the last row is what is left where it has none.
            if self.counter is not None and self.counter.total() == 0 and last.get("tokens"):
                self.counter.load_state_dict({"tokens": last["tokens"]})
        else:
            self._log.start()
        self.pace.begin(state.global_step, wall_seconds)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pace.step_end()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pace.pause_end()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pace.pause_end()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._log is None or not logs:
            return
        step = state.global_step
        if "train_runtime" in logs:
            self._log.log_event(step, "end", **logs)
        elif any(key.startswith("eval_") for key in logs):
            self._log.log_eval(step, **logs)
        else:
            self._log.log_train(step, **logs, **self.pace.logged(step), memory_bytes=current_memory_bytes())
