"""Micro-batches of similar length: the least cost, the very samples, and loss and gradient of the undivided batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import tiny
from thrifty import NotApplicable
from thrifty.methods.data_loading.length_grouping import LengthGrouping, divide, group_by_length, sees_ahead


def _cost(groups: list[list[int]], lengths: list[int], overhead: int) -> int:
    return sum(len(group) * max(lengths[i] for i in group) + overhead for group in groups)


def _least(lengths: list[int], overhead: int, max_tokens: int | None) -> int:
    """By trying every division of the sorted samples."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    best = 10**9
    for cuts in itertools.product([False, True], repeat=len(order) - 1):
        groups = [[order[0]]]
        for cut, index in zip(cuts, order[1:], strict=True):
            if cut:
                groups.append([index])
            else:
                groups[-1].append(index)
        fits = all(len(g) == 1 or max_tokens is None or _cost([g], lengths, 0) <= max_tokens for g in groups)
        best = min(best, _cost(groups, lengths, overhead)) if fits else best
    return best


@pytest.mark.parametrize("overhead", [0, 3, 40])
@pytest.mark.parametrize("max_tokens", [None, 30])
def test_no_division_costs_less(overhead, max_tokens):
    generator = torch.Generator().manual_seed(overhead)
    for _ in range(10):
        lengths = torch.randint(1, 40, (7,), generator=generator).tolist()
        groups = group_by_length(lengths, overhead=overhead, max_tokens=max_tokens)
        assert sorted(i for group in groups for i in group) == list(range(7))
        assert _cost(groups, lengths, overhead) == _least(lengths, overhead, max_tokens)


@pytest.mark.parametrize("family", ["llama", "bert", "classifier"])
def test_equals_the_undivided_batch(family):
    model: Any = {"llama": tiny.llama, "bert": tiny.bert, "classifier": tiny.bert_classifier}[family]()
    samples, collate = tiny.data_of(model)
    batch = collate(samples[:6])
    ids = batch.pop("sample_id")
    expected = model(**batch).loss
    expected.backward()
    gradient = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    ahead = sees_ahead(model, batch)
    assert ahead is (family != "llama")
    parts = divide({**batch, "sample_id": ids}, sees_ahead=bool(ahead))
    assert len(parts) > 1
    assert sorted(i for rows, _ in parts for i in rows) == list(range(6))
    targets = [int((p["labels"][:, 1:] if family == "llama" else p["labels"]).ne(-100).sum()) for _, p in parts]
    total = 0.0
    for (rows, part), count in zip(parts, targets, strict=True):
        assert part.pop("sample_id").tolist() == [int(ids[row]) for row in rows]
        assert "attention_mask" in part or not ahead or len({int(batch["attention_mask"][r].sum()) for r in rows}) == 1
        loss = model(**part).loss * count / sum(targets)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), rel=1e-5)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("guards", [True, False])
@pytest.mark.parametrize("family", ["llama", "bert", "classifier"])
def test_the_trainer_gets_the_same_result(tmp_path, family, guards):
    import thrifty

    runs: list[Any] = []
    for methods in ([], [{"length-grouping": {"overhead": 0, "max_tokens": 20}}]):
        model: Any = {"llama": tiny.llama, "bert": tiny.bert, "classifier": tiny.bert_classifier}[family]()
        samples, collate = tiny.data_of(model)
        args = tiny.arguments(tmp_path / str(len(runs)), max_steps=3, optim="sgd", per_device_train_batch_size=6)
        runs.append(
            thrifty.Trainer(model, args, train_dataset=samples, eval_dataset=samples[:9], data_collator=collate,
                            methods=methods, guards=guards)
        )  # fmt: skip
        runs[-1].train()
    plain, grouped = runs
    torch.testing.assert_close(tiny.losses(grouped), tiny.losses(plain), rtol=1e-5, atol=0)
    tiny.assert_same(tiny.weights(grouped.model), tiny.weights(plain.model), atol=1e-5)
    assert grouped.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-5)
    first, second = (run.predict(run.eval_dataset) for run in runs)
    assert first.predictions.shape == second.predictions.shape
    if family == "classifier":
        torch.testing.assert_close(torch.tensor(second.predictions), torch.tensor(first.predictions), rtol=0, atol=1e-5)
    assert second.label_ids.tolist() == first.label_ids.tolist()
    facts = grouped.recipe["length-grouping"].facts()
    assert float(facts["micro-batches a batch"]) > 1


def test_refusals():
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    with pytest.raises(NotApplicable, match="zeros before"):
        divide(batch)
    for bad in ({"max_tokens": 0}, {"overhead": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            LengthGrouping(**bad)
