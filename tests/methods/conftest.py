"""Makes the many short runs of these tests cheap."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> Iterator[None]:
    """Every run of a trainer collects garbage, which takes a second over the objects of all imported libraries."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
