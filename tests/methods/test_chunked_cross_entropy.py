"""Chunked cross-entropy: loss and gradients of the plain formula, in every variant; memory of a part of the logits."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import tiny
from methods import loops
from planner.cells import cell_step, real_peak
from thrifty import InputError, NotApplicable
from thrifty.methods.loss.chunked_cross_entropy import IGNORED, ChunkedHead, chunked_cross_entropy, compare
from thrifty.planner._private import profiled_allocations
from thrifty.planner.fit import Tracers, compile_optimizer, compile_step

ROWS, WIDTH, VOCABULARY = 23, 6, 31


def _case(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return (2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    leaves = [draw(ROWS, WIDTH), draw(VOCABULARY, WIDTH)] + ([draw(VOCABULARY)] if bias else [])
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    targets[::5] = IGNORED
    return leaves, targets


def _naive(leaves: list[torch.Tensor], targets: torch.Tensor, **options: Any) -> torch.Tensor:
    """The formulas, written down with whole logits and autograd."""
    hidden, weight, *bias = leaves
    logits = hidden @ weight.T
    logits = logits + bias[0] if bias else logits
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    log_p = logits.log_softmax(-1)
    epsilon = options.get("label_smoothing", 0.0)
    spread = torch.full_like(log_p, epsilon / VOCABULARY)
    spread = spread.scatter_add(
        1, targets.clamp(min=0)[:, None], torch.full((len(targets), 1), 1 - epsilon, dtype=log_p.dtype)
    )
    losses = -(spread * log_p).sum(-1) + options.get("z_loss", 0.0) * logits.logsumexp(-1) ** 2
    count = options.get("num_items") or (targets != IGNORED).sum()
    return losses[targets != IGNORED].sum() / count


OPTIONS = [
    {},
    {"label_smoothing": 0.2},
    {"z_loss": 0.05},
    {"softcap": 3.0},
    {"num_items": 50},
    {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 2.0, "num_items": 7},
]


@pytest.mark.parametrize(("options", "chunks", "bias"), list(itertools.product(OPTIONS, [1, 4, 40], [True, False])))
def test_equals_the_formula(options, chunks, bias):
    leaves, targets = _case(bias=bias)
    wanted = _naive(leaves, targets, **options)
    expected = torch.autograd.grad(3 * wanted, leaves)
    found = chunked_cross_entropy(leaves[0], leaves[1], targets, *leaves[2:], chunks=chunks, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(3 * found, leaves)
    torch.testing.assert_close(list(got), list(expected), rtol=1e-10, atol=1e-12)


def test_equals_torch_in_float32():
    leaves, targets = _case(torch.float32, bias=False)
    wanted = nn.functional.cross_entropy(leaves[0] @ leaves[1].T, targets, label_smoothing=0.3)
    expected = torch.autograd.grad(wanted, leaves)
    found = chunked_cross_entropy(leaves[0], leaves[1], targets, chunks=3, label_smoothing=0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(list(torch.autograd.grad(found, leaves)), list(expected), rtol=1e-5, atol=1e-7)


def test_a_frozen_head_gets_no_gradient_and_nothing_is_differentiated_twice():
    leaves, targets = _case()
    frozen = leaves[1].detach()
    loss = chunked_cross_entropy(leaves[0], frozen, targets)
    loss.backward(retain_graph=True)
    assert frozen.grad is None
    assert leaves[0].grad is not None
    with pytest.raises(RuntimeError, match="not kept"):
        loss.backward()


def test_large_logits_stay_finite_and_no_target_gives_nan_like_torch():
    hidden = torch.full((2, 4), 1e4, requires_grad=True)
    loss = chunked_cross_entropy(hidden, torch.randn(5, 4), torch.tensor([1, 2]))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isnan(chunked_cross_entropy(hidden, torch.randn(5, 4), torch.tensor([IGNORED, IGNORED])))


def test_small_gradients_survive_float16():
    """Divided by the number of items before the product, they would be below float16's smallest number."""
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(3000, 8, generator=torch.Generator().manual_seed(2)) * 0.01
    targets = torch.tensor([1, 2, 3, 4])
    results = []
    for context in (torch.autocast("cpu", torch.float16), torch.autocast("cpu", enabled=False)):
        h = hidden.clone().requires_grad_()
        w = weight.clone().requires_grad_()
        with context:
            loss = chunked_cross_entropy(h, w, targets, chunks=2, num_items=2**16)
        (loss * 2.0**14).backward()
        results.append(w.grad)
        assert w.grad.dtype == torch.float32
    assert (results[0][10:] != 0).all()
    torch.testing.assert_close(*results, rtol=0.02, atol=1e-6)


