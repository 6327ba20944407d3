"""Sequence-length warm-up: the schedule, what is cut, and that the loss is one mean over the tokens that are left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.growth._shapes import truncate
from thrifty.methods.growth.sequence_length_warmup import length_at, reshape

SHORT = {"sequence-length-warmup": {"start": 2, "warmup": 0.7, "multiple_of": 2}}


def test_the_papers_schedule():
    lengths = [length_at(t, 100, 8, 1024) for t in range(102)]
    assert lengths[0] == 8
    assert lengths[-2:] == [None, None]
    exact = [8 + 1016 * t / 100 for t in range(100)]
    assert all(0 <= e - n < 8 and n % 8 == 0 for e, n in zip(exact, lengths[:100], strict=True))
    assert length_at(0, 0, 8, 1024) is None


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_truncating_cuts_all_that_is_by_token(family):
    batch = loops.batch(tiny.FAMILIES[family](), size=3)
    batch["sample_id"] = torch.arange(3)
    short = truncate(batch, 4)
    assert {k: tuple(v.shape) for k, v in short.items()} == {
        "input_ids": (3, 4), "labels": (3, 4), "attention_mask": (3, 4), "sample_id": (3,)
    }  # fmt: skip
    assert torch.equal(short["input_ids"], batch["input_ids"][:, :4])


def test_reshaping_keeps_every_token():
    batch = loops.batch(tiny.llama(), size=8)
    rows = reshape({**batch, "sample_id": torch.arange(8)}, 5)
    assert rows["input_ids"].shape[1] == 5
    assert rows["attention_mask"].sum() == batch["attention_mask"].sum()
    assert rows["attention_mask"].any(dim=1).all()  # no row is all padding
    real = rows["input_ids"][rows["attention_mask"].bool()]
    assert torch.equal(real, batch["input_ids"][batch["attention_mask"].bool()])
    assert ((rows["labels"] != -100) == rows["attention_mask"].bool()).all()
    assert len(rows["sample_id"]) == len(rows["input_ids"])


class Lengths:
    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[int, int]] = []
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs):
        if module.training:
            self.seen.append(tuple(kwargs["input_ids"].shape))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_rows_of_a_run(tmp_path, family):
    run = tiny.trainer(tmp_path, [SHORT], tiny.FAMILIES[family](), max_steps=6)
    lengths = Lengths(run.model)
    run.train()
    assert [width for _, width in lengths.seen[-6:]][:4] == [2, 4, 6, 8]  # of 12, over 4.2 of 6 steps
    assert run.recipe["sequence-length-warmup"].full == 12


def test_reshaped_rows_of_a_run(tmp_path):
    method = {"sequence-length-warmup": {**SHORT["sequence-length-warmup"], "mode": "reshape"}}
    run = tiny.trainer(tmp_path, [method], max_steps=6)
    lengths = Lengths(run.model)
    run.train()
    first = lengths.seen[-6]
    assert first[1] == 2
    assert first[0] > 2


def test_the_loss_counts_the_tokens_that_are_left(tmp_path):
    run = tiny.trainer(tmp_path, [SHORT], max_steps=3)
    batches = [truncate(b, 2) for b in [loops.batch(run.model)]]
    counted = run.get_batch_samples(iter([loops.batch(run.model)]), 1, run.args.device)
    assert counted[1] == int((batches[0]["labels"][:, 1:] != -100).sum()) == 3
    assert torch.equal(counted[0][0]["input_ids"], batches[0]["input_ids"])


def test_whole_from_the_first_step_is_the_baseline(tmp_path):
    results = []
    for methods in ((), [{"sequence-length-warmup": {"warmup": 0.0}}]):
        run = tiny.trainer(tmp_path / str(len(methods)), methods, tiny.llama(dropout=0.1))
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(*results)


def test_a_micro_batch_without_targets_stays_whole(tmp_path):
    """Answers at the end of the sample: at two tokens there would be nothing to learn, and the loss 0/0."""
    samples = [{**s, "labels": [*[-100] * (len(s["labels"]) - 1), s["labels"][-1]]} for s in tiny.text_samples()]
    run = tiny.trainer(tmp_path, [SHORT], samples=samples, max_steps=3)
    run.train()
    assert all(torch.isfinite(torch.tensor(tiny.losses(run))))


@pytest.mark.parametrize("mode", ["truncate", "reshape"])
def test_resumes(tmp_path, mode):
    method = {"sequence-length-warmup": {**SHORT["sequence-length-warmup"], "mode": mode}}
    loops.resumes(tmp_path, [method], lambda: tiny.llama(dropout=0.1), max_steps=5, step=2)


def test_phases():
    method: Any = Recipe.parse([{"sequence-length-warmup": {"start": 64, "max_length": 1024}}])[
        "sequence-length-warmup"
    ]
    phases = method.phases(tiny.llama().config, 1000)
    assert sum(phase.steps for phase in phases) == 1000
    assert sum(phase.steps for phase in phases[:-1]) == 300
    mean = sum(phase.steps * phase.length for phase in phases) / 1000
    exact = sum((length_at(t, 300, 64, 1024) or 1024) / 1024 for t in range(1000)) / 1000
    assert mean == pytest.approx(exact, abs=0.01)


def test_in_ones_own_loop():
    model = tiny.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, inputs in enumerate(loops.loader(model)):
        length = length_at(step, 3, 2, 12, 2)
        loss = model(**(inputs if length is None else truncate(inputs, length))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(losses) == 4
    assert all(torch.isfinite(torch.tensor(losses)))


def test_refused(tmp_path):
    with pytest.raises(NotApplicable, match=r"12 tokens, so there is nothing to grow"):
        tiny.trainer(tmp_path, ["sequence-length-warmup"])
    with pytest.raises(NotApplicable, match="progressive-resolution for images"):
        tiny.trainer(tmp_path, [SHORT], tiny.vit())
    with pytest.raises(NotApplicable, match="use mode truncate"):
        tiny.trainer(tmp_path, [{"sequence-length-warmup": {"start": 2, "mode": "reshape"}}], tiny.bert())
    method: Any = Recipe.parse([SHORT])["sequence-length-warmup"]
    with pytest.raises(NotApplicable, match="pad on the right"):
        method._check({"attention_mask": torch.tensor([[0, 1], [1, 1]])})
    for key, value in {"start": 0, "multiple_of": 0, "max_length": 0, "warmup": 2.0}.items():
        with pytest.raises(InputError, match=key):
            Recipe.parse([{"sequence-length-warmup": {key: value}}])
