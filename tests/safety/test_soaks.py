"""Short versions of the soaks in `benchmarks/soak/`; `make soak` runs the whole of them and keeps their tables."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks" / "soak"))

import disk  # noqa: E402
import kill  # noqa: E402
import malformed  # noqa: E402
import nan  # noqa: E402
import oom  # noqa: E402


@pytest.mark.parametrize(
    "name",
    [
        "forward of the second of two micro-batches",
        "twice in one step",
        "trial step, optimizer",
        "optimizer, while its state is made",
        "optimizer, half done",
        "evaluation",
        "stacking, after the growth",
    ],
)
def test_out_of_memory(tmp_path: Path, name: str) -> None:
    row = oom.soak(name, oom.PLACES[name], tmp_path)
    assert row["equal"], row
    assert row["said"]


@pytest.mark.parametrize(
    "name",
    ["one number, without clipping", "loss of the second of three micro-batches", "going back across a growth"],
)
def test_numbers(tmp_path: Path, name: str) -> None:
    row = nan.soak(name, nan.PLACES[name], tmp_path)
    assert row["good"], row


def test_malformed_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of each sort."""
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    malformed.warm_up()
    rows = [malformed.judge(case, tmp_path) for case in malformed.all_cases(each=1, every=25)]
    assert len(rows) > 12
    assert [row for row in rows if row["problems"]] == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that somebody without rights may reach, which pytest's own may not be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_damaged_checkpoints_full_disks_and_signals(open_folder: Path) -> None:
    soak = disk.Soak(open_folder)
    soak.damage("optimizer.pt", "one bit flipped")
    soak.all_damaged()
    soak.file_size_limit()
    soak.failing_flush(28, 9)
    soak.signal_on_a_full_disk()
    if disk.may_mount(open_folder):
        soak.full_disk(0.5)
    soak.read_only_later()
    soak.unwritable()
    assert [row for row in soak.rows if not row["good"]] == []


def test_kills(tmp_path: Path) -> None:
    row = kill.soak("lawa", kill.RECIPES["lawa"], 3, tmp_path, random.Random(5))
    assert row["kills"] == 3
    assert row["resumed_bit_exactly"] == 3


@pytest.mark.parametrize(
    ("name", "count", "least", "good"),
    [
        ("oom", "places", 20, "equal"),
        ("nan", "places", 10, "good"),
        ("malformed", "refused_with_one_message", 300, "refused_with_one_message"),
        ("disk", "faults", 80, "good"),
        ("pressure", "limits", 3, "equal"),
        ("kills", "kills", 200, "resumed_bit_exactly"),
    ],
)
def test_the_committed_tables_are_whole_and_good(name: str, count: str, least: int, good: str) -> None:
    total = json.loads((RESULTS / f"soak-{name}.json").read_text())["total"]
    assert total[count] >= least
    assert total[good] == total[count]
    assert total.get("wrong", 0) == 0


def test_the_guards_cost_less_than_a_hundredth_of_a_step() -> None:
    result = json.loads((RESULTS / "guard-overhead.json").read_text())
    assert sum(row["share_of_step"] for row in result["rows"]) == pytest.approx(result["share_of_step"])
    assert 0 < result["share_of_step"] < result["limit"] == 0.01
