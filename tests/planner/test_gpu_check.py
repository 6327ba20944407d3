"""The script that examines the planner on a GPU runs, here on a CPU with tiny models."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TINY", module.TINY[:1])
    monkeypatch.setattr(module, "METHODS", [[], ["gradient-checkpointing"], ["tf32"]])
    return module


def test_it_writes_what_was_predicted_and_measured(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--tiny", "--out", str(out)])
    script.main()
    result = json.loads(out.read_text())
    assert result["summary"]["measured"] == 2
    assert result["summary"]["memory"]["median"] < 0.01
    assert "tf32" in result["cells"][2]["skipped"]
    assert all(cell["calibrated_seconds"] > 0 for cell in result["cells"][:2])


def test_without_time_nothing_is_measured_and_that_is_said(script, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--tiny", "--minutes", "0", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    script.main()
    result = json.loads(out.read_text())
    assert {cell["skipped"] for cell in result["cells"]} == {"no time was left"}
    assert result["summary"] == {"cells": 3, "measured": 0, "failed": 0}


def test_a_cell_that_crashes_is_named_and_the_others_go_on(script, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thrifty.planner import measure as real

    whole = real.measure

    def crashing(workload, **options):
        if "gradient-checkpointing" in workload.methods:
            raise RuntimeError("an illegal memory access was encountered")
        return whole(workload, **options)

    monkeypatch.setattr(real, "measure", crashing)
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--tiny", "--out", str(out)])
    with pytest.raises(SystemExit, match="1"):
        script.main()
    cells = json.loads(out.read_text())["cells"]
    assert cells[0]["measured_bytes"] > 0
    assert cells[1]["failed"] == "RuntimeError: an illegal memory access was encountered"
    assert "skipped" in cells[2]


def test_every_model_and_method_of_the_check_exists(script) -> None:
    import importlib

    from thrifty.method import registry
    from thrifty.planner.catalogue import resolve

    fresh = importlib.util.spec_from_file_location("gpu_check_again", SCRIPT)
    assert fresh is not None
    module = importlib.util.module_from_spec(fresh)
    assert fresh.loader is not None
    fresh.loader.exec_module(module)
    for source, *_ in module.MODELS:
        assert resolve(source).model_type
    names = {name for methods in module.METHODS for name in methods}
    assert names <= set(registry.names())
    assert len(module.MODELS) * len(module.METHODS) >= 40
