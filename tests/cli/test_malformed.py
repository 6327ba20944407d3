"""Malformed input: one message that names key, value and fix, exit code 2, and nothing on disk is changed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from thrifty.cli import main
from thrifty.config import yaml_text

Values = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """How to spoil a good run file, and what the message must say."""

    spoil: Callable[[Path, Values], None]
    says: tuple[str, ...]
    real: bool = False
    """Also through the real command."""


def sets(**changes: Any) -> Callable[[Path, Values], None]:
    return lambda folder, values: values.update(changes)


def data(name: str, content: str | bytes, **changes: Any) -> Callable[[Path, Values], None]:
    def spoil(folder: Path, values: Values) -> None:
        file = folder / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        values.update({"train_file": str(file), **changes})

    return spoil


def rows(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def model(**changes: Any) -> Callable[[Path, Values], None]:
    return lambda folder, values: values["model_config"].update(changes)


def earlier_run(folder: Path, values: Values) -> None:
    out = Path(values["output_dir"])
    out.mkdir()
    (out / "run.yaml").write_text("seed: 1\n")
    (out / "model.safetensors").write_bytes(b"precious")


def foreign_folder(folder: Path, values: Values) -> None:
    out = Path(values["output_dir"])
    out.mkdir()
    (out / "README.md").write_text("my notes")
    values["overwrite"] = True


def broken_checkpoint(folder: Path, values: Values) -> None:
    checkpoint = Path(values["output_dir"]) / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    values["resume"] = str(checkpoint)


def unwritable(folder: Path, values: Values) -> None:
    locked = folder / "locked"
    locked.mkdir(mode=0o500)
    # The superuser may write anywhere but where there is nothing to write to.
    values["output_dir"] = "/proc/thrifty/out" if os.geteuid() == 0 else str(locked / "out")


def mute_tokenizer(folder: Path, values: Values) -> None:
    """A tokenizer with neither padding nor end-of-sequence token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"the": 0, "fox": 1, "dog": 2, "?": 3}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(folder / "tokenizer")
    values["tokenizer_name_or_path"] = str(folder / "tokenizer")


CLASSES = rows({"text": "good", "label": 0}, {"text": "bad", "label": 1}, *[{"text": "so", "label": 1}] * 8)

