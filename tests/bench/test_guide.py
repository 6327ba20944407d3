"""The guide's experiment, its published numbers, and the bench's own test of itself."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.conftest import Simulated
from thrifty.bench import guide
from thrifty.bench.measure import Job, Outcome, measure
from thrifty.bench.options import Options, read_values
from thrifty.config import parse_config

ROOT = Path(__file__).resolve().parents[2]


def test_the_published_numbers_are_those_of_the_collection() -> None:
    with (ROOT / "benchmarks/published.csv").open(encoding="utf-8") as file:
        known = [row for row in csv.DictReader(file) if row["id"].startswith("hf-bert-")]
    rows = guide.content()["rows"]
    assert len(rows) == len(known) == 9
    for row, one in zip(rows, known, strict=True):
        assert row["published"] == [float(one["throughput"]), round(1000 * float(one["peak_gb"]))]
        assert guide.arm_of(row).keys["per_device_train_batch_size"] == int(one["micro_batch"])
        assert guide.arm_of(row).keys["gradient_accumulation_steps"] == int(one["accumulation"])
        assert ("fp16" in guide.arm_of(row).methods) == (one["precision"] == "fp16-amp")
        assert ("gradient-checkpointing" in guide.arm_of(row).methods) == (one["checkpointing"] == "full")


def values(tmp_path: Path, shape: str) -> dict[str, Any]:
    content = guide.content()
    own = {**content["common"], **content["shapes"][shape], "train_file": str(guide.random_data(tmp_path))}
    return read_values(own)[0]


@pytest.mark.parametrize("shape", ["cpu", "accelerator"])
def test_every_configuration_is_a_valid_run(tmp_path: Path, shape: str) -> None:
    content = guide.content()
    for entry in [*content["rows"], *content["table"]]:
        arm = guide.arm_of(entry)
        methods = [name for name in arm.methods if name in guide.registry.names()]
        parse_config({**values(tmp_path, shape), **arm.keys, "methods": methods})


def test_random_samples_are_full(tmp_path: Path) -> None:
    own = values(tmp_path, "cpu")
    small = {**own["model_config"], "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    found = measure(Job(kind="speed", arm="x", run={**own, "model_config": small, "per_device_train_batch_size": 4},
                        steps=5, threads=1))  # fmt: skip
    assert found.reason is None
    assert found.tokens == 5 * 4 * 128
    assert guide.random_data(tmp_path).read_text() == guide.random_data(tmp_path / "again").read_text()


def test_tables_of_a_simulated_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Machine(Simulated):
        def run(self, job: Job) -> Outcome:
            found = super().run(job)
            found.peak_bytes = 800 if "gradient-checkpointing" in job.methods else 1000
            return found

    def pace(job: Job) -> float:
        factor = 1.3 if "gradient-checkpointing" in job.methods else 1.0
        return 0.05 * factor * job.run["gradient_accumulation_steps"] ** 0.5

    predicted = {"peak_bytes": 10**9, "device_bytes": 2 * 10**9, "samples_per_second": 5.0}
    monkeypatch.setattr(guide.GuideSession, "_predict", lambda self, arm, where: predicted)
    options = Options(run=values(tmp_path, "cpu"), name="guide-cpu", minutes=None, rounds=7, quality=False)
    session = guide.GuideSession(guide.content(), options, tmp_path / "out", runner=Machine(pace))
    session.run()
    found = guide.result_of(session)
    rows = {row[0]: row for row in guide.row_cells(found)}
    assert len(rows) == 9
    assert rows["vanilla"][1] == "8.86"
    assert rows["vanilla"][2] == "5.00"
    assert rows["vanilla"][5:8] == ["14,949 MB", "2,000 MB", "1,000 MB"]
    assert "slower" in rows["+ gradient checkpointing"][4]
    table = {row[0]: row for row in guide.table_cells(found)}
    assert table["gradient checkpointing"][1:3] == ["no, 20 % slower", "no, slower"]
    assert table["gradient checkpointing"][3].startswith("×0.77")
    assert table["gradient checkpointing"][4:] == ["yes", "yes", "−20.0 %"]
    assert table["data preloading (2 workers)"][2] == "no"
    for show in (guide.markdown, guide.terminal, guide.page):
        assert "14,949" in show(found)
    missing = [row for row in table.values() if "there is no method" in row[-1]]
    assert len(missing) == sum(
        any(name not in guide.registry.names() for name in entry.get("methods", ()))
        for entry in guide.content()["table"]
    )


def test_the_planner_predicts_a_configuration(tmp_path: Path) -> None:
    own = values(tmp_path, "cpu")
    own["model_config"] = {**own["model_config"], "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    options = Options(run=own, name="guide", minutes=None, quality=False)
    session = guide.GuideSession(guide.content(), options, tmp_path / "out", runner=Simulated(lambda job: 0.1))
    found = session._predict(session.arms[0], "here")
    measured = measure(Job(kind="memory", arm="x", run={**own, **session.arms[0].keys}, steps=3, threads=1)).peak_bytes
    assert measured == pytest.approx(found["peak_bytes"], rel=0.05)


SCRIPT = ROOT / "benchmarks/bench_can_tell.py"


def test_twenty_repeats_on_a_simulated_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`benchmarks/bench_can_tell.py` with processes that differ by 2 %."""
    from thrifty.method import registry

    spec = importlib.util.spec_from_file_location("bench_can_tell", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_can_tell"] = module
    out = tmp_path / "can-tell.json"
    try:
        spec.loader.exec_module(module)
        machine = Simulated(lambda job: 0.055 if job.methods else 0.05, noise=0.02)
        assert module.main(["--out", str(out)], runner=machine) == 0
        # A bench that calls everything slower, or nothing, must not pass.
        assert module.main(["--out", str(out)], runner=Simulated(lambda job: 0.05, noise=0.02)) == 1
    finally:
        registry._methods.pop("planted-slow-down", None)
        del sys.modules["bench_can_tell"]
    found = json.loads(out.read_text())
    assert found["repeats"] == len(found["rows"]) == 20
    assert {"machine", "versions", "date"} <= found.keys()
    capsys.readouterr()


@pytest.mark.soak
def test_a_real_repeat_tells_a_planted_slow_down(tmp_path: Path) -> None:
    """So large that no noise of a busy machine hides it: the planted method really wastes the time it says."""
    out = tmp_path / "can-tell.json"
    words = ["--repeats", "1", "--rounds", "3", "--planted", "3", "--threads", "1", "--out", str(out)]
    subprocess.run([sys.executable, str(SCRIPT), *words, "max_length=16"], check=False, capture_output=True)
    found = json.loads(out.read_text())["rows"][0]
    assert found["planted"]["speed"]["median"] < 0.5
    assert found["planted"]["speed"]["median"] < found["same again"]["speed"]["median"]
