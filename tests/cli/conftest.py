"""A tiny run on a tiny text, as a run file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from small import run_values
from thrifty.config import yaml_text


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THRIFTY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """The content of a run file that trains two steps in about a second."""
    return {
        **run_values(tmp_path),
        "max_steps": 2,
        "learning_rate": 1e-3,
        "max_new_tokens": 4,
        "output_dir": str(tmp_path / "out"),
    }


@pytest.fixture
def run_file(tmp_path: Path, values: dict[str, Any]) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml_text.dump(values))
    return file
