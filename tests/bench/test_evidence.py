"""Evidence: one technique against its baseline at equal seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.conftest import Simulated
from thrifty.bench.evidence import EvidenceSession, markdown, page, read, result_of, terminal
from thrifty.bench.measure import Job
from thrifty.bench.options import Options
from thrifty.bench.publish import publish
from thrifty.bench.publish import read as read_result
from thrifty.cli import main
from thrifty.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, **values: Any) -> Path:
    path = folder / "evidence.yaml"
    path.write_text(yaml.safe_dump({"name": "lion", "arm": {"methods": ["lion"]}, **values}))
    return path


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"secnds": 3}, "did you mean 'seconds'"),
        ({"seconds": 0}, "seconds=0"),
        ({"arm": []}, "arm"),
        ({"tune": {"learning_rate": 1e-3}}, "tune.learning_rate"),
        ({"baseline": ["lion"]}, "baseline"),
    ],
)
def test_a_wrong_file_is_one_message(tmp_path: Path, values: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        read(write(tmp_path, **values))


def test_both_sides_have_the_same_seconds_and_tune_apart(run: dict[str, Any], tmp_path: Path) -> None:
    evidence = read(
        write(tmp_path, run=run, seconds=3.0, tune={"learning_rate": [1e-3, 2e-3]}, tune_arm={"learning_rate": [1e-4]})
    )

    def pace(job: Job) -> float:
        return 0.1 if job.methods else 0.05

    runner = Simulated(pace, noise=0.0)
    options = Options(run=run, name="lion", minutes=None, rounds=evidence.rounds)
    session = EvidenceSession(evidence, options, tmp_path / "out", runner=runner)
    session.run()
    losses = [job for job in runner.jobs if job.kind == "loss"][1:]
    assert {job.steps for job in losses if job.methods} == {30}
    assert {job.steps for job in losses if not job.methods} == {60}
    tuning = [job for job in losses if job.seed > 500]
    assert [(bool(job.methods), job.run["learning_rate"]) for job in tuning] == [
        (False, 1e-3), (False, 2e-3)
    ]  # fmt: skip
    assert {job.run["learning_rate"] for job in losses if job.methods} == {1e-4}  # of one value nothing is to choose
    judged = [job for job in losses if job.seed < 500]
    assert [bool(job.methods) for job in judged] == [False, True, True, False, False, True]
    found = result_of(session)
    assert found["verdict"] == "worse"  # half of the steps of the same simulated curve
    assert found["arm"]["train_seconds"] == pytest.approx([3.0] * 3)
    assert found["baseline"]["train_seconds"] == pytest.approx([3.0] * 3)
    assert found["arm"]["keys"]["learning_rate"] == 1e-4
    for shown in (markdown(found), terminal(found), page(found)):
        assert "worse" in shown
    assert read_result(publish(found, tmp_path)) == found
    unfinished = {**found, "complete": False}
    with pytest.raises(InputError, match="not finished"):
        publish(unfinished, tmp_path)


def test_files_with_the_same_baseline_train_it_once(run: dict[str, Any], tmp_path: Path) -> None:
    values = {"run": run, "seconds": 3.0, "seeds": 2, "tune": {"learning_rate": [1e-3, 2e-3]}}
    trained = []
    for name, machine in (("lion", 0.05), ("muon", 0.1)):  # the machine is half as fast for the second
        evidence = read(write(tmp_path, **values | {"name": name, "arm": {"methods": [name]}}))
        runner = Simulated(lambda job, machine=machine: machine * (2 if job.methods else 1), noise=0.0)
        options = Options(run=run, name=name, minutes=None, rounds=evidence.rounds)
        session = EvidenceSession(evidence, options, tmp_path / name, runner=runner)
        session.run()
        trained.append([job for job in runner.jobs if job.kind == "loss" and job.evaluations > 1])
        found = result_of(session)
    first, second = trained
    assert [bool(job.methods) for job in first].count(False) == 4
    assert all(job.methods for job in second)
    assert {job.steps for job in second} == {30}  # as many as take the time of the baseline's 60 on today's machine
    assert found["drift"] == pytest.approx(2.0)
    assert found["baseline"]["steps"] == [60, 60]
    other = read(write(tmp_path, **values | {"seconds": 2.0}))
    runner = Simulated(lambda job: 0.1, noise=0.0)
    options = Options(run=run, name="lion", minutes=None, rounds=other.rounds)
    EvidenceSession(other, options, tmp_path / "other", runner=runner).run()
    assert any(not job.methods and job.steps == 20 and job.evaluations > 1 for job in runner.jobs)


def test_a_pace_within_the_noise_is_no_advantage(run: dict[str, Any], tmp_path: Path) -> None:
    evidence = read(write(tmp_path, run=run, seconds=3.0, seeds=1))
    runner = Simulated(lambda job: 0.05, noise=0.1)
    options = Options(run=run, name="lion", minutes=None, rounds=evidence.rounds)
    session = EvidenceSession(evidence, options, tmp_path / "out", runner=runner)
    session.run()
    found = result_of(session)
    assert found["speed"] == "no difference"
    assert found["step_time_ratio"]["median"] != 1
    assert found["arm"]["steps"] == found["baseline"]["steps"]


def test_without_seeds_only_speed_is_measured(run: dict[str, Any], tmp_path: Path) -> None:
    evidence = read(write(tmp_path, run=run, seeds=0, published="3 times faster (of others)"))
    runner = Simulated(lambda job: 0.05 if job.methods else 0.1, noise=0.0)
    options = Options(run=run, name="lion", minutes=None, rounds=evidence.rounds)
    session = EvidenceSession(evidence, options, tmp_path / "out", runner=runner)
    session.run()
    assert not any(job.evaluations > 1 for job in runner.jobs)
    found = result_of(session)
    assert found["complete"]
    assert found["rate_ratio"]["median"] == pytest.approx(2.0)
    for shown in (markdown(found), terminal(found), page(found)):
        assert "faster" in shown
        assert "3 times faster (of others)" in shown


def test_a_real_one(run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from thrifty.bench import evidence

    path = write(tmp_path, run=run, seconds=0.5, rounds=1, seeds=1, evaluations=2, eval_samples=4)
    code = evidence.run(str(path), threads=1, output=str(tmp_path / "out"), publish_to=str(tmp_path))
    assert code == 0
    found = read_result(tmp_path / "evidence-lion.json")
    assert len(found["arm"]["losses"]) == len(found["baseline"]["losses"]) == 1
    assert found["verdict"] == "not measured"  # of one seed nothing can be said
    assert found["difference"]["median"] == pytest.approx(found["arm"]["losses"][0] - found["baseline"]["losses"][0])
    assert found["arm"]["peak_bytes"] < found["baseline"]["peak_bytes"]  # one number of state a weight, not two
    assert "verdict" in capsys.readouterr().out


def test_the_examples_are_valid() -> None:
    from thrifty.recipe import Recipe

    files = sorted((ROOT / "benchmarks/evidence").glob("*.yaml"))
    assert len(files) >= 18
    assert {"muon", "lion", "stacking", "layer-drop", "selective-backprop", "lawa", "schedule-free"} <= {
        read(file).name for file in files
    }
    for file in files:
        assert len(Recipe.parse(list(read(file).arm["methods"]))) >= 1


def test_a_missing_file_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--evidence", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err
