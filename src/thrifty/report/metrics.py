"""The record of a run over time: `metrics.jsonl`, one JSON object a line.

Every row has `kind` and `step`:

- `train`: one per logging step, with `epoch`, `loss`, `learning_rate`, `grad_norm`, `tokens` (non-padding, since the
  start of the run), `tokens_per_second`, `step_seconds`, `memory_bytes`, `wall_seconds` (since the start of the run,
  the time between a kill and a resume left out), and whatever the methods log;
- `eval`: one per evaluation, with `eval_loss` and the other `eval_*` values;
- `event`: something that happened, with `event` (`start`, `resume`, `end`, ...) and its details.

A value that is not finite is written as the string `"NaN"`, `"Infinity"` or `"-Infinity"`, so that each line is valid
JSON; `read_metrics` gives floats back. A value that was not measured is absent or null.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from thrifty.errors import InputError
from thrifty.report.files import from_json, to_json, write_atomic

METRICS_FILE = "metrics.jsonl"

Row = dict[str, Any]


class MetricsLog:
    """Appends rows to a metrics file; each row has left the process when the call returns.

    So a row survives `kill -9` at any later moment, and other programs may read the file while it grows. A last line
    that an earlier kill cut short is removed on opening.

    Args:
        path: The file. Its folder is created where missing.

    Raises:
        InputError: The existing file is damaged elsewhere than in its last line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._rewrite(read_metrics(self.path))

    def log_train(self, step: int, **values: Any) -> None:
        """Appends a `train` row."""
        self._append({**values, "kind": "train", "step": int(step)})

    def log_eval(self, step: int, **values: Any) -> None:
        """Appends an `eval` row."""
        self._append({**values, "kind": "eval", "step": int(step)})

    def log_event(self, step: int, event: str, **values: Any) -> None:
        """Appends an `event` row, such as `log_event(40, "resume")`."""
        self._append({**values, "kind": "event", "step": int(step), "event": event})

    def start(self) -> None:
        """Begins a new run: empties the file and records the start."""
        write_atomic(self.path, "")
        self.log_event(0, "start")

    def resume(self, step: int) -> Row | None:
        """Drops the rows after `step`, which the resumed run will write again, and records the resume.

        Args:
            step: The step of the checkpoint that training goes on from.

        Returns:
            The last `train` row kept, whose `tokens` and `wall_seconds` go on counting; None where there is none.

        Raises:
            InputError: The file is damaged elsewhere than in its last line.
        """
        rows = read_metrics(self.path) if self.path.exists() else []
        kept = [row for row in rows if row["step"] <= step and row.get("event") != "end"]
        self._rewrite(kept)
        self.log_event(step, "resume")
        train = rows_of(kept, "train")
        return train[-1] if train else None

    def _append(self, row: Row) -> None:
        row = {"kind": row.pop("kind"), "step": row.pop("step"), **row}
        data = to_json(row).encode("utf-8") + b"\n"
        # Opened for each row (a few per minute), so no handle outlives the training. Unbuffered and in one call: a
        # reader never sees a line grow in pieces.
        with open(self.path, "ab", buffering=0) as file:
            written = file.write(data)
        if written != len(data):
            raise OSError(f"{self.path}: only {written} of {len(data)} bytes could be written; is the disk full?")

    def _rewrite(self, rows: list[Row]) -> None:
        content = "".join(to_json(row) + "\n" for row in rows).encode("utf-8")
        if not self.path.exists() or content != self.path.read_bytes():
            write_atomic(self.path, content)


def read_metrics(path: str | os.PathLike[str]) -> list[Row]:
    """Reads a metrics file, also one that is being written.

    A last line that is cut short (the run was killed while writing it, or is writing it now) is left out.

    Args:
        path: The file, or the run folder that holds `metrics.jsonl`.

    Returns:
        The rows in the order written, floats restored where they were not finite.

    Raises:
        InputError: There is no such file, or a line before the last is not a metrics row.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS_FILE
    if not path.is_file():
        raise InputError("there is no such metrics file", key=str(path), fix="give the folder of a thrifty run")
    lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row = from_json(line)
            if not (isinstance(row, dict) and isinstance(row.get("kind"), str) and isinstance(row.get("step"), int)):
                raise ValueError("it has no kind and step")
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            if number == len(lines):
                break
            raise InputError(
                f"line {number} is not a metrics row ({error})", key=str(path), fix="remove that line"
            ) from error
        rows.append(row)
    return rows


def rows_of(rows: list[Row], kind: str) -> list[Row]:
    """Returns the rows of one kind in order of step. Of several rows of one step, the last written counts."""
    latest = {row["step"]: row for row in rows if row["kind"] == kind}
    return [latest[step] for step in sorted(latest)]


def current_memory_bytes() -> int:
    """Memory in use now, in bytes: allocated on the fullest accelerator, else resident in this process.

    It reads counters only (microseconds) and never waits for the device.
    """
    torch = sys.modules.get("torch")  # not imported means that no accelerator is in use
    if torch is not None:
        if _cuda_in_use(torch):
            return max(torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count()))
        if _mps_in_use(torch):
            return _mps_bytes(torch)
    return _resident_bytes()


def peak_memory_bytes() -> int:
    """Highest memory use so far, in bytes.

    On CUDA it is `torch.cuda.max_memory_allocated` of the fullest device. On MPS, which keeps no peak, it is the
    highest value that `current_memory_bytes` has seen. Elsewhere it is the process's peak resident set.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        if _cuda_in_use(torch):
            return max(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        if _mps_in_use(torch):
            return max(_mps_bytes(torch), _mps_peak)
    return _peak_resident_bytes()


_mps_peak = 0


def _mps_bytes(torch: Any) -> int:
    global _mps_peak
    now = int(torch.mps.driver_allocated_memory())
    _mps_peak = max(_mps_peak, now)
    return now


def _cuda_in_use(torch: Any) -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


def _mps_in_use(torch: Any) -> bool:
    return bool(torch.backends.mps.is_available())


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.Process().memory_info().rss)


def _peak_resident_bytes() -> int:
    # VmHWM first: getrusage's figure is inherited over exec, so a child of a large process would report its parent.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
