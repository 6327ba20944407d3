"""Language modelling from options to metrics, with real models and Hugging Face's own Trainer."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from thrifty import tasks
from thrifty.data.options import DataOptions
from thrifty.data.sources import load_sources
from thrifty.errors import InputError
from thrifty.tasks.metrics import mean_losses, token_losses

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}


def trainer(loaded, folder, **more):
    arguments = TrainingArguments(
        str(folder), per_device_eval_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True, **more
    )
    data = loaded.data
    return Trainer(
        loaded.model,
        arguments,
        train_dataset=data.train_dataset,
        eval_dataset=data.eval_dataset,
        data_collator=data.data_collator,
        compute_metrics=data.compute_metrics,
        preprocess_logits_for_metrics=data.preprocess_logits_for_metrics,
    )


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} and é in the beginning was the word\n" for number in range(150)))
    return str(path)


def test_bits_per_byte_is_the_whole_text_each_token_once(text_file, tmp_path):
    options = DataOptions(train_file=text_file, max_length=32, validation_fraction=0.1)
    loaded = tasks.load("causal-lm", options, model_config=LLAMA, vocab_size=300)
    metrics = trainer(loaded, tmp_path / "out").evaluate()
    # By hand: every sample alone, no collator, no padding.
    total, count = 0.0, 0
    rows: Any = loaded.data.eval_dataset
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        logits = loaded.model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    assert loaded.data.eval_tokens == count
    held = load_sources(options).validation
    assert isinstance(held, list)
    assert loaded.data.eval_bytes
    assert loaded.data.eval_bytes == len(held[0].encode()) > len(held[0])
    assert metrics["eval_nll"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert metrics["eval_bits_per_byte"] == pytest.approx(total / math.log(2) / loaded.data.eval_bytes, rel=1e-5)
    assert 0 <= metrics["eval_accuracy"] <= 1


def test_training_lowers_the_loss(text_file, tmp_path):
    options = DataOptions(train_file=text_file, max_length=32, validation_fraction=0.1)
    loaded = tasks.load("causal-lm", options, model_config=LLAMA, vocab_size=300)
    run = trainer(loaded, tmp_path / "out", max_steps=40, learning_rate=1e-2, save_strategy="no", seed=1)
    before = run.evaluate()["eval_nll"]
    run.train()
    assert run.evaluate()["eval_nll"] < before - 1


def test_masked_language_model(text_file, tmp_path):
    options = DataOptions(train_file=text_file, max_length=32, validation_fraction=0.1)
    loaded = tasks.load("masked-lm", options, model_config=BERT, vocab_size=300)
    run = trainer(loaded, tmp_path / "out", max_steps=5, learning_rate=1e-2, save_strategy="no")
    first, second = run.evaluate(), run.evaluate()
    assert first["eval_nll"] == second["eval_nll"], "the same masks at each evaluation"
    assert "eval_bits_per_byte" not in first
    run.train()
    assert run.evaluate()["eval_nll"] < first["eval_nll"]
    parts = loaded.task.decoded_sample(loaded.data, loaded.processor).parts
    assert any("<|mask|>" in text for text, trained in parts if trained)


def test_losses_per_sample_equal_the_models_own(text_file):
    options = DataOptions(train_file=text_file, max_length=32, validation_fraction=0.1)
    for name, config in (("causal-lm", LLAMA), ("masked-lm", BERT)):
        loaded = tasks.load(name, options, model_config=config, vocab_size=300)
        loaded.model.eval()
        features = [loaded.data.train_dataset[i] for i in (0, len(loaded.data.train_dataset) - 1)]
        batch = loaded.data.data_collator(features)
        losses = loaded.task.per_sample_loss(loaded.model, batch)
        for feature, loss in zip(features, losses, strict=True):
            alone = loaded.data.data_collator([feature])
            alone.pop("sample_id")
            assert loss.item() == pytest.approx(loaded.model(**alone).loss.item(), abs=1e-5)
        assert losses.shape == (2,)
        assert loaded.task.count_tokens(batch) == sum(len(feature["input_ids"]) for feature in features)


def test_a_sample_without_labels_has_loss_zero_and_no_nan():
    logits = torch.randn(2, 4, 7)
    labels = torch.tensor([[1, 2, 3, 4], [1, -100, -100, -100]])
    sums = token_losses(logits, labels, shift=True)
    assert sums[1].tolist() == [0, 0, 0]
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
    assert sums[0, 0] == pytest.approx(expected.item(), rel=1e-6)
    assert sums[0, 1] == 3


def test_the_decoded_sample_shows_what_is_trained_on(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "Who?", "completion": " God."}))
    options = DataOptions(train_file=str(path), validation_fraction=0, max_length=32)
    loaded = tasks.load("causal-lm", options, model_config=LLAMA, vocab_size=300)
    sample = loaded.task.decoded_sample(loaded.data, loaded.processor)
    assert sample.parts == [("Who?", False), (" God.<|endoftext|>", True)]
    assert str(sample) == "Who?⟦ God.<|endoftext|>⟧"
    assert loaded.data.eval_dataset is None
    assert loaded.data.compute_metrics is None


def test_a_tokenizer_of_its_own_is_loaded_and_padding_named(text_file, tokenizer, tmp_path):
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = DataOptions(train_file=text_file, max_length=32)
    loaded = tasks.load("causal-lm", options, model_config=LLAMA, tokenizer_name_or_path=str(tmp_path / "tokenizer"))
    assert len(loaded.processor) == 512
    assert loaded.model.config.vocab_size == 512
    assert any("no padding token" in note for note in loaded.notes)
    assert loaded.processor.pad_token_id is not None


def test_the_end_of_a_text_is_trained_although_it_pads(text_file, tokenizer, tmp_path):
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = DataOptions(train_file=text_file, max_length=32)
    loaded = tasks.load("causal-lm", options, model_config=LLAMA, tokenizer_name_or_path=str(tmp_path / "tokenizer"))
    batch = loaded.data.data_collator([loaded.data.train_dataset[0]])
    assert loaded.processor.pad_token_id == batch["input_ids"][0, 0] == 0
    loaded.task.per_sample_loss(loaded.model, batch).sum().backward()
    embeddings: Any = loaded.model.get_input_embeddings()
    assert embeddings.weight.grad[0].abs().sum() > 0
    assert embeddings.weight[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("task", "options", "model", "expected"),
    [
        ("causal-lm", {"max_length": 500}, LLAMA, "max_length=500: the model has positions for 128 tokens"),
        ("causal-lm", {}, {**LLAMA, "vocab_size": 100}, "the tokenizer has 300 entries, but the model has"),
        ("masked-lm", {"mlm_probability": 0.0}, BERT, "mlm_probability=0.0"),
        ("masked-lm", {"max_length": 500}, BERT, "max_length=500"),
        ("text-classification", {}, BERT, "plain text without labels"),
        ("image-classification", {}, BERT, "image_size"),
        ("causal-lm", {"validation_file": "missing.jsonl"}, LLAMA, "validation_file='missing.jsonl'"),
    ],
)
def test_faults(text_file, task, options, model, expected):
    options = DataOptions(train_file=text_file, **{"max_length": 32, **options})
    with pytest.raises(InputError, match=expected):
        tasks.load(task, options, model_config=model, vocab_size=300)


def test_answers_have_no_mask_to_predict(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "Who?", "completion": " God."}))
    options = DataOptions(train_file=str(path), validation_fraction=0, max_length=32)
    with pytest.raises(InputError, match="masked-lm takes plain text"):
        tasks.load("masked-lm", options, model_config=BERT, vocab_size=300)


def test_a_tokenizer_without_mask_token(text_file, tokenizer, tmp_path):
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(InputError, match="no mask token"):
        tasks.load(
            "masked-lm",
            DataOptions(train_file=text_file, max_length=32),
            model_config=BERT,
            tokenizer_name_or_path=str(tmp_path / "tokenizer"),
        )


@pytest.mark.parametrize("shift", [True, False])
def test_logits_of_a_learnt_prompt_have_no_labels(shift):
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 6, 7), torch.randint(0, 7, (2, 6))
    prompted = torch.cat([torch.randn(2, 3, 7), logits], dim=1)
    assert torch.equal(mean_losses(prompted, labels, shift=shift), mean_losses(logits, labels, shift=shift))
    assert torch.equal(token_losses(prompted, labels, shift=shift), token_losses(logits, labels, shift=shift))
