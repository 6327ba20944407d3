"""Gradient accumulation: K micro-batches give the gradient of the one large batch, whatever their token counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig, set_seed

import thrifty
import tiny
from methods import loops
from thrifty import InputError
from thrifty.methods.data_loading.gradient_accumulation import accumulate

LABELS = (3, 11, 1, 15)  # valid labels of four sequences


def _uneven() -> list[dict[str, torch.Tensor]]:
    """Four sequences of 16 tokens, of which 3, 11, 1 and 15 are predicted."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    for count in LABELS:
        ids = torch.randint(3, tiny.VOCABULARY, (1, 16), generator=generator)
        labels = torch.full_like(ids, -100)
        labels[:, 1 : 1 + count] = ids[:, 1 : 1 + count]
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def _large(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([b[key] for b in batches]) for key in batches[0]}


def _gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _summed(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="sum")


def _valid(inputs: dict[str, torch.Tensor]) -> int:
    return int((inputs["labels"][:, 1:] != -100).sum())


def _reference() -> tuple[torch.Tensor, float]:
    model = tiny.llama()
    loss = model(**_large(_uneven())).loss
    loss.backward()
    return _gradient(model), loss.item()


def test_equals_the_large_batch_where_the_naive_mean_is_far_off():
    expected, loss = _reference()
    model = tiny.llama()
    total = accumulate(_uneven(), lambda b: _summed(model, b), _valid)
    assert (_gradient(model) - expected).norm() / expected.norm() < 1e-6
    assert total.item() == pytest.approx(loss, rel=1e-6)
    assert not total.requires_grad

    naive = tiny.llama()
    for inputs in _uneven():
        (naive(**inputs).loss / 4).backward()
    assert (_gradient(naive) - expected).norm() / expected.norm() > 0.5


def test_equal_counts_make_both_agree():
    batches = [{"input_ids": b["input_ids"], "labels": b["input_ids"]} for b in _uneven()]
    model, naive = tiny.llama(), tiny.llama()
    accumulate(batches, lambda b: _summed(model, b), _valid)
    for inputs in batches:
        (naive(**inputs).loss / 4).backward()
    torch.testing.assert_close(_gradient(model), _gradient(naive), rtol=1e-4, atol=1e-7)


def test_own_loops_agree_and_act():
    def train(accelerate: bool) -> tuple[nn.Module, list[float]]:
        model = net = tiny.llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        backward = torch.Tensor.backward
        if accelerate:
            accelerator = loops.new_accelerator()
            net, optimizer = accelerator.prepare(model, optimizer)
            backward = accelerator.backward
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(accumulate(_uneven(), lambda b: _summed(net, b), _valid, backward).item())
            optimizer.step()
        return model, losses

    model, losses = train(False)
    wrapped, again = train(True)
    assert losses == again
    tiny.assert_same(tiny.weights(model), tiny.weights(wrapped))
    assert losses[0] == pytest.approx(_reference()[1], rel=1e-6)
    assert losses[-1] < losses[0]


def _classifier() -> nn.Module:
    set_seed(1)
    config: Any = BertConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = 3
    return AutoModelForSequenceClassification.from_config(config)


def _train(folder, build, accumulation: int, collate=None, samples=None, **overrides) -> thrifty.Trainer:
    model = build()
    samples = samples or (tiny.image_samples() if loops.takes_images(model) else tiny.text_samples())
    collate = collate or (tiny.collate_images if loops.takes_images(model) else tiny.collate_text)
    settings = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, **overrides}
    settings["per_device_train_batch_size"] = 4 // accumulation
    trainer = thrifty.Trainer(
        model,
        tiny.arguments(folder, **settings),
        train_dataset=samples,
        data_collator=collate,
        methods=[{"gradient-accumulation": {"steps": accumulation}}] if accumulation > 1 else [],
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trainer_equals_the_large_batch(tmp_path, family):
    """BERT ignores the count of a step's items (which its signature hides): it must come right all the same."""
    large = _train(tmp_path / "1", tiny.FAMILIES[family], 1)
    small = _train(tmp_path / "4", tiny.FAMILIES[family], 4)
    tiny.assert_same(tiny.weights(small.model), tiny.weights(large.model), atol=1e-6)
    torch.testing.assert_close(tiny.losses(small), tiny.losses(large), rtol=1e-4, atol=0)
    assert small.args.gradient_accumulation_steps == 4


def test_classifier_equals_the_large_batch(tmp_path):
    samples = [{**s, "labels": i % 3} for i, s in enumerate(tiny.text_samples())]

    def collate(rows):
        inputs = tiny.collate_text([{**row, "labels": row["input_ids"]} for row in rows])
        return {**inputs, "labels": torch.tensor([row["labels"] for row in rows])}

    large = _train(tmp_path / "1", _classifier, 1, collate, samples)
    small = _train(tmp_path / "2", _classifier, 2, collate, samples)
    tiny.assert_same(tiny.weights(small.model), tiny.weights(large.model), atol=1e-6)


@pytest.mark.parametrize("build", [tiny.llama, tiny.bert])
def test_an_incomplete_last_group_counts_its_own_items(tmp_path, build):
    """6 samples, batches of 4: the second step has 2 samples, in 2 micro-batches of the 4 that a step has otherwise."""
    samples = tiny.text_samples()[:6]
    large = _train(tmp_path / "1", build, 1, samples=samples, max_steps=-1, num_train_epochs=2)
    small = _train(tmp_path / "4", build, 4, samples=samples, max_steps=-1, num_train_epochs=2)
    assert large.state.global_step == small.state.global_step == 4
    tiny.assert_same(tiny.weights(small.model), tiny.weights(large.model), atol=1e-6)


def test_label_smoothing_normalises_once(tmp_path):
    large = _train(tmp_path / "1", tiny.bert, 1, label_smoothing_factor=0.1)
    small = _train(tmp_path / "4", tiny.bert, 4, label_smoothing_factor=0.1)
    # transformers' smoother divides by a micro-batch's own tokens where it is given no count, by the step's otherwise.
    tiny.assert_same(tiny.weights(small.model), tiny.weights(large.model), atol=1e-6)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_resumes(tmp_path, family):
    loops.resumes(tmp_path, [{"gradient-accumulation": {"steps": 2}}], tiny.FAMILIES[family])


def test_the_schedule_counts_updates(tmp_path):
    run = tiny.trainer(tmp_path, [{"gradient-accumulation": {"steps": 3}}], max_steps=4)
    run.train()
    rates = [row["learning_rate"] for row in run.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([0.0, 0.01, 0.02 / 3, 0.01 / 3])


def test_bad_settings():
    with pytest.raises(InputError, match=r"gradient-accumulation.*steps must be at least 1"):
        thrifty.Recipe.parse([{"gradient-accumulation": {"steps": 0}}])