def _gemma2() -> nn.Module:
    config = Gemma2Config(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, final_logit_softcapping=0.5, attn_implementation="eager",
    )  # fmt: skip
    return tiny._build(AutoModelForCausalLM, config)


def _mixtral() -> nn.Module:
    config = MixtralConfig(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    return tiny._build(AutoModelForCausalLM, config)


MODELS = {
    "llama": tiny.llama,
    "tied-llama": lambda: tiny.llama(tie_word_embeddings=True),
    "gpt2": tiny.gpt2,
    "bert": tiny.bert,
    "gemma2": _gemma2,
    "mixtral": _mixtral,
}


def _results(model: nn.Module, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.train()
    loss = model(**loops.batch(model), **inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_without(name):
    plain, chunked = MODELS[name](), MODELS[name]()
    head = ChunkedHead(chunked, chunks=3)
    compare(chunked, head)
    wanted, expected = _results(plain)
    found, got = _results(chunked)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert got.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(got[key], expected[key], rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


def test_num_items_and_shift_labels():
    plain, chunked = tiny.llama(), tiny.llama()
    ChunkedHead(chunked)
    items = torch.tensor(40)
    torch.testing.assert_close(
        _results(chunked, num_items_in_batch=items)[0], _results(plain, num_items_in_batch=items)[0]
    )
    batch = loops.batch(plain)
    shifted = nn.functional.pad(batch.pop("labels"), (0, 1), value=IGNORED)[..., 1:].contiguous()
    # With labels of its own, transformers shifts nothing.
    wanted = plain(**batch, labels=shifted, shift_labels=shifted).loss
    torch.testing.assert_close(chunked(**batch, shift_labels=shifted).loss, wanted)


def test_evaluation_and_plain_calls_are_untouched():
    plain, chunked = tiny.bert(), tiny.bert()
    ChunkedHead(chunked)
    batch = loops.batch(plain)
    labels = batch.pop("labels")
    assert torch.equal(chunked.train()(**batch).logits, plain.train()(**batch).logits)
    first, second = (model.eval()(**batch, labels=labels) for model in (plain, chunked))
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.logits, second.logits)


def _peak(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    model.train()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model(**batch).loss.backward()
    model.zero_grad()
    return int(np.cumsum(profiled_allocations(profile)).max())


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_peak_of_memory_falls(family):
    """By the allocator's own events: whole logits are 4 bytes x rows x vocabulary, several times."""
    rows, vocabulary = 512, 2000
    if family == "gpt2":
        config: Any = GPT2Config(vocab_size=vocabulary, n_embd=16, n_layer=1, n_head=2, n_positions=64)
        build: Any = GPT2LMHeadModel
    else:
        config = BertConfig(vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                            num_attention_heads=2)  # fmt: skip
        build = BertForMaskedLM
    plain, chunked = build(config), build(config)
    ChunkedHead(chunked, chunks=16)
    ids = torch.arange(rows).view(8, 64)
    batch = {"input_ids": ids, "labels": ids}
    logits = 4 * rows * vocabulary
    before, after = _peak(plain, batch), _peak(chunked, batch)
    assert before > 2 * logits
    assert after < 0.6 * logits
    assert before - after > 1.5 * logits


def test_the_planner_predicts_the_peak():
    def chunked(model: nn.Module) -> nn.Module:
        ChunkedHead(model)
        return model

    step = cell_step("gpt2", transform_model=chunked)
    tracers = Tracers(step)
    compiled = compile_step(step, seq=256, batches=("many",), tracers=tracers)
    step = dataclasses.replace(step, build_optimizer=lambda p: torch.optim.AdamW(p, foreach=False))
    layers = dict.fromkeys(step.layers, 4)
    predicted = compiled.peak(8, 128, layers, optimizer=compile_optimizer(step, tracers=tracers)).bytes
    assert predicted == pytest.approx(real_peak(step, 8, 128, layers), rel=0.02)


@pytest.mark.parametrize(("family", "dropout"), [("llama", 0.1), ("gpt2", 0.1), ("bert", 0.1)])
def test_the_trainer_gets_the_same_result(tmp_path, family, dropout):
    runs = []
    for methods in ([], [{"chunked-cross-entropy": {"chunks": 4}}]):
        model = tiny.FAMILIES[family](dropout=dropout)
        folder = tmp_path / str(len(methods))
        runs.append(tiny.trainer(folder, methods, model, max_steps=3, optim="sgd", gradient_accumulation_steps=2))
        runs[-1].train()
    torch.testing.assert_close(tiny.losses(runs[1]), tiny.losses(runs[0]), rtol=1e-5, atol=0)
    tiny.assert_same(tiny.weights(runs[1].model), tiny.weights(runs[0].model), atol=1e-6)
    assert runs[1].evaluate()["eval_loss"] == pytest.approx(runs[0].evaluate()["eval_loss"], abs=1e-5)


def test_resumes_with_bert_and_under_bf16(tmp_path):
    loops.resumes(tmp_path / "a", ["chunked-cross-entropy"], lambda: tiny.bert(dropout=0.1))
    loops.resumes(tmp_path / "b", ["chunked-cross-entropy", "bf16"], lambda: tiny.gpt2(dropout=0.1))


def test_lora_keeps_the_head_frozen(tmp_path):
    runs = []
    for methods in ([{"lora": {"r": 2}}], [{"lora": {"r": 2}}, "chunked-cross-entropy"]):
        runs.append(tiny.trainer(tmp_path / str(len(methods)), methods, tiny.llama(), max_steps=2))
        head = runs[-1].model.get_base_model().lm_head.weight
        before = head.clone()
        runs[-1].train()
        assert torch.equal(head, before)
        assert head.grad is None
    torch.testing.assert_close(tiny.losses(runs[1]), tiny.losses(runs[0]), rtol=1e-5, atol=0)


def test_own_loops_agree():
    def make() -> loops.Setup:
        model = tiny.gpt2()
        ChunkedHead(model, chunks=5)
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    _, losses = loops.both_loops(make)
    torch.testing.assert_close(losses, loops.baseline(tiny.gpt2)[1], rtol=1e-4, atol=0)


def test_refusals(tmp_path):
    with pytest.raises(NotApplicable, match="no causal or masked"):
        tiny.trainer(tmp_path, ["chunked-cross-entropy"], tiny.vit())
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=16, d_ff=16, d_kv=4, num_heads=2, num_layers=1))
    with pytest.raises(NotApplicable, match="no causal or masked"):
        ChunkedHead(t5)
    with pytest.raises(InputError, match=r"chunked-cross-entropy\.label_smoothing"):
        tiny.trainer(tmp_path, ["chunked-cross-entropy"], label_smoothing_factor=0.1)
    adapted = {"lora": {"r": 2, "target_modules": ["lm_head"]}}
    with pytest.raises(NotApplicable, match="not a plain linear layer"):
        tiny.trainer(tmp_path, ["chunked-cross-entropy", adapted], tiny.llama())
    for bad in ({"chunks": 0}, {"label_smoothing": 1.0}, {"z_loss": -1.0}):
        with pytest.raises(InputError, match=next(iter(bad))):
            tiny.trainer(tmp_path, [{"chunked-cross-entropy": bad}])


def test_a_model_that_does_more_to_its_logits_is_refused(monkeypatch):
    model = tiny.llama()
    loss = model.loss_function
    model.loss_function = lambda logits, *args, **kwargs: loss(2 * logits, *args, **kwargs)
    with pytest.raises(NotApplicable, match="more to the logits"):
        compare(model, ChunkedHead(model))
