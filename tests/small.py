"""A tiny text and a tiny model, as a run file names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "seven", "wizards", "box")


def run_values(folder: Path, *, layers: int = 1) -> dict[str, Any]:
    """Writes the text into `folder` and returns the keys that train on it; a step takes milliseconds."""
    text = folder / "text.txt"
    lines = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 12)) for i in range(1, 80)]
    text.write_text("\n\n".join(lines) + "\n")
    return {
        "model_config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
        },
        "train_file": str(text),
        "validation_fraction": 0.1,
        "vocab_size": 280,
        "max_length": 32,
        "per_device_train_batch_size": 2,
    }
