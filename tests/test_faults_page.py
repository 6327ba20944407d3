"""The page on faults names tests and tables that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    line for line in (ROOT / "docs" / "what-can-go-wrong.md").read_text("utf-8").splitlines() if line.startswith("| ")
]
FAULTS = [row for row in ROWS if not row.startswith("| fault ")]


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_fault_is_shown_by_something_that_exists(row: str) -> None:
    named = re.findall(r"`([^`]+)`", row.split("|")[-2])
    assert named
    for name in named:
        if name.endswith(".json"):
            assert (ROOT / "benchmarks" / "results" / name).is_file()
            continue
        file, _, function = name.partition("::")
        text = (ROOT / "tests" / file).read_text("utf-8")
        assert not function or f"def {function}(" in text, f"{file} has no {function}"
