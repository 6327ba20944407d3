from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pace import share_of_a_step
from thrifty.errors import InputError
from thrifty.report.files import from_json, to_json, write_atomic
from thrifty.report.metrics import MetricsLog, current_memory_bytes, peak_memory_bytes, read_metrics, rows_of


def strict(line: str) -> object:
    """Parses JSON as a strict parser does: the constants NaN and Infinity are errors."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_rows_are_readable_while_the_log_is_open(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log_train(10, loss=2.5, learning_rate=np.float32(0.5), tokens=torch.tensor(7))
    log.log_eval(10, eval_loss=2.25)
    assert read_metrics(tmp_path) == [
        {"kind": "train", "step": 10, "loss": 2.5, "learning_rate": 0.5, "tokens": 7},
        {"kind": "eval", "step": 10, "eval_loss": 2.25},
    ]


def test_values_that_are_not_finite_are_valid_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).log_train(1, loss=math.nan, grad_norm=math.inf, low=-math.inf, gone=None)
    assert strict(path.read_text()) == {
        "kind": "train", "step": 1, "loss": "NaN", "grad_norm": "Infinity", "low": "-Infinity", "gone": None,
    }  # fmt: skip
    row = read_metrics(path)[0]
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["low"], row["gone"]) == (math.inf, -math.inf, None)


@pytest.mark.parametrize("cut", [1, 2, 9, 30])
def test_a_cut_last_line_is_left_out_and_repaired_on_opening(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2):
        log.log_train(step, loss=1.0, note="é")
    path.write_bytes(path.read_bytes()[:-cut])
    steps = [1, 2] if cut == 1 else [1]  # only the newline is missing: the row is whole
    assert [row["step"] for row in read_metrics(path)] == steps
    MetricsLog(path).log_train(3, loss=1.0)
    assert [strict(line)["step"] for line in path.read_text().splitlines()] == [*steps, 3]  # type: ignore[index]


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tr\n{"kind": "train", "step": 3}\n')
    with pytest.raises(InputError, match="line 2"):
        read_metrics(path)
    with pytest.raises(InputError, match="no such metrics file"):
        read_metrics(tmp_path / "elsewhere")


def test_resume_drops_what_the_run_will_write_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.start()
    for step in (10, 20, 30):
        log.log_train(step, loss=float(step), tokens=step * 100, wall_seconds=step / 10)
        log.log_eval(step, eval_loss=float(step))
    log.log_event(30, "end")
    last = MetricsLog(tmp_path / "metrics.jsonl").resume(20)
    assert last is not None
    assert (last["step"], last["tokens"], last["wall_seconds"]) == (20, 2000, 2.0)
    for step in (30, 40):
        log.log_train(step, loss=-1.0)
    rows = read_metrics(tmp_path)
    assert [(r["step"], r["loss"]) for r in rows_of(rows, "train")] == [(10, 10), (20, 20), (30, -1), (40, -1)]
    assert [r["step"] for r in rows if r["kind"] == "eval"] == [10, 20]
    assert [(r["step"], r["event"]) for r in rows if r["kind"] == "event"] == [(0, "start"), (20, "resume")]


def test_rows_of_takes_the_last_row_of_a_step() -> None:
    rows = [{"kind": "eval", "step": 5, "eval_loss": 2.0}, {"kind": "eval", "step": 5, "eval_loss": 1.0}]
    assert rows_of(rows, "eval") == rows[1:]


def test_starting_anew_empties_the_file(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log_train(1, loss=1.0)
    log.start()
    assert read_metrics(tmp_path) == [{"kind": "event", "step": 0, "event": "start"}]


def test_rows_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys, itertools\nfrom thrifty.report.metrics import MetricsLog\nlog = MetricsLog(sys.argv[1])\n"
        "for step in itertools.count(1):\n    log.log_train(step, loss=1.0 / step)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], env={**os.environ})
    try:
        deadline = time.monotonic() + 20
        while (not path.exists() or path.stat().st_size < 5000) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    steps = [row["step"] for row in read_metrics(path)]
    assert len(steps) > 50
    assert steps == list(range(1, len(steps) + 1))


def test_an_interrupted_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomic(tmp_path / "a.json", "old")

    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_json_round_trip_and_refusal() -> None:
    value = {"a": [1, True, None, "x", math.inf, Path("b")], 3: np.int64(4)}
    assert from_json(to_json(value)) == {"a": [1, True, None, "x", math.inf, "b"], "3": 4}
    with pytest.raises(TypeError, match="no JSON form"):
        to_json({"a": object()})


def test_memory_follows_an_allocation() -> None:
    before, size = current_memory_bytes(), 64 * 2**20
    block = np.ones(size, dtype=np.uint8)
    assert current_memory_bytes() - before > size / 2
    assert peak_memory_bytes() >= before + size / 2
    del block


def test_reading_the_memory_costs_little() -> None:
    assert share_of_a_step(current_memory_bytes) < 0.1
