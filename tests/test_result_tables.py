"""Numbers in the docs come from files in `benchmarks/results/`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thrifty.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import tables  # noqa: E402

GENERATED_FROM_CODE = ROOT / "docs/methods"
"""The settings and defaults of the methods are no measurements."""
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if GENERATED_FROM_CODE not in page.parents),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_table_of_numbers_has_a_file_behind_it(page: Path) -> None:
    text = page.read_text("utf-8")
    if page.parent.name == "results" and page in tables.result_pages():
        assert tables.result_pages()[page] == text  # made whole from its file
        return
    assert list(tables.numbers_without_a_file(text)) == []
    assert tables.filled(text) == text, "run `python docs/generate.py`"


def test_a_number_without_a_file_is_found() -> None:
    bare = "| method | speed |\n|---|---|\n| lion | 1.3x |\n"
    assert list(tables.numbers_without_a_file(bare)) == ["| lion | 1.3x |"]
    assert list(tables.numbers_without_a_file("| a | `12.5 %` |")) != []
    behind = f"<!-- generated: results bench-x -->\n{bare}<!-- /generated -->\n"
    assert list(tables.numbers_without_a_file(behind)) == []
    assert list(tables.numbers_without_a_file("| verb | what it does in 3 words |\n")) == []
    assert list(tables.numbers_without_a_file(f"```\n{bare}```\n")) == []


def test_a_block_without_its_file_is_an_error() -> None:
    with pytest.raises(InputError, match="no such result file"):
        tables.filled("<!-- generated: results bench-of-nowhere -->\n<!-- /generated -->")


def test_published_results_can_all_be_shown() -> None:
    from thrifty.bench.publish import read

    for path in tables.RESULTS.glob("*.json"):
        try:
            result = read(path)
        except InputError:
            continue  # a file of another kind
        assert all(line for line in tables.PARTS[result["format"]](result).values())
