"""A whole run, small: what it leaves behind, that it repeats, goes on after an interrupt, and loads without thrifty."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from thrifty import run
from thrifty.cli import main
from thrifty.config import load_config, parse_config, yaml_text
from thrifty.report.metrics import read_metrics, rows_of
from thrifty.run.training import RunResult


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base_values: dict[str, Any]) -> RunResult:
    """One run with two methods, an evaluation and a checkpoint on the way."""
    folder = tmp_path_factory.mktemp("finished")
    extra = {"methods": [{"lawa": {"window": 2, "every": 1}}, "gradient-accumulation"], "max_steps": 4, "save_steps": 2}
    values = {**base_values, **extra, "output_dir": str(folder / "out"), "logging_steps": 1, "eval_strategy": "steps"}
    return run.train(parse_config({**values, "eval_steps": 2}))


def test_everything_is_there(finished: RunResult) -> None:
    names = {path.name for path in finished.output_dir.iterdir()}
    assert names >= {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "checkpoint-2",
        "checkpoint-4",
        "run.yaml",
        "metrics.jsonl",
        "summary.json",
        "loss.png",
        "report.html",
        "README.md",
    }


def test_the_summary_tells_the_truth(finished: RunResult) -> None:
    summary = json.loads((finished.output_dir / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["eval_loss"] == pytest.approx(finished.metrics["eval_loss"])
    assert summary["bits_per_byte"] == pytest.approx(finished.metrics["eval_bits_per_byte"])
    assert summary["perplexity"] == pytest.approx(finished.metrics["eval_perplexity"])
    assert [method["name"] for method in summary["methods"]] == [part["name"] for part in summary["methods"]]
    assert {method["name"] for method in summary["methods"]} == {"lawa", "gradient-accumulation"}
    assert summary["peak_memory_bytes"] > 10**6
    assert summary["tokens_per_second"] > 0
    assert summary["wall_seconds"] > 0
    assert summary["versions"]["torch"]
    rows = rows_of(read_metrics(finished.output_dir), "train")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["tokens"] == summary["tokens"] > 0


def test_the_model_loads_in_an_interpreter_without_thrifty(finished: RunResult) -> None:
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(finished.output_dir)!r})
tokenizer = AutoTokenizer.from_pretrained({str(finished.output_dir)!r})
ids = tokenizer("the quick brown fox", return_tensors="pt")["input_ids"]
assert not any(name.startswith("thrifty") for name in sys.modules)
print(float(model(input_ids=ids, labels=ids).loss))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(finished.output_dir)
    ids = tokenizer("the quick brown fox", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert float(done.stdout) == pytest.approx(float(model(input_ids=ids, labels=ids).loss), rel=1e-6)


def test_run_yaml_repeats_the_run_bit_for_bit(finished: RunResult, tmp_path: Path) -> None:
    again = run.train(load_config(finished.output_dir / "run.yaml", [f"output_dir={tmp_path / 'again'}"]))
    assert (again.output_dir / "model.safetensors").read_bytes() == (
        finished.output_dir / "model.safetensors"
    ).read_bytes()
    assert again.metrics["eval_loss"] == finished.metrics["eval_loss"]
    assert again.sample_text == finished.sample_text
    first, second = (yaml_text.read_mapping(result.output_dir / "run.yaml") for result in (finished, again))
    assert {**first, "output_dir": second["output_dir"]} == second


def test_an_interrupted_run_goes_on_to_the_same_end(finished: RunResult, tmp_path: Path) -> None:
    # What a kill between step 2 and 4 leaves: no final files, the record up to some later step, the older checkpoint.
    killed = tmp_path / "killed"
    killed.mkdir()
    shutil.copytree(finished.output_dir / "checkpoint-2", killed / "checkpoint-2")
    for name in ("run.yaml", "metrics.jsonl"):
        shutil.copy(finished.output_dir / name, killed / name)
    result = run.train(load_config(killed / "run.yaml", [f"output_dir={killed}", "resume=auto"]))
    assert (killed / "model.safetensors").read_bytes() == (finished.output_dir / "model.safetensors").read_bytes()
    assert result.summary["steps"] == 4
    assert result.summary["tokens"] == finished.summary["tokens"]
    assert [row["step"] for row in rows_of(read_metrics(killed), "train")] == [1, 2, 3, 4]


def test_a_finished_run_is_not_overwritten(finished: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished.output_dir / "model.safetensors").stat().st_mtime_ns
    assert main(["train", str(finished.output_dir / "run.yaml")]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (finished.output_dir / "model.safetensors").stat().st_mtime_ns == before


def test_overwrite_replaces_the_run(base_values: dict[str, Any], tmp_path: Path) -> None:
    values = {**base_values, "output_dir": str(tmp_path / "out"), "save_steps": 1, "max_new_tokens": 0}
    run.train(parse_config(values))
    (tmp_path / "out" / "notes.txt").write_text("mine")
    run.train(parse_config({**values, "max_steps": 1, "overwrite": True}))
    assert sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-1"]
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert [row["event"] for row in read_metrics(tmp_path / "out") if row["kind"] == "event"] == ["start", "end"]


def test_evaluate_finds_what_training_reported(finished: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(p.name for p in finished.output_dir.iterdir())
    assert main(["evaluate", str(finished.output_dir), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["eval_loss"] == pytest.approx(finished.metrics["eval_loss"], rel=1e-5)
    assert metrics["eval_bits_per_byte"] == pytest.approx(finished.metrics["eval_bits_per_byte"], rel=1e-5)
    assert sorted(p.name for p in finished.output_dir.iterdir()) == before


def test_generate_continues_a_prompt_and_repeats_itself(
    finished: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(finished.output_dir), "-p", "the quick", "--max-new-tokens", "6"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*words, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("the quick")
    assert texts[0] == texts[1] != texts[2]


def test_a_person_is_told_what_happens(
    base_values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.yaml"
    values = {
        **base_values,
        "methods": ["gradient-accumulation"],
        "logging_steps": 1,
        "output_dir": str(tmp_path / "out"),
    }
    file.write_text(yaml_text.dump(values))
    assert main(["train", str(file)]) == 0
    out, err = capsys.readouterr()
    for part in (
        "hardware",
        "memory",
        "⟦",
        "1. gradient-accumulation",
        "validation loss",
        "bits per byte",
        "report.html",
    ):
        assert part in out
    order = [out.index(word) for word in ("hardware", "sample", "recipe", "result", "passage", "report")]
    assert order == sorted(order)
    for part in ("loss", "lr", "tokens/s"):
        assert part in err


def test_without_an_output_folder_the_next_free_one_is_taken(
    base_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {key: value for key, value in base_values.items() if key != "output_dir"}
    (tmp_path / "my.yaml").write_text(yaml_text.dump({**values, "max_steps": 1, "max_new_tokens": 0}))
    for number in (1, 2):
        assert main(["train", "my.yaml"]) == 0
        assert (tmp_path / "runs" / f"my-00{number}" / "model.safetensors").is_file()


def test_precision_auto_is_settled_in_the_run_file(
    base_values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from thrifty.hardware.detect import detect
    from thrifty.hardware.precision import choose_precision

    run.train(parse_config({**base_values, "precision": "auto", "output_dir": str(tmp_path / "out")}))
    choice = choose_precision(detect(use_cpu=True))
    assert choice.methods == tuple(yaml_text.read_mapping(tmp_path / "out" / "run.yaml").get("methods") or ())
    assert choice.line.split(":")[0] in capsys.readouterr().out
