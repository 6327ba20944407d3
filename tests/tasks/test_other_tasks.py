"""Encoder-decoders, masked auto-encoders and CLIP: data in, metrics out, and the whole way from a run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

from thrifty import run, tasks
from thrifty.cli import main
from thrifty.config import parse_config
from thrifty.data.collate import NoiseCollator
from thrifty.data.options import DataOptions
from thrifty.errors import InputError
from thrifty.tasks.image_text import ImageText
from thrifty.tasks.masked_image_modeling import sine_cosine_table
from thrifty.tasks.metrics import retrieval_metrics

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = {**SMALL, "image_size": 8, "patch_size": 4, "num_channels": 1}
MODELS: dict[str, dict[str, Any]] = {
    "seq2seq-lm": {"model_type": "t5", "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2},
    "masked-image-modeling": {
        **VISION,
        "model_type": "vit_mae",
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32,
    },
    "image-text": {
        "model_type": "clip",
        "projection_dim": 8,
        "vision_config": VISION,
        "text_config": {**SMALL, "max_position_embeddings": 24},
    },
}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """A data set for each task: sums to be said, images of four greys, and the same with captions."""
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(24):
        pixels = np.clip(rng.normal(30 + (i % 4) * 60, 8, (8, 8)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
    greys = ("black", "dark", "light", "white")
    pairs = [{"image": f"images/{i:02}.png", "caption": greys[i % 4]} for i in range(24)]
    says = [{"source": f"say {i % 6}", "target": f"{i % 6}"} for i in range(36)]
    return {
        "seq2seq-lm": jsonl(tmp_path / "says.jsonl", says),
        "masked-image-modeling": str(folder),
        "image-text": jsonl(tmp_path / "pairs.jsonl", pairs),
    }


def load(task: str, path: str, **options: Any) -> tasks.Loaded:
    chosen = DataOptions(train_file=path, **{"max_length": 16, "validation_fraction": 0.25, **options})
    return tasks.load(task, chosen, model_config=MODELS[task], vocab_size=290)


def batch_of(loaded: tasks.Loaded, count: int = 4) -> dict[str, Any]:
    return loaded.data.data_collator([loaded.data.train_dataset[i] for i in range(count)])


@pytest.mark.parametrize("task", MODELS)
def test_losses_per_sample_average_to_the_models_own(task, data):
    loaded = load(task, data[task])
    loaded.model.eval()
    batch = batch_of(loaded)
    assert batch["sample_id"].tolist() == [0, 1, 2, 3]
    losses = loaded.task.per_sample_loss(loaded.model, batch)
    assert losses.shape == (4,)
    weights = (batch["labels"] != -100).sum(1) if "labels" in batch else torch.ones(4)
    del batch["sample_id"]
    expected = loaded.model(**batch).loss
    torch.testing.assert_close((losses * weights).sum() / weights.sum(), expected, rtol=1e-5, atol=1e-6)
    assert tasks.infer(loaded.model).name == task
    assert str(loaded.task.decoded_sample(loaded.data, loaded.processor))


@pytest.mark.parametrize("task", MODELS)
def test_a_run_file_trains_evaluates_and_saves(task, data, tmp_path, capsys):
    values = {
        "task": task, "model_config": MODELS[task], "train_file": data[task], "validation_fraction": 0.25,
        "vocab_size": 290, "max_length": 16, "per_device_train_batch_size": 8, "max_steps": 6, "learning_rate": 1e-3,
        "save_strategy": "no", "max_new_tokens": 3, "output_dir": str(tmp_path / "out"), "logging_steps": 1,
    }  # fmt: skip
    done = run.train(parse_config(values))
    names = {"image-text": {"eval_image_to_text", "eval_text_to_image"}, "seq2seq-lm": {"eval_nll", "eval_accuracy"}}
    assert {"eval_loss", *names.get(task, ())} <= set(done.metrics)
    assert (done.sample_text is None) == (task != "seq2seq-lm")
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "out"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for name in done.metrics:
        if name in ("eval_loss", *names.get(task, ())):
            assert again[name] == pytest.approx(done.metrics[name], rel=1e-4), name
    if task == "seq2seq-lm":
        assert main(["generate", str(tmp_path / "out"), "-p", "say 3", "--max-new-tokens", "3"]) == 0
        assert capsys.readouterr().out.strip()


def test_an_answer_is_learned(data, tmp_path):
    """The decoder copies one of six numbers: chance is 1/6 of the tokens that are no end."""
    values = {
        "task": "seq2seq-lm", "model_config": {**MODELS["seq2seq-lm"], "d_model": 32}, "train_file": data["seq2seq-lm"],
        "vocab_size": 290, "max_length": 16, "per_device_train_batch_size": 12, "max_steps": 120,
        "learning_rate": 1e-2, "save_strategy": "no", "max_new_tokens": 4, "sample_prompt": "say 4",
        "output_dir": str(tmp_path / "out"), "validation_fraction": 0.2,
    }  # fmt: skip
    done = run.train(parse_config(values))
    assert done.metrics["eval_accuracy"] > 0.95
    assert done.sample_text == "4"


def test_pictures_and_words_find_each_other(data, tmp_path):
    values = {
        "task": "image-text", "model_config": MODELS["image-text"], "train_file": data["image-text"],
        "validation_file": data["image-text"], "vocab_size": 290, "max_length": 16,
        "per_device_train_batch_size": 8, "max_steps": 60, "learning_rate": 1e-2, "save_strategy": "no",
        "output_dir": str(tmp_path / "out"),
    }  # fmt: skip
    done = run.train(parse_config(values))
    assert done.metrics["eval_image_to_text"] > 0.9  # chance: one grey of four


def test_retrieval_is_counted_over_the_whole_set():
    class Prediction:
        predictions = np.stack([np.eye(4)[[0, 1, 2, 2]], np.eye(4)[[0, 1, 3, 2]]], axis=1)

    # Texts 2 and 3 are equal: the nearest image of both is image 3. Image 2 is as far from its own text as from all.
    assert retrieval_metrics(Prediction) == {"text_to_image": 0.75, "image_to_text": 1.0}


def test_position_tables_from_scratch_are_not_zero(data):
    """transformers leaves both at zero, and they never train: see `fill_position_tables`."""
    model: Any = load("masked-image-modeling", data["masked-image-modeling"]).model
    expected = build_2d_sinusoidal_position_embedding(2, 2, 16, cls_token=True)
    rotated = torch.cat([expected[:, 8:], expected[:, :8]], dim=1)
    for table in (model.vit.embeddings.position_embeddings, model.decoder.decoder_pos_embed):
        torch.testing.assert_close(table[0].detach(), rotated, rtol=0, atol=1e-6)
    assert sine_cosine_table(3, 8).shape == (9, 8)


def test_masks_depend_on_seed_epoch_and_image_alone(data):
    loaded = load("masked-image-modeling", data["masked-image-modeling"])
    rows = [loaded.data.train_dataset[i] for i in range(4)]
    collate: Any = loaded.data.data_collator
    assert isinstance(collate, NoiseCollator)
    together, alone = collate(rows)["noise"], collate(rows[2:3])["noise"]
    assert torch.equal(together[2:3], alone)
    assert len({tuple(row.tolist()) for row in together}) == 4
    collate.set_epoch(1)
    assert not torch.equal(collate(rows)["noise"], together)


def test_long_captions_keep_the_token_that_is_read(data, tmp_path):
    Path(tmp_path / "images" / "x.png").write_bytes(Path(data["masked-image-modeling"], "00.png").read_bytes())
    rows = [{"image": "images/x.png", "caption": "word " * 30}, {"image": "images/x.png", "caption": "word"}]
    path = jsonl(tmp_path / "long.jsonl", rows)
    with pytest.raises(InputError, match="longer than max_length=16"):
        load("image-text", path, validation_fraction=0)
    loaded = load("image-text", path, validation_fraction=0, long_samples="truncate")
    ids = loaded.data.train_dataset[0]["input_ids"]
    assert (len(ids), ids[-1]) == (16, loaded.processor.tokenizer.eos_token_id)
    wider = load("image-text", path, validation_fraction=0, long_samples="truncate", max_length=100)
    assert len(wider.data.train_dataset[0]["input_ids"]) == 24, "the text tower has 24 positions"


def test_plain_text_is_its_own_target(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("one line\n\nanother line\n" * 5)
    loaded = load("seq2seq-lm", str(path), validation_fraction=0)
    row = loaded.data.train_dataset[1]
    assert row["input_ids"] == row["labels"]
    assert len(loaded.data.train_dataset) == 10
    assert any("own target" in note for note in loaded.notes)


@pytest.mark.parametrize(
    ("task", "rows", "expected"),
    [
        ("seq2seq-lm", [{"source": "a", "target": ""}], "record 1: target is empty"),
        ("seq2seq-lm", [{"messages": [{"role": "user", "content": "a"}]}], "a source and a target, but the data is m"),
        ("seq2seq-lm", [{"source": "a " * 40, "target": "b"}], "longer than max_length=16"),
        ("masked-image-modeling", [{"picture": "x.png"}], "column_mapping: {NAME: image}"),
        ("image-text", [{"image": "x.png", "text": None}], "record 1: text is missing"),
        ("image-text", [{"image": "x.png", "words": "a"}], "no pairs of image and caption"),
        ("image-text", [{"image": "nowhere.png", "text": "a"}], "not a readable image"),
    ],
)
def test_faults(task, rows, expected, tmp_path, tokenizer):
    options = DataOptions(train_file=jsonl(tmp_path / "a.jsonl", rows), validation_fraction=0, max_length=16)
    chosen = tasks.get(task)
    processor: Any = tokenizer
    if isinstance(chosen, ImageText):
        config = chosen.load_config(None, MODELS[task])
        processor = chosen.load_processor(None, config=config, texts=lambda: ["a b c"], vocab_size=290)
    with pytest.raises(InputError, match=expected):
        chosen.prepare(options, processor)


@pytest.mark.parametrize(
    ("task", "model", "expected"),
    [
        ("masked-image-modeling", {**SMALL, "model_type": "vit", "image_size": 8, "patch_size": 4}, "AutoModelForPre"),
        ("seq2seq-lm", {**SMALL, "model_type": "llama"}, "AutoModelForSeq2SeqLM"),
        ("image-text", {**SMALL, "model_type": "bert"}, "image size is not known"),
    ],
)
def test_models_of_other_kinds_are_refused(task, model, expected, data):
    with pytest.raises(InputError, match=expected):
        tasks.load(task, DataOptions(train_file=data[task], max_length=16), model_config=model, vocab_size=290)
