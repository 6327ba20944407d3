"""Every recipe trains, at toy size, on data of its own kind; and the verb that hands them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from thrifty import recipes
from thrifty.cli import main
from thrifty.config import RunConfig, parse_config, yaml_text
from thrifty.errors import InputError
from thrifty.run import train

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "seven", "wizards", "box")
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 2}
# What makes any recipe small; precision auto stays, since what it chooses is part of the recipe.
TOY: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_length": 128,
    "warmup_steps": 1, "save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False, "use_cpu": True,
    "max_new_tokens": 2,
}  # fmt: skip
FROM_SCRATCH = {
    "pretrain-small": {"vocab_size": 300, "model_config": {"model_type": "llama", "num_key_value_heads": 1, **SMALL}},
    "masked-lm-day": {"vocab_size": 300, "model_config": {"model_type": "bert", **SMALL}},
}
VISION = {"image_size": 16, "patch_size": 4, **SMALL}
MAE_DECODER = {
    "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One file of each kind."""
    folder = tmp_path_factory.mktemp("data")
    sentences = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 12)) for i in range(1, 60)]
    (folder / "text.txt").write_text("\n\n".join(sentences) + "\n")
    rows = [{"instruction": s[:20], "output": s[20:50]} for s in sentences]
    (folder / "instructions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reviews.csv").write_text("text,label\n" + "".join(f"{s},{i % 2}\n" for i, s in enumerate(sentences)))
    pixels = np.random.default_rng(0)
    for index in range(24):
        path = folder / "images" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(path)
    return {path.stem: str(path) for path in folder.iterdir()}


def toy(name: str, folder: Path, changes: dict[str, Any]) -> RunConfig:
    """The recipe with what makes it small."""

    values = dict(yaml_text.parse(recipes.read(name)))
    for key in ("model_name_or_path", "metric_for_best_model", "num_train_epochs", "embedded_corpus"):
        values.pop(key, None)
    methods = [
        {"budget": {"tokens": 100}} if isinstance(m, dict) and "budget" in m else m for m in values.get("methods", [])
    ]
    return parse_config({**values, **TOY, "methods": methods, **changes, "output_dir": str(folder)}, name=name)


@pytest.fixture(scope="module")
def bases(data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A Llama and a BERT with their tokenizers, made by the recipes that begin from nothing."""
    made = {}
    for name, changes in FROM_SCRATCH.items():
        result = train(toy(name, tmp_path_factory.mktemp(name) / "run", {"train_file": data["text"], **changes}))
        made[name] = str(result.output_dir)
    return made


def changes_for(name: str, data: dict[str, str], bases: dict[str, str]) -> dict[str, Any]:
    if name in ("vit", "mae"):
        kind = {"model_type": "vit_mae", **MAE_DECODER} if name == "mae" else {"model_type": "vit"}
        return {"model_config": {**kind, **VISION}, "train_file": data["images"]}
    if name == "bert-classification":
        return {"model_name_or_path": bases["masked-lm-day"], "train_file": data["reviews"]}
    text = name in ("continue-pretraining", "long-context")
    return {"model_name_or_path": bases["pretrain-small"], "train_file": data["text" if text else "instructions"]}


def test_those_from_scratch_leave_a_model(bases: dict[str, str]) -> None:
    assert all((Path(folder) / "config.json").exists() for folder in bases.values())


@pytest.mark.parametrize("name", [name for name in recipes.names() if name not in FROM_SCRATCH])
def test_it_trains(name: str, tmp_path: Path, data: dict[str, str], bases: dict[str, str]) -> None:
    if name == "qlora-24gb":
        pytest.importorskip("bitsandbytes")
    result = train(toy(name, tmp_path / "run", changes_for(name, data, bases)))
    written = yaml_text.read_mapping(result.output_dir / "run.yaml")
    assert written["max_steps"] == 2
    assert written["output_dir"] == str(result.output_dir)


def test_the_shelf_has_at_least_ten_with_a_sentence_each() -> None:
    assert len(recipes.names()) >= 10
    assert all(20 < len(recipes.about(name)) < 130 for name in recipes.names())


def test_list_show_and_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in recipes.names())
    assert main(["recipes", "show", "lora"]) == 0
    assert capsys.readouterr().out == recipes.read("lora")
    target = tmp_path / "mine.yaml"
    assert main(["recipes", "copy", "lora", str(target)]) == 0
    assert target.read_text() == recipes.read("lora")
    target.write_text("mine")
    assert main(["recipes", "copy", "lora", str(target)]) == 2
    assert target.read_text() == "mine"


@pytest.mark.parametrize("words", [["recipes", "show", "lorra"], ["recipes", "show"], ["recipes", "rm", "lora"]])
def test_nonsense_is_answered(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "Fix: " in capsys.readouterr().err


def test_an_unknown_name_is_an_input_error() -> None:
    with pytest.raises(InputError, match="did you mean"):
        recipes.read("lorra")