FAULTS: dict[str, Fault] = {
    "missing file": Fault(sets(train_file="nowhere.jsonl"), ("train_file", "nowhere.jsonl"), real=True),
    "empty file": Fault(data("empty.jsonl", ""), ("train_file", "empty.jsonl")),
    "wrong columns": Fault(data("columns.jsonl", rows(*[{"a": 1, "b": 2}] * 40)), ("columns a, b", "text_column")),
    "broken JSON line": Fault(
        data("broken.jsonl", rows({"text": "one"}) + '{"text": "two\n'), ("train_file", "broken.jsonl", "2"), real=True
    ),
    "not UTF-8": Fault(data("latin.txt", b"caf\xe9 \xff\xfe" * 9), ("train_file", "latin.txt")),
    "unknown ending": Fault(data("data.docx", "x"), ("train_file", "data.docx", ".jsonl")),
    "unknown key": Fault(sets(learning_rat=1e-4), ("learning_rat=0.0001", "did you mean 'learning_rate'"), real=True),
    "unknown method": Fault(sets(methods=["lowra"]), ("methods='lowra'", "did you mean 'lora'")),
    "conflicting methods": Fault(sets(methods=["bf16", "fp16"]), ("bf16", "fp16")),
    "setting of another type": Fault(sets(methods=[{"lawa": {"window": "big"}}]), ("window", "'big'")),
    "wrong type": Fault(sets(learning_rate="fast"), ("learning_rate='fast'", "a number")),
    "negative batch": Fault(sets(per_device_train_batch_size=-2), ("per_device_train_batch_size=-2", "at least 1")),
    "no steps": Fault(sets(max_steps=0), ("max_steps=0",)),
    "share above one": Fault(sets(validation_fraction=2), ("validation_fraction=2",)),
    "retired key": Fault(sets(warmup_ratio=0.1), ("warmup_ratio=0.1", "warmup_steps")),
    "retired optimizer": Fault(sets(optim="adamw_hf"), ("optim='adamw_hf'", "adamw_torch_fused")),
    "set twice": Fault(sets(optimizer="lion", optim="sgd"), ("optim='sgd'", "lion")),
    "label out of range": Fault(
        data("labels.jsonl", CLASSES + rows({"text": "odd", "label": -3}), task="text-classification"),
        ("train_file", "labels.jsonl", "-3"),
    ),
    "no token can pad": Fault(mute_tokenizer, ("tokenizer_name_or_path", "pad")),
    "longer than the positions": Fault(sets(max_length=512), ("max_length=512", "64")),
    "vocabulary too small": Fault(model(vocab_size=100), ("vocab_size", "100")),
    "unknown kind of model": Fault(model(model_type="lama"), ("model_type", "'lama'", "llama")),
    "unknown setting of the model": Fault(model(hidden_sizes=3), ("hidden_sizes", "hidden_size")),
    "heads that do not divide": Fault(model(num_attention_heads=3), ("model_config",)),
    "missing model": Fault(
        lambda folder, values: (values.pop("model_config"), values.update(model_name_or_path="./nowhere"))[0],
        ("model_name_or_path='./nowhere'",),
    ),
    "no write permission": Fault(unwritable, ("output_dir", "cannot be written")),
    "output is a file": Fault(
        lambda folder, values: values.update(output_dir=values["train_file"]), ("output_dir", "not a folder")
    ),
    "output holds a run": Fault(earlier_run, ("output_dir", "already holds a run", "overwrite=true"), real=True),
    "output holds something else": Fault(foreign_folder, ("output_dir", "README.md")),
    "resume from nowhere": Fault(sets(resume="checkpoint-7"), ("resume='checkpoint-7'", "no such folder")),
    "resume from half a checkpoint": Fault(broken_checkpoint, ("checkpoint-1", "cannot be used")),
    "method too slow for the run": Fault(sets(methods=["lawa"]), ("lawa", "every")),
}


def tree(folder: Path) -> dict[str, str]:
    """Every path below `folder` with a hash of its content."""
    paths = sorted(folder.rglob("*"))
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "" for p in paths}


def spoilt(fault: Fault, folder: Path, values: Values) -> str:
    fault.spoil(folder, values)
    file = folder / "spoilt.yaml"
    file.write_text(yaml_text.dump(values))
    return str(file)


def check(fault: Fault, code: int, err: str) -> None:
    assert code == 2, err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, f"more than one message: {err}"
    assert "Traceback" not in err
    for part in fault.says:
        assert part in err


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_one_message_and_nothing_changed(
    fault: Fault,
    tmp_path: Path,
    values: Values,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = spoilt(fault, tmp_path, values)
    before = tree(tmp_path)
    code = main(["train", file])
    check(fault, code, capfd.readouterr().err)
    assert tree(tmp_path) == before


REAL = {name: fault for name, fault in FAULTS.items() if fault.real}


@pytest.mark.parametrize("fault", REAL.values(), ids=REAL.keys())
def test_the_same_through_the_real_command(fault: Fault, tmp_path: Path, values: Values) -> None:
    file = spoilt(fault, tmp_path, values)
    before = tree(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "thrifty.cli", "train", file], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    check(fault, done.returncode, done.stderr)
    assert tree(tmp_path) == before


FILES = {
    "missing": (None, "no such file"),
    "twice": ("seed: 1\nseed: 2\n", "lines 1 and 2"),
    "broken": ("methods: [lora\n", "not valid YAML"),
    "a list": ("- seed\n", "not keys and values"),
    "not text": (b"\xff\xfe\x00", "cannot be read"),
}


@pytest.mark.parametrize(("content", "says"), FILES.values(), ids=FILES.keys())
def test_a_run_file_that_cannot_be_read(
    content: str | bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.yaml"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["train", str(file)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "my.yaml" in err
    assert err.count("\n") == 1
