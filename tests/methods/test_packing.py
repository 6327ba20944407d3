"""Packing: rows by brute force, logits against separate runs, and what would let samples see each other."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.trainer_callback import TrainerCallback

import tiny
from methods import loops
from thrifty import InputError, NotApplicable
from thrifty.methods.attention.packing import (
    IGNORED,
    PackedDataset,
    best_fit_decreasing,
    collate_packed,
    largest_leak,
    pack,
)

CAUSAL = {"llama": tiny.llama, "gpt2": tiny.gpt2}
CPU = torch.device("cpu")


def _loud(model: nn.Module) -> nn.Module:
    """Weights so large that attention to a wrong token shows."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model


def _inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key != "sample_id"}


def _alone(model: nn.Module, sample: dict[str, Any]) -> torch.Tensor:
    return model(input_ids=torch.tensor([sample["input_ids"]]), use_cache=False).logits[0]


# --- rows ---


@settings(deadline=None, max_examples=200)
@given(lengths=st.lists(st.integers(1, 20), max_size=40), capacity=st.integers(20, 30))
def test_rows_are_those_of_a_plain_search(lengths, capacity):
    rows = best_fit_decreasing(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    fills = [sum(lengths[i] for i in row) for row in rows]
    assert all(fill <= capacity for fill in fills)
    slow: list[int] = []
    for length in sorted(lengths, reverse=True):
        open_rows = [i for i, fill in enumerate(slow) if fill + length <= capacity]
        if open_rows:
            slow[max(open_rows, key=lambda i: slow[i])] += length
        else:
            slow.append(length)
    assert sorted(fills) == sorted(slow)


def test_a_sample_longer_than_a_row():
    with pytest.raises(ValueError, match="sample 1 has 9 tokens, a row holds 8"):
        best_fit_decreasing([3, 9], 8)


# --- logits and loss ---


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", CAUSAL)
def test_packed_logits_are_those_of_separate_runs(family, attention, training):
    """Two rows of unequal length in a batch, called as one's own loop would call it."""
    model: Any = _loud(CAUSAL[family]())
    model.set_attn_implementation(attention)
    model.train(training)
    assert model.config.use_cache  # with a cache, transformers ignores where positions restart
    samples = tiny.text_samples()
    rows = [samples[:3], samples[3:5]]
    batch = _inputs(collate_packed([pack(row) for row in rows]))
    with torch.no_grad():
        together = model(**batch).logits
        for logits, row in zip(together, rows, strict=True):
            start = 0
            for sample in row:
                end = start + len(sample["input_ids"])
                torch.testing.assert_close(logits[start:end], _alone(model, sample), rtol=1e-5, atol=1e-5)
                start = end


@pytest.mark.parametrize("family", CAUSAL)
def test_a_mask_of_ones_lets_samples_see_each_other(family):
    """Why no mask may ever be added to a packed batch; the collator gives none."""
    model = _loud(CAUSAL[family]())
    samples = tiny.text_samples()[:3]
    batch = collate_packed([pack(samples)])
    assert "attention_mask" not in batch
    with torch.no_grad():
        masked = model(**_inputs(batch), attention_mask=torch.ones_like(batch["input_ids"])).logits[0]
    start = len(samples[0]["input_ids"])
    end = start + len(samples[1]["input_ids"])
    assert (masked[start:end] - _alone(model, samples[1])).abs().max() > 0.1


@pytest.mark.parametrize("family", CAUSAL)
def test_loss_is_that_of_all_tokens(family):
    model = _loud(CAUSAL[family]())
    samples = tiny.text_samples()[:6]
    batch = collate_packed([pack(samples[:4]), pack(samples[4:])])
    loss = model(**_inputs(batch)).loss
    total, count = torch.zeros(()), 0
    for sample in samples:
        targets = torch.tensor(sample["labels"][1:])
        total = total + nn.functional.cross_entropy(_alone(model, sample)[:-1], targets, reduction="sum")
        count += len(targets)
    torch.testing.assert_close(loss, total / count, rtol=1e-5, atol=1e-6)
    assert int((batch["labels"][:, 1:] != IGNORED).sum()) == count  # nothing is predicted across a border


def test_prompts_stay_without_loss():
    sample = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    row = pack([sample, sample])
    assert row["labels"].tolist() == [-100, -100, 7, 8] * 2
    assert row["position_ids"].tolist() == [0, 1, 2, 3] * 2
    assert sample["labels"] == [-100, -100, 7, 8]


# --- the check before training ---


def test_the_leak_is_measured_in_deviations_of_the_logits():
    """A freshly drawn BERT has logits so small that an absolute limit would pass it."""
    samples = tiny.text_samples()[:3]
    assert largest_leak(tiny.llama(), samples, CPU) < 1e-5
    assert largest_leak(tiny.gpt2(), samples, CPU) < 1e-5
    assert largest_leak(tiny.bert(), samples, CPU) > 2e-3


def _first_row_only(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Flash attention's rule on any device: samples are kept apart in a batch of one row, and only there."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length = query.shape[2]
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    positions = kwargs.get("position_ids")
    if positions is not None and query.shape[0] == 1:
        document = (positions[0] == 0).cumsum(0)
        allowed = allowed & (document[:, None] == document[None])
    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("first_row_only", _first_row_only)
AttentionMaskInterface.register("first_row_only", lambda *args, **kwargs: None)


def test_a_kernel_that_packs_single_rows_only_is_found_out(tmp_path):
    model: Any = tiny.llama()
    model.set_attn_implementation("first_row_only")
    assert largest_leak(model, tiny.text_samples()[:3], CPU, rows=1) < 1e-5
    with pytest.raises(NotApplicable, match=r"packing: .*LlamaForCausalLM lets.*per_device_train_batch_size 1"):
        tiny.trainer(tmp_path / "two", ["packing"], model, per_device_train_batch_size=2)
    tiny.trainer(tmp_path / "one", ["packing"], model, per_device_train_batch_size=1, max_steps=1).train()


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (tiny.bert, r"packing: packed logits differ .*BertForMaskedLM lets samples.* Fix: .*remove packing"),
        (tiny.vit, r"packing: the samples have no input_ids.* Fix: remove packing"),
    ],
)
def test_refused(tmp_path, build, match):
    with pytest.raises(NotApplicable, match=match):
        tiny.trainer(tmp_path, ["packing"], build())


