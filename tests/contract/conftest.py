"""The two living processes, shared by the files that need them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pair import Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.close()
