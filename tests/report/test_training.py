"""The two callbacks in a real `transformers.Trainer`."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_callback import ProgressCallback as HFProgressCallback

from thrifty.report.metrics import read_metrics, rows_of
from thrifty.report.progress import ProgressCallback
from thrifty.report.recorder import MetricsRecorder
from thrifty.report.throughput import Pace, TokenCounter

TOKENS = 2 * 8  # per step


class Feed(TrainerCallback):
    """Stands for the trainer, which feeds the counter."""

    def __init__(self, counter: TokenCounter) -> None:
        self.counter = counter

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.counter.add(torch.tensor(TOKENS))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(folder: Path, stream: io.StringIO | None = None, *, resume: str | None = None, max_steps: int = 6) -> Trainer:
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    data: Any = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, 8))]
    args = TrainingArguments(
        str(folder), max_steps=max_steps, per_device_train_batch_size=2, logging_steps=1, eval_strategy="steps",
        eval_steps=3, save_steps=3, use_cpu=True, report_to="none", save_strategy="steps",
    )  # fmt: skip
    counter = TokenCounter()
    callbacks = [Feed(counter), MetricsRecorder(counter)]
    if stream is not None:
        callbacks.append(ProgressCallback(counter, stream=stream, seconds_between_lines=0))
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer.remove_callback(HFProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_every_logging_step_and_evaluation_is_recorded_also_over_a_resume(tmp_path: Path) -> None:
    trainer = train(tmp_path)
    rows = read_metrics(tmp_path)
    first = rows_of(rows, "train")
    assert [row["step"] for row in first] == [1, 2, 3, 4, 5, 6]
    assert [row["tokens"] for row in first] == [TOKENS * step for step in range(1, 7)]
    assert [row["loss"] for row in first] == [log["loss"] for log in trainer.state.log_history if "loss" in log]
    for row in first:
        assert row.keys() >= {"epoch", "learning_rate", "grad_norm", "memory_bytes"}
        assert row["tokens_per_second"] == pytest.approx(TOKENS / row["step_seconds"])
    assert sum(row["step_seconds"] for row in first) < first[-1]["wall_seconds"]  # evaluation and saving are left out
    assert [row["step"] for row in rows_of(rows, "eval")] == [3, 6]
    trainer.evaluate()
    assert [row["step"] for row in read_metrics(tmp_path) if row["kind"] == "eval"] == [3, 6, 6]

    train(tmp_path, resume=str(tmp_path / "checkpoint-3"))
    rows = read_metrics(tmp_path)
    again = rows_of(rows, "train")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in again] == [row["loss"] for row in first]
    assert [row["tokens"] for row in again] == [row["tokens"] for row in first]
    assert all(a["wall_seconds"] < b["wall_seconds"] for a, b in itertools.pairwise(again))
    assert [(row["step"], row["event"]) for row in rows if row["kind"] == "event"] == [
        (0, "start"), (3, "resume"), (6, "end"),
    ]  # fmt: skip


def test_a_log_file_gets_plain_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    train(tmp_path, stream)
    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue()
    steps = [line for line in lines if re.match(r"step \d/6 \(\d+%\): loss \d+\.\d{4}  lr \S+  \S+ tokens/s", line)]
    assert len(steps) == 6
    assert steps[2].endswith("left")
    assert not steps[-1].endswith("left")
    assert [line.split("  ")[0] for line in lines if "validation" in line] == [
        "step 3: validation",
        "step 6: validation",
    ]
    assert len(lines) == 8


def test_a_terminal_gets_one_bar(tmp_path: Path) -> None:
    stream = Terminal()
    train(tmp_path, stream)
    shown = stream.getvalue()
    assert "\r" in shown
    last = shown.rstrip().split("\r")[-1]
    assert "6/6 steps" in last
    assert re.search(r"loss \d.*lr .*tokens/s", last)
    assert shown.count("validation  loss") == 2


def test_plain_lines_come_now_and_then() -> None:
    now = SimpleNamespace(seconds=0.0)
    stream = io.StringIO()
    callback = ProgressCallback(stream=stream, seconds_between_lines=10, clock=lambda: now.seconds)
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=1000)
    callback.on_train_begin(None, state, None)
    for step in range(1, 1001):
        now.seconds += 0.1
        state.global_step = step
        callback.on_step_end(None, state, None)
        callback.on_log(None, state, None, logs={"loss": 2.0, "learning_rate": 1e-4})
    steps = [int(re.findall(r"step ([\d,]+)/", line)[0].replace(",", "")) for line in stream.getvalue().splitlines()]
    assert steps[0] == 1
    assert steps[-1] == 1000
    assert 9 <= len(steps) <= 12
    assert "1 min 30 s left" in stream.getvalue().splitlines()[1]


def test_nothing_is_shown_on_other_processes() -> None:
    stream = io.StringIO()
    callback = ProgressCallback(stream=stream)
    state = SimpleNamespace(is_world_process_zero=False, global_step=1, max_steps=2)
    callback.on_train_begin(None, state, None)
    callback.on_step_end(None, state, None)
    callback.on_log(None, state, None, logs={"loss": 2.0})
    assert stream.getvalue() == ""


def test_counting_reads_a_tensor_only_for_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = TokenCounter()
    reads = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(1) or item(self))
    monkeypatch.setattr(torch.Tensor, "__int__", lambda self: pytest.fail("reads the tensor"))
    for _ in range(3):
        counter.add(torch.tensor([2**31 - 1], dtype=torch.int32))
    counter.add(5)
    assert not reads
    assert counter.total() == 3 * (2**31 - 1) + 5  # beyond int32
    assert len(reads) == 1
    other = TokenCounter()
    other.add(99)
    other.load_state_dict(counter.state_dict())
    assert other.total() == counter.total()


def test_pace_leaves_evaluation_and_saving_out() -> None:
    now = SimpleNamespace(seconds=100.0)
    counter = TokenCounter()
    pace = Pace(counter, clock=lambda: now.seconds)
    pace.begin(10, wall_seconds=50.0)
    for _ in range(2):
        counter.add(300)
        now.seconds += 3
        pace.step_end()
    assert pace.logged(12) == {"tokens": 600, "tokens_per_second": 100, "step_seconds": 3, "wall_seconds": 56}
    now.seconds += 40  # an evaluation
    pace.pause_end()
    now.seconds += 60  # and a checkpoint
    pace.pause_end()
    counter.add(300)
    now.seconds += 3
    pace.step_end()
    assert pace.logged(13) == {"tokens": 900, "tokens_per_second": 100, "step_seconds": 3, "wall_seconds": 159}
    assert pace.logged(13)["tokens_per_second"] is None
