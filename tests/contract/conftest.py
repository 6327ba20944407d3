"""The two living processes, shared by the files that need them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pair import Pair


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What methods keep for other runs (scores, side models) comes from this session's code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THRIFTY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, _own_cache: None) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.close()
