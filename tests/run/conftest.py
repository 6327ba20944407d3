"""A tiny run on a tiny text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from small import run_values


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THRIFTY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def base_values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of a run file that trains two steps in about a second."""
    return {
        **run_values(tmp_path_factory.mktemp("data")),
        "max_steps": 2,
        "learning_rate": 1e-3,
        "max_new_tokens": 4,
        "use_cpu": True,
    }
