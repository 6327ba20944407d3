"""A tiny run on a tiny text, as a run file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thrifty.config import yaml_text

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "seven", "wizards", "box")


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THRIFTY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """The content of a run file that trains two steps in about a second."""
    text = tmp_path / "text.txt"
    lines = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 12)) for i in range(1, 80)]
    text.write_text("\n\n".join(lines) + "\n")
    return {
        "model_config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
        },
        "train_file": str(text),
        "validation_fraction": 0.1,
        "vocab_size": 280,
        "max_length": 32,
        "per_device_train_batch_size": 2,
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