def test_rows_shorter_than_a_sample_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"methods\.packing\.max_length=4: packing: .* Fix: set it to at least 12"):
        tiny.trainer(tmp_path, [{"packing": {"max_length": 4}}])


# --- in a loop and in the trainer ---


def test_own_loops_agree_and_act():
    samples = tiny.text_samples()
    rows = best_fit_decreasing([len(s["input_ids"]) for s in samples], 24)

    def train(accelerate: bool) -> tuple[nn.Module, list[float], int]:
        model = net = tiny.llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = torch.utils.data.DataLoader(PackedDataset(samples, rows), batch_size=2, collate_fn=collate_packed)
        backward = torch.Tensor.backward
        if accelerate:
            accelerator = loops.new_accelerator()
            net, optimizer, batches = accelerator.prepare(model, optimizer, batches)
            backward = accelerator.backward
        losses, tokens = [], 0
        for batch in batches:
            optimizer.zero_grad()
            loss = net(**_inputs(batch)).loss
            backward(loss)
            optimizer.step()
            losses.append(loss.item())
            tokens += batch["input_ids"].numel()
        return model, losses, tokens

    model, losses, tokens = train(False)
    wrapped, again, _ = train(True)
    assert losses == again
    tiny.assert_same(tiny.weights(model), tiny.weights(wrapped))
    padded = sum(batch["input_ids"].numel() for batch in loops.loader(model, count=len(samples)))
    real = sum(len(s["input_ids"]) for s in samples)
    assert real <= tokens < padded
    assert tokens <= 1.05 * real


class Watch(TrainerCallback):
    def __init__(self, run: Any) -> None:
        self.rows: list[int] = []
        self._handle = run.model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        assert kwargs.get("attention_mask") is None
        assert kwargs["use_cache"] is False
        self.rows.append(kwargs["input_ids"].shape[1])

    def on_step_begin(self, *args, **kwargs):
        self.rows.clear()

    def on_train_end(self, *args, **kwargs):
        self._handle.remove()


@pytest.mark.parametrize("family", CAUSAL)
def test_trains_and_resumes(tmp_path, family):
    seen: list[Watch] = []
    run = loops.resumes(
        tmp_path,
        [{"packing": {"max_length": 30}}],
        CAUSAL[family],
        eval_strategy="steps",
        eval_steps=3,
        watch=lambda r: seen.append(Watch(r)) or seen[0],
    )
    lengths = [len(s["input_ids"]) for s in tiny.text_samples()]
    assert run.recipe["packing"].rows == len(run.train_dataset) < len(lengths) / 2
    assert -(-sum(lengths) // 30) <= len(run.train_dataset)
    assert max(seen[0].rows) > max(lengths)
    # Evaluation takes the same samples, each in a row of its own: the loss is that without packing.
    padded = loops.batch(run.model, size=4)
    with torch.no_grad():
        expected = run.model.eval()(**padded).loss.item()
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


def test_an_arrow_dataset_gives_the_same_rows(tmp_path):
    """Also where it is a selection of another one, whose lengths must not be taken from the table behind it."""
    samples = tiny.text_samples()
    table = datasets.Dataset.from_list(samples + samples[:5]).select(range(len(samples)))
    runs = [tiny.trainer(tmp_path / str(i), ["packing"], samples=data) for i, data in enumerate((samples, table))]
    assert runs[0].train_dataset.rows == runs[1].train_dataset.rows  # type: ignore[union-attr]
    for first, second in zip(runs[0].train_dataset, runs[1].train_dataset, strict=True):  # type: ignore[arg-type]
        assert torch.equal(first["input_ids"], second["input_ids"])


def test_accumulation_counts_the_tokens_of_packed_rows(tmp_path):
    """4 x 1 = 1 x 4 with rows of unequal fill."""
    results = []
    for size, accumulation in ((1, 4), (4, 1)):
        run = tiny.trainer(
            tmp_path / str(size),
            [{"packing": {"max_length": 17}}],
            max_steps=2,
            optim="sgd",
            learning_rate=0.05,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
        )
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(*results, atol=1e-6)
