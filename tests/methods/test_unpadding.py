"""Batches without padding: joined samples give the loss and the gradients of padded ones, and see only themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from thrifty import NotApplicable
from thrifty.methods._dropout import kept
from thrifty.methods.attention._by_sample import Layout, attention_by_sample
from thrifty.methods.attention.unpadding import Unpadded, join

FAMILIES = {"llama": tiny.llama, "gpt2": tiny.gpt2, "bert": tiny.bert, "classifier": tiny.bert_classifier}


def _batch(model: nn.Module, rows: slice = slice(0, 5)) -> dict[str, Any]:
    samples, collate = tiny.data_of(model)
    batch = collate(samples[rows])
    batch.pop("sample_id")
    if batch["labels"].dim() == 2:
        batch["labels"][:, :3] = -100
    return batch


def _loss_and_gradient(model: nn.Module, batch: dict[str, Any]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_padded_batch(family):
    model = FAMILIES[family]()
    batch = _batch(model)
    loss, gradient = _loss_and_gradient(model, batch)
    unpadded = Unpadded(model)
    found, found_gradient = _loss_and_gradient(model, batch)
    assert unpadded.padded == batch["input_ids"].numel()
    assert unpadded.computed == int(batch["attention_mask"].sum())
    Layout.clear()
    assert found == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-4, atol=1e-6)
    unpadded.wanted = lambda training: False
    again, _ = _loss_and_gradient(model, batch)
    assert again == pytest.approx(loss, rel=1e-5), "an ordinary batch is left as it was"
    assert unpadded.padded == batch["input_ids"].numel()
    unpadded.restore()
    assert not any(hook for module in model.modules() for hook in module._forward_pre_hooks.values())


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_samples_do_not_see_each_other(family):
    model = FAMILIES[family]().eval()
    unpadded = Unpadded(model)
    batch = _batch(model)
    batch.pop("labels")
    length = int(batch["attention_mask"][0].sum())
    with torch.no_grad():
        first = model(**unpadded.inputs(batch)).logits[0]
        batch["input_ids"][0, : length - 1] = 5
        second = model(**unpadded.inputs(batch)).logits[0]
    Layout.clear()
    assert torch.equal(first[length:], second[length:])
    assert not torch.equal(first[:length], second[:length])


def test_join_by_hand():
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
        "labels": torch.tensor([[5, 6, 7], [8, 9, -100]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "sample_id": torch.tensor([1, 2]),
    }
    joined = join(batch, causal=True)
    assert joined is not None
    assert joined["lengths"] == [3, 2]
    assert joined["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert joined["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert joined["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    assert set(joined) == {"lengths", "input_ids", "position_ids", "labels"}
    left = {**batch, "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}
    assert join(left, causal=True) is None


def test_sliding_window():
    torch.manual_seed(0)
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(
        MistralConfig(vocab_size=tiny.VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                      num_attention_heads=2, num_key_value_heads=1, sliding_window=4)
    )  # fmt: skip
    batch = _batch(model)
    loss, gradient = _loss_and_gradient(model, batch)
    Unpadded(model)
    found, found_gradient = _loss_and_gradient(model, batch)
    assert found == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-4, atol=1e-6)


EXTRAS = [(), ("gradient-checkpointing",), ("chunked-cross-entropy",), ({"lora": {"r": 2}}, "chunked-cross-entropy")]


@pytest.mark.parametrize(
    ("family", "extra"), [*(("llama", extra) for extra in EXTRAS), ("classifier", ()), ("classifier", EXTRAS[1])]
)
def test_the_trainer_gets_the_same_result(tmp_path, family, extra):
    runs = []
    for methods in (list(extra), ["unpadding", *extra]):
        runs.append(
            tiny.trainer(tmp_path / str(len(runs)), methods, FAMILIES[family](), max_steps=3, optim="sgd",
                         gradient_accumulation_steps=2, per_device_train_batch_size=3)
        )  # fmt: skip
        runs[-1].train()
    torch.testing.assert_close(tiny.losses(runs[1]), tiny.losses(runs[0]), rtol=1e-5, atol=0)
    tiny.assert_same(tiny.weights(runs[1].model), tiny.weights(runs[0].model), atol=1e-5)
    assert runs[1].evaluate()["eval_loss"] == pytest.approx(runs[0].evaluate()["eval_loss"], abs=1e-5)
    assert "padding left out" in runs[1].recipe["unpadding"].facts()


def test_an_ordinary_batch_may_come_between():
    model = tiny.llama()
    batch = _batch(model)
    expected, _ = _loss_and_gradient(model, batch)
    unpadded = Unpadded(model)
    unpadded.inputs(_batch(model, slice(5, 8)))
    unpadded.wanted = lambda training: False
    assert _loss_and_gradient(model, batch)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "classifier"])
def test_evaluation_of_the_loss_computes_no_padding(tmp_path, family):
    seen: list[tuple[int, ...]] = []
    run = tiny.trainer(tmp_path, ["unpadding"], FAMILIES[family]())
    expected = tiny.trainer(tmp_path, [], FAMILIES[family]()).evaluate()["eval_loss"]
    run.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((kwargs.get("input_ids") if not args else args[0]).shape),
        with_kwargs=True,
    )
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
    assert {shape[0] for shape in seen} == {1}


def test_evaluation_of_the_loss_makes_no_logits(tmp_path):
    model = tiny.llama()
    rows: list[int] = []
    run = tiny.trainer(tmp_path, ["chunked-cross-entropy"], model)
    expected = tiny.trainer(tmp_path, [], tiny.llama()).evaluate()["eval_loss"]
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.numel()))
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
    assert set(rows) == {0}
    assert run.predict(tiny.text_samples()[:2]).predictions.shape[-1] == tiny.VOCABULARY


def test_refuses_a_classifier_that_reads_more(tmp_path):
    class Mean(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.mean(dim=1)

    model: Any = tiny.bert_classifier()
    model.bert.pooler = Mean()
    with pytest.raises(NotApplicable, match="other logits"):
        tiny.trainer(tmp_path, ["unpadding"], model)
    with pytest.raises(NotApplicable, match="position_ids"):
        Unpadded(tiny.t5())


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 2)])
def test_attention_with_dropout(causal, window):
    """Against the formula, sample by sample, with the same numbers drawn."""
    lengths, heads, width = [3, 5, 1], 2, 4
    module = nn.Module()
    module.is_causal = causal  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(1)
    shape = (1, heads, sum(lengths), width)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
    Layout.lengths = lengths
    try:
        torch.manual_seed(3)
        found, _ = attention_by_sample(module, q, k, v, None, dropout=0.4, sliding_window=window)
    finally:
        Layout.clear()
    torch.manual_seed(3)
    factors = kept(heads * sum(n * n for n in lengths), 0.4, torch.float64, q.device)
    assert (factors == 0).any()
    parts = []
    for i, n in enumerate(lengths):
        at = slice(sum(lengths[:i]), sum(lengths[: i + 1]))
        scores = q[0, :, at] @ k[0, :, at].mT / width**0.5
        distance = torch.arange(n)[:, None] - torch.arange(n)
        seen = (distance >= 0) & (distance < (window or n)) if causal else torch.ones(n, n, dtype=torch.bool)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        begin = heads * sum(m * m for m in lengths[:i])
        parts.append(weights * factors[begin : begin + heads * n * n].view(heads, n, n) @ v[0, :, at])
    expected = torch.cat(parts, dim=1).transpose(0, 1)[None]
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad(found, (q, k, v), upstream)
    theirs = torch.autograd.grad(expected, (q, k, v), upstream)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted)
