"""The scripts beside the bench: other tools on the same task, and the data of the published benches."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from thrifty.config import load_config

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(path: str) -> ModuleType:
    name = path.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_of_tools_pairs_by_round_and_leaves_out_the_first_steps() -> None:
    peers = load("peers/run.py")

    def run(pace: float) -> dict[str, Any]:
        return {
            "seconds": [5.0, pace, pace, *[pace] * 20],
            "loss": 4.0,
            "start_seconds": 1.0,
            "versions": {},
            "tokens_per_step": 100,
        }

    busy = [1.0, 2.0, 1.5, 3.0, 1.2]
    runs = {
        "trainer": [run(0.1 * b) for b in busy],
        "trl": [run(0.15 * b) for b in busy],
        "litgpt": [{"reason": "exit code 1"}],
    }
    found = peers.table(runs)
    assert found["trl"]["step_ratio"]["median"] == pytest.approx(1.5)
    assert found["trl"]["verdict"] == "slower"
    assert found["trl"]["step_seconds"] == pytest.approx(0.15 * 1.5)
    assert found["trl"]["warm_up_extra_seconds"] == pytest.approx(5.0 - 0.15 * 1.5)
    assert found["trainer"]["step_ratio"] is None
    assert found["litgpt"]["reason"] == "exit code 1"


def test_every_tool_has_a_script_and_pinned_versions() -> None:
    peers = load("peers/run.py")
    for peer in peers.PEERS:
        script = (BENCHMARKS / f"peers/peer_{peer}.py").read_text()
        if peer == "thrifty":
            continue
        assert "import thrifty" not in script
        lines = (BENCHMARKS / f"peers/requirements-{peer}.txt").read_text().split()
        assert lines
        assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in lines)


def test_instructions_have_very_unequal_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare = load("runs/prepare.py")
    assert prepare.main([str(tmp_path), "instructions", "vit-digits"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "instructions.jsonl").read_text().splitlines()]
    lengths = sorted(len(row["completion"]) for row in rows)
    assert lengths[-1] > 20 * lengths[0]
    assert lengths[-1] > 5 * statistics.median(lengths)
    assert load_config(tmp_path / "instructions.yaml").task == "causal-lm"
    assert load_config(tmp_path / "vit-digits.yaml").task == "image-classification"
    assert len(list((tmp_path / "digits").rglob("*.png"))) == 1797
    with pytest.raises(SystemExit, match="usage"):
        prepare.main([])
    capsys.readouterr()
