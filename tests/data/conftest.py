"""A cache folder of the tests' own, and a small tokenizer trained on the embedded text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from thrifty.data.corpus import kjv
from thrifty.data.tokenizer import train_tokenizer


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THRIFTY_CACHE", str(folder))
        yield folder


@pytest.fixture
def tokenizer() -> Any:
    return train_tokenizer(kjv().train[:30], 512)
