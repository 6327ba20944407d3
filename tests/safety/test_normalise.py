"""N micro-batches of 1 are 1 micro-batch of N, also for models that ignore `num_items_in_batch`."""

from __future__ import annotations

import pytest
import transformers

import tiny
from thrifty.safety.normalise import ignores_num_items


@pytest.mark.parametrize(("family", "ignores"), [("llama", False), ("gpt2", False), ("bert", True), ("vit", False)])
def test_who_ignores_the_number_of_targets(family, ignores):
    model = tiny.FAMILIES[family]()
    batch = (
        tiny.collate_images(tiny.image_samples()[:2]) if family == "vit" else tiny.collate_text(tiny.text_samples()[:2])
    )
    batch.pop("sample_id", None)
    assert ignores_num_items(model, batch) is ignores


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_accumulation_is_exact_for_every_family(tmp_path, family):
    results = []
    for size, accumulation in ((1, 4), (2, 2), (4, 1)):
        run = tiny.trainer(
            tmp_path / str(size),
            (),
            tiny.FAMILIES[family](),
            max_steps=3,
            optim="sgd",
            learning_rate=0.05,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
        )
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(results[0], results[2], atol=1e-6)
    tiny.assert_same(results[1], results[2], atol=1e-6)


def test_the_parent_is_wrong_here(tmp_path):
    """The reason for the guard: when this fails, transformers has mended it and the guard may go."""
    results = []
    for size, accumulation in ((1, 4), (4, 1)):
        args = tiny.arguments(
            tmp_path, optim="sgd", per_device_train_batch_size=size, gradient_accumulation_steps=accumulation
        )
        data = [{k: v for k, v in sample.items() if k != "sample_id"} for sample in tiny.text_samples()]
        parent = transformers.Trainer(tiny.bert(), args, train_dataset=data, data_collator=tiny.collate_text)
        parent.train()
        results.append(next(row["grad_norm"] for row in parent.state.log_history if "grad_norm" in row))
    assert results[0] / results[1] > 3
