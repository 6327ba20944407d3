"""The scripts beside the bench: other tools on the same task, and the data of the published benches."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
import types
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


def test_two_results_are_compared_row_by_row(tmp_path: Path) -> None:
    from thrifty.bench.result import circumstances

    repeat = load("bench_repeat.py")

    def result(verdict: str, high: float) -> dict[str, Any]:
        arm = {"verdict": verdict, "loss_at_equal_seconds": {"difference": {"low": -0.2, "high": high}}}
        rows = [
            {"table": "ablation", "label": "baseline", "arm": "baseline", "reason": None},
            {"table": "ablation", "label": "lion", "arm": "lion", "reason": None},
            {"table": "ablation", "label": "tf32", "arm": None, "reason": "no such units"},
        ]
        return {
            "format": "thrifty-bench/1", "label": "measured", "name": "x", **circumstances(1), "run": {},
            "plan": {"text": "5 rounds"}, "rows": rows, "arms": {"lion": arm, "baseline": {"verdict": "not measured"}},
        }  # fmt: skip

    found = repeat.compare(result("faster", -0.1), result("no difference", -0.1))
    assert found["speed"] == {"equal": 1, "of": 2}  # the row that cannot run is called the same
    assert found["loss"] == {"equal": 1, "of": 1}
    assert repeat.compare(result("faster", -0.1), result("faster", 0.1))["loss"] == {"equal": 0, "of": 1}
    files = [tmp_path / f"{n}.json" for n in (1, 2)]
    for file in files:
        file.write_text(json.dumps(result("faster", -0.1)))
    out = tmp_path / "bench-repeat.json"
    assert repeat.main([*map(str, files), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["speed"] == {"equal": 2, "of": 2}


def test_the_depth_sweep_counts_who_trains(tmp_path: Path) -> None:
    from thrifty.bench.measure import Job, Outcome

    sweep = load("depth_sweep.py")

    class Machine:
        def run(self, job: Job) -> Outcome:
            loss = 9.0 if not job.methods and job.run["model_config"]["num_hidden_layers"] > 4 else 2.0
            return Outcome(curve=[(job.steps, 1, 1.0, loss)])

    out = tmp_path / "depth-sweep.json"
    assert sweep.main(["--depths", "2", "8", "--seeds", "2", "--out", str(out)], runner=Machine()) == 0
    found = json.loads(out.read_text())
    assert 2.0 < found["without_context"] < 9.0
    trained = {(row["depth"], row["arm"]): row["trained"] for row in found["rows"]}
    assert trained[8, "plain"] == 0
    assert trained[2, "plain"] == trained[8, "rezero"] == trained[8, "fixup"] == 2


def test_time_to_loss_runs_both_sides_in_turns() -> None:
    script = load("time_to_loss.py")
    recipe = script.Bare()
    rates = [recipe.lr_at(step) for step in range(recipe.steps)]
    assert max(rates) == rates[recipe.warmup] == pytest.approx(1e-3)
    assert rates[0] == pytest.approx(1e-3 / 101)
    assert rates[-1] == pytest.approx(1e-4, rel=1e-3)

    order = []

    def loop() -> Any:
        for number in range(4):
            order.append(number)
            yield
        return {"loss": 1.0}

    other, clock = script.Turns(loop()), script.Clock()
    timed = script.Timed(clock, 4, other)
    args = types.SimpleNamespace(max_steps=8)
    timed.on_train_begin(args, None, None)
    for step in range(8):
        order.append(f"step {step}")
        timed.on_step_begin(args, types.SimpleNamespace(global_step=step), None)
    clock.stop()
    assert [turn for turn in order if isinstance(turn, int)] == [0, 1, 2, 3]
    assert order.index(1) > order.index("step 2")
    assert other.finish() == {"loss": 1.0}

    base, ours = {"loss": 2.0, "seconds": 10.0, "cpu_seconds": 8.0}, {"loss": 1.9, "seconds": 2.0, "cpu_seconds": 2.0}
    found = script.summary([ours, {**ours, "loss": 2.1}], [base, base])
    assert found["reached"] == [True, False]
    assert found["ratio"] == pytest.approx(0.2)
    assert found["cpu_ratio"] == pytest.approx(0.25)


def test_a_check_that_fails_does_not_keep_the_others_from_running(monkeypatch, capfd) -> None:
    check = load("check.py")
    assert all((BENCHMARKS / f"{name}.py").exists() for name in check.CHECKS)
    # A script that is told an unknown argument ends with 2, and one that is asked for help with 0.
    monkeypatch.setattr(check, "CHECKS", {"overhead": ("--unknown",), "saving": ("--help",)})
    assert check.main([]) == 1
    said = capfd.readouterr().out
    assert re.search(r"overhead +FAILS \(exit code 2\)", said)
    assert re.search(r"saving +holds", said)
    assert check.main(["saving"]) == 0
    with pytest.raises(SystemExit) as refused:
        check.main(["nothing"])
    assert refused.value.code == 2
    assert "there are overhead, saving" in capfd.readouterr().err
