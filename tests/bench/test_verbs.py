"""`thrifty bench` and `thrifty compare` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from thrifty.bench import compare
from thrifty.bench import run as verbs
from thrifty.cli import main
from thrifty.errors import InputError
from thrifty.report.metrics import MetricsLog
from thrifty.report.summary import write_summary


def test_a_real_bench(run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump({**run, "methods": ["gradient-checkpointing"]}))
    given: dict[str, Any] = {
        "chosen": ["gradient-checkpointing", "tf32"], "only": "ablation", "steps": 10, "seeds": 1, "rounds": 1,
        "threads": 1,
        "output": str(tmp_path / "out"),
    }  # fmt: skip
    page = str(tmp_path / "p/page.html")
    assert verbs.bench(str(file), **given, form="json", publish_to=str(tmp_path), html=page) == 0
    found = json.loads(capsys.readouterr().out)
    arms = found["arms"]
    assert arms["gradient-checkpointing"]["peak_bytes"] < arms["baseline"]["peak_bytes"]
    same = arms["gradient-checkpointing"]["loss_at_equal_tokens"]["median"]
    assert same == pytest.approx(arms["baseline"]["loss_at_equal_tokens"]["median"], abs=1e-5)
    refused = next(row for row in found["rows"] if row["label"] == "tf32")
    assert "TF32" in refused["reason"]
    for name in ("out/report.html", "out/result.json", "out/tables.md", "out/state.jsonl", "p/page.html",
                 "bench-tiny.json"):  # fmt: skip
        assert (tmp_path / name).stat().st_size > 0
    assert verbs.bench(str(file), **given) == 0  # finished: nothing is measured again
    captured = capsys.readouterr()
    assert "going on with" in captured.err
    assert "cannot run here: tf32" in captured.out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--minutes", "0"], ["--minutes"]),
        (["--only", "both"], ["--only", "additive or ablation"]),
        (["--methods", "lionn"], ["did you mean 'lion'"]),
        (["--methods", "lora:r"], ["needs a value"]),
        (["nowhere.yaml"], ["nowhere.yaml"]),
        (["max_lenght=3"], ["did you mean"]),
        (["--guide", "some.yaml"], ["--guide"]),
        (["--json", "--markdown"], ["--json"]),
        (["--guide", "--methods", "lion"], ["--methods", "by the guide"]),
        (["--evidence", "x.yaml", "--steps", "3"], ["--steps", "evidence file"]),
        (["--guide", "--evidence", "x.yaml"], ["--evidence"]),
        (["--steps", "many"], ["--steps"]),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for part in parts:
        assert part in err
    assert not list(tmp_path.rglob("result.json"))


def test_an_output_that_is_a_file_is_refused(run: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(run))
    for places in ({"output": str(file)}, {"publish_to": str(file)}, {"html": str(tmp_path)}):
        with pytest.raises(InputError, match="folder"):
            verbs.bench(str(file), **{"chosen": [], "output": str(tmp_path / "out"), **places})


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    made = []
    for name, slope, methods in (("one", 0.1, []), ("two", 0.2, ["lion", {"lora": {"r": 4}}])):
        folder = tmp_path / name
        log = MetricsLog(folder / "metrics.jsonl")
        log.start()
        for step in range(1, 11):
            log.log_train(step, loss=5 - slope * step, tokens_per_second=100.0, wall_seconds=2.0 * step)
            if step % 5 == 0:
                log.log_eval(step, eval_loss=5.2 - slope * step)
        write_summary(folder, eval_loss=5.2 - 10 * slope, steps=10, tokens_per_second=100.0, task="causal-lm")
        (folder / "run.yaml").write_text(yaml.safe_dump({"learning_rate": slope, "seed": 1, "methods": methods}))
        made.append(str(folder))
    return made


def test_runs_side_by_side(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "pages/compare.html"
    assert main(["compare", *folders, "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "validation loss" in text
    assert "4.200" in text
    assert "3.200" in text
    assert "lion, lora: r: 4" in text
    assert "seed" not in text  # only settings that differ
    html = page.read_text()
    assert html.count("<svg") == 4
    assert "http" not in html
    assert main(["compare", *folders, "--html", str(page), "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["one", "two"]


def test_seconds_come_from_the_training_rows(folders: list[str]) -> None:
    at = compare._against(compare.load(folders)[0]["metrics"], "wall_seconds")
    assert at(5) == pytest.approx(10.0)
    assert at(0.5) == pytest.approx(1.0)


def test_a_run_that_lasts_and_runs_of_the_same_name(folders: list[str], tmp_path: Path) -> None:
    (Path(folders[1]) / "summary.json").unlink()
    head, rows = compare.table(compare.load(folders))
    assert ["validation loss", "4.200", "–"] in rows
    assert compare.load([folders[0], folders[0]])[1]["name"] == folders[0]
    assert head[1:] == ["one", "two"]


@pytest.mark.parametrize("words", [[], ["only-one"], ["nowhere", "elsewhere"]])
def test_compare_needs_two_runs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words]) == 2
    assert "error:" in capsys.readouterr().err
