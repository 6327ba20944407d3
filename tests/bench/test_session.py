"""A bench from options to result: the order of its measurements, its budget, and going on after an interruption."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.conftest import Simulated
from thrifty.bench import tables
from thrifty.bench.budget import loss_runs, timed_steps
from thrifty.bench.html import page
from thrifty.bench.measure import Job, Outcome
from thrifty.bench.options import Options
from thrifty.bench.publish import publish, read
from thrifty.bench.result import result_of
from thrifty.bench.rows import Arm
from thrifty.bench.session import AGAIN, BenchError, Session
from thrifty.errors import InputError

METHODS = ["bf16", "gradient-checkpointing"]


def pace(job: Job) -> float:
    factor = 1.0
    for name in job.methods:
        factor *= {"bf16": 0.8, "gradient-checkpointing": 1.3}.get(name, 1.0)
    return 0.05 * factor


def options(run: dict[str, Any], **changes: Any) -> Options:
    return Options(**{"run": run, "name": "tiny", "chosen": list(METHODS), "steps": 30, "rounds": 7, **changes})


def finished(run: dict[str, Any], folder: Path, **changes: Any) -> Session:
    session = Session(options(run, **changes), folder, runner=Simulated(pace))
    session.run()
    return session


@pytest.fixture(scope="module")
def session(run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Session:
    return finished(run, tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def result(session: Session) -> dict[str, Any]:
    return result_of(session)


def test_rounds_alternate_and_hold_the_baseline_twice(session: Session) -> None:
    jobs = session.processes.jobs  # type: ignore[union-attr]
    speed = [job for job in jobs if job.kind == "speed"]
    names = [job.arm for job in speed[:5]]
    assert sorted(names) == sorted(
        ["baseline", AGAIN, "bf16", "gradient-checkpointing", "bf16 + gradient-checkpointing"]
    )
    assert [job.arm for job in speed[5:10]] == names[::-1]
    assert len({job.seed for job in speed[:5]}) == 1  # the same samples in the same order
    assert len({job.seed for job in speed}) == 7
    assert len({job.steps for job in speed}) == 1


def test_verdicts_speed_and_noise(result: dict[str, Any]) -> None:
    arms = result["arms"]
    assert arms["bf16"]["verdict"] == "faster"
    assert arms["bf16"]["speed"]["median"] == pytest.approx(1 / 0.8, rel=0.03)
    assert arms["gradient-checkpointing"]["verdict"] == "slower"
    assert arms["bf16 + gradient-checkpointing"]["speed"]["median"] == pytest.approx(1 / 1.04, rel=0.03)
    assert result["noise"]["low"] < 1 < result["noise"]["high"]
    assert len(result["noise_rounds"]) == 7
    added = next(row for row in result["rows"] if row["label"] == "+ gradient-checkpointing")
    assert added["against_previous"]["speed"]["median"] == pytest.approx(1 / 1.3, rel=0.03)


def test_losses_are_measured_at_equal_tokens_and_at_equal_seconds(session: Session, result: dict[str, Any]) -> None:
    arms = result["arms"]
    assert arms["baseline"]["loss_at_equal_tokens"]["steps"] == [30, 30, 30]
    assert arms["bf16"]["loss_at_equal_tokens"]["steps"] == [30, 30, 30]
    more = arms["bf16"]["loss_at_equal_seconds"]["steps"]
    assert more == pytest.approx([37.5] * 3, abs=1.5)
    change = arms["bf16"]["loss_at_equal_seconds"]["difference"]
    assert change["high"] < 0  # a longer run of the simulated curve ends lower, by the same amount for every seed
    assert arms["bf16"]["time_to_baseline_loss"]["ratio"]["median"] == pytest.approx(0.8, rel=0.1)
    assert arms["gradient-checkpointing"]["loss_at_equal_tokens"]["difference"]["median"] == pytest.approx(0.0)


def test_one_run_stands_for_both_budgets_where_they_agree() -> None:
    base = Outcome(step_seconds=1.0, tokens=100, steps=10)
    assert loss_runs(50, Outcome(step_seconds=1.01, tokens=100, steps=10), base) == {"tokens": 50}
    packed = Outcome(step_seconds=1.5, tokens=200, steps=10)
    assert loss_runs(50, packed, base) == {"tokens": 25, "seconds": 33}
    slow_start = Outcome(step_seconds=1.0, tokens=100, steps=10, prepare_seconds=20)
    assert loss_runs(50, slow_start, base)["seconds"] == 30
    assert timed_steps(0.001) == 103
    assert [timed_steps(seconds) for seconds in (0.1, 0.3, 10.0)] == [23, 17, 11]  # 20 steps, 4 s, 8 steps


def test_a_killed_bench_goes_on_where_it_was(run: dict[str, Any], tmp_path: Path, result: dict[str, Any]) -> None:
    runner = Simulated(pace)
    runner.stop_after = 20
    first = Session(options(run), tmp_path, runner=runner)
    first.run()
    assert first.interrupted
    partial = result_of(first)
    assert partial["complete"] is False
    assert "goes on where it was" in tables.plain(partial)
    page(partial)
    with pytest.raises(InputError, match="not finished"):
        publish(partial, tmp_path / "published")
    second_runner = Simulated(pace, seed=1)
    second = Session(options(run), tmp_path, runner=second_runner)
    second.run()
    assert not second.interrupted
    whole = len(Session(options(run), tmp_path, runner=second_runner).state.outcomes)
    assert len(second_runner.jobs) == whole - 20
    for key, outcome in first.state.outcomes.items():
        assert second.state.outcomes[key] == outcome
    third_runner = Simulated(pace)
    Session(options(run), tmp_path, runner=third_runner).run()
    assert third_runner.jobs == []
    assert result_of(second)["arms"].keys() == result["arms"].keys()


def test_an_unfinished_run_at_equal_seconds_is_not_replaced_by_another(run: dict[str, Any], tmp_path: Path) -> None:
    runner = Simulated(pace)
    session = Session(options(run), tmp_path, runner=runner)
    session.run()
    for key in [key for key in session.state.outcomes if key.startswith("loss-seconds/bf16/")]:
        del session.state.outcomes[key]
    arm = result_of(session)["arms"]["bf16"]
    assert "loss_at_equal_tokens" in arm
    assert "loss_at_equal_seconds" not in arm


def test_an_interruption_while_probing_still_gives_a_result(run: dict[str, Any], tmp_path: Path) -> None:
    runner = Simulated(pace)
    runner.stop_after = 2
    session = Session(options(run), tmp_path, runner=runner)
    session.run()
    assert session.interrupted
    assert "baseline" in tables.plain(result_of(session))


def test_the_budget_decides_the_steps(run: dict[str, Any], tmp_path: Path) -> None:
    long = {**run, "max_steps": 5000}
    session = finished(long, tmp_path, steps=None, minutes=5, rounds=None)
    assert session.plan is not None
    assert 20 <= session.plan.steps < 5000
    assert session.plan.expected_seconds <= 5 * 60
    assert "shortened from 5,000 to fit into 5 minutes" in session.plan.text
    jobs = [job for job in session.processes.jobs if job.kind == "loss"][1:]  # type: ignore[union-attr]
    assert sum(job.steps * pace(job) for job in jobs) <= 5 * 60


def test_too_short_a_time_says_how_long_it_takes(run: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--minutes \d+"):
        finished(run, tmp_path, steps=None, minutes=0.2, rounds=None)


def test_a_broken_baseline_ends_the_bench(run: dict[str, Any], tmp_path: Path) -> None:
    class Broken(Simulated):
        def run(self, job: Job) -> Outcome:
            return Outcome(reason="KeyError: 'x'", crashed=True)

    with pytest.raises(BenchError, match="KeyError"):
        Session(options(run), tmp_path, runner=Broken(pace)).run()


def test_a_row_that_fails_later_says_why(run: dict[str, Any], tmp_path: Path) -> None:
    class Diverging(Simulated):
        def run(self, job: Job) -> Outcome:
            if job.kind == "loss" and job.methods:
                return Outcome(reason="the loss is not finite at step 3")
            return super().run(job)

    session = Session(options(run), tmp_path, runner=Diverging(pace))
    session.run()
    text = tables.plain(result_of(session))
    assert text.count("cannot run here: the loss is not finite at step 3") == 4


def test_a_run_without_a_limit_of_steps_has_one(run: dict[str, Any], tmp_path: Path) -> None:
    no_limit = {key: value for key, value in run.items() if key != "max_steps"}
    session = finished(no_limit, tmp_path, steps=None, minutes=60, rounds=5)
    assert session.plan is not None
    assert session.plan.steps <= 1000


def test_fixed_arms(run: dict[str, Any], tmp_path: Path) -> None:
    arms = [Arm("baseline"), Arm("fast", ("bf16",))]
    session = Session(options(run, quality=False), tmp_path, arms=arms, runner=Simulated(pace))
    session.run()
    found = result_of(session)["arms"]
    assert found["fast"]["verdict"] == "faster"
    assert "loss_at_equal_tokens" not in found["fast"]


def test_pages_need_nothing_from_elsewhere(result: dict[str, Any]) -> None:
    import xml.etree.ElementTree as ElementTree

    html = page(result)
    assert not re.findall(r"(?:src|href)=", html)
    assert "http" not in html
    drawings = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(drawings) == 3  # memory, speed, loss against seconds
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert drawings[2].count("<path") == 4 * 3  # every row's three seeds


def test_markdown_has_every_row_and_column(result: dict[str, Any]) -> None:
    lines = [line for line in tables.markdown(result).splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + 3 + 3
    assert len({line.count(" | ") for line in lines[:4]}) == 1
    assert "7 pairs of runs of the baseline" in tables.markdown(result)


def test_a_published_result_reads_back_and_names_no_folder(result: dict[str, Any], tmp_path: Path) -> None:
    path = publish(result, tmp_path)
    assert path.name == "bench-tiny.json"
    again = read(path)
    assert again["versions"]["torch"]
    assert again["machine"]["cores"] >= 1
    assert again["date"]
    assert tables.markdown(again) == tables.markdown(result)
    assert again["run"]["train_file"] == "text.txt"
    assert str(Path.home()) not in path.read_text()
    broken = {key: value for key, value in result.items() if key != "machine"}
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    with pytest.raises(InputError, match="lacks machine"):
        read(tmp_path / "broken.json")


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"minutes": 0}, "--minutes"), ({"steps": 0}, "--steps"), ({"seeds": 0}, "--seeds"), ({"only": "x"}, "--only")],
)
def test_bad_options(run: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=key):
        options(run, **changes)
