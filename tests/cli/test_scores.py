"""`thrifty scores`: what a run leaves, shown and exported, and used by the next run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thrifty import run, scores
from thrifty.cli import main
from thrifty.config import parse_config
from thrifty.errors import InputError


@pytest.fixture
def scored(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a run with `prototypes` has left."""
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    run.train(parse_config({**values, "methods": [{"prototypes": {"clusters": 3}}], "max_new_tokens": 0}))
    (file,) = scores.stored()
    return file


def test_list_show_export_and_use(scored, values, tmp_path, capsys):
    capsys.readouterr()
    assert main(["scores"]) == 0
    assert scored.stem in capsys.readouterr().out
    assert main(["scores", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["method"], row["settings"]) == ("prototypes", {"clusters": 3, "steps": 0})

    assert main(["scores", "show", "proto", "-n", "2"]) == 0
    out = capsys.readouterr().out
    assert "highest" in out
    assert "lowest" in out
    assert "quick" in out, "the text of a sample"
    assert main(["scores", "show", str(scored), "-n", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found = scores.load(scored)
    assert [r["score"] for r in shown["highest"]] == sorted(found.values, reverse=True)[:3]
    assert [r["score"] for r in shown["lowest"]] == sorted(found.values)[:3]
    assert len(found) == row["samples"]

    target = tmp_path / "scores.csv"
    assert main(["scores", "export", "prototypes", str(target)]) == 0
    with target.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(r["score"]) for r in rows] == found.values.tolist()
    assert main(["scores", "export", "prototypes", str(target)]) == 2
    assert "there already" in capsys.readouterr().err

    method = {"el2n": {"scores": str(target), "keep_ratio": 0.5}}
    run.train(parse_config({**values, "methods": [method], "max_new_tokens": 0, "output_dir": str(tmp_path / "two")}))
    assert len(scores.stored()) == 1, "nothing new was scored"


@pytest.mark.parametrize("suffix", scores.SUFFIXES)
def test_files_round_trip(tmp_path, suffix):
    saved = scores.Scores(np.array([3, 1, 7]), np.array([0.5, -1.0, 0.5]), ["a,\n", "b", "é"], {"method": "x"})
    path = tmp_path / f"s{suffix}"
    saved.save(path)
    again = scores.load(path)
    assert again.ids.tolist() == [3, 1, 7]
    assert again.values.tolist() == [0.5, -1.0, 0.5]
    assert again.texts == saved.texts
    assert again.about == ({"method": "x"} if suffix == ".parquet" else {})
    assert again.order().tolist() == [0, 2, 1]
    assert again.of([7, 3]).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sample_id,value\n1,2\n", "no column 'score'"),
        ("sample_id,score\n1,two\n", "not a number"),
        ("sample_id,score\n1,2\n1,3\n", "occurs twice"),
        ("sample_id,score\n1,nan\n", "not finite"),
    ],
)
def test_faults_of_files(tmp_path, text, expected):
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(InputError, match=expected):
        scores.load(tmp_path / "s.csv")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["lst"], "did you mean 'list'"),
        (["show"], "says not which"),
        (["show", "nothing"], "no such scores"),
        (["show", "s.txt"], "no such scores"),
        (["show", "none.csv"], "no such file"),
    ],
)
def test_faults_of_words(tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    assert main(["scores", *words]) == 2
    assert expected in capsys.readouterr().err


def test_an_empty_cache_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    assert main(["scores"]) == 0
    assert "no scores in" in capsys.readouterr().out
