"""The choice of attention: equal results, the kernel that really ran, packing without leaks in each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.config import load_config
from thrifty.methods.attention import attention
from thrifty.methods.attention.attention import KernelWatch, attention_of, choose
from thrifty.methods.attention.packing import largest_leak


def test_sdpa_is_softmax_attention_in_float64():
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 3, 9, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~torch.ones(9, 9).tril().bool(), float("-inf"))
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, v, is_causal=True), scores.softmax(-1) @ v, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    ("arguments", "kernel"),
    [({}, "flash (CPU)"), ({"dropout_p": 0.5}, "matrix products (SDPA)")],
)
def test_the_watch_sees_the_kernel(arguments, kernel):
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    with KernelWatch() as watch:
        scaled_dot_product_attention(q, q, q, **arguments).sum().backward()
    assert watch.kernels == {kernel: 1}


def test_the_watch_steps_back_before_a_profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), KernelWatch() as watch:
        torch.ones(2).sum()
    assert not watch.looked


@pytest.mark.parametrize(
    ("implementation", "dropout", "kernel"),
    [
        ("auto", 0.0, "flash (CPU)"),
        ("sdpa", 0.1, "matrix products (SDPA)"),
        ("eager", 0.0, "matrix products and softmax"),
    ],
)
def test_the_run_states_what_ran(tmp_path, implementation, dropout, kernel):
    methods = [{"attention": {"implementation": implementation}}]
    run = tiny.trainer(tmp_path, methods, tiny.llama(dropout=dropout), max_steps=2)
    run.train()
    chosen = "sdpa" if implementation == "auto" else implementation
    assert run.model.config._attn_implementation == chosen
    assert run.recipe["attention"].facts() == {"implementation": chosen, "kernel": kernel}
    assert kernel in run.recipe.describe()[0]["facts"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
def test_implementations_agree(tmp_path, family):
    results = []
    for implementation in ("sdpa", "eager"):
        methods = [{"attention": {"implementation": implementation}}]
        run = tiny.trainer(tmp_path / implementation, methods, tiny.FAMILIES[family](), max_steps=2, optim="sgd")
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(*results, atol=1e-6)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(tmp_path, implementation):
    methods: list[Any] = [{"attention": {"implementation": implementation}}, "packing"]
    run = tiny.trainer(tmp_path, methods, tiny.llama(), max_steps=2)
    assert [method.name for method in run.recipe] == ["attention", "packing"]
    samples = tiny.text_samples()[:3]
    assert largest_leak(run.model, samples, torch.device("cpu")) < 1e-5
    run.train()
    kernel = run.recipe["attention"].facts()["kernel"]
    assert kernel == {"sdpa": "flash (CPU)", "eager": "matrix products and softmax"}[implementation]


@pytest.mark.soak
def test_packed_documents_do_not_see_each_other_in_flex_attention():
    """Forward only: there is no backward pass on a CPU."""
    model = tiny.llama()
    samples = tiny.text_samples()[:3]
    with attention_of(model, "flex_attention"):
        assert largest_leak(model, samples, torch.device("cpu")) < 1e-4
    assert model.config._attn_implementation == "sdpa"


def test_auto_and_what_devices_lack(monkeypatch):
    cpu, gpu, half = torch.device("cpu"), torch.device("cuda"), {torch.bfloat16}
    assert choose("auto", cpu, half) == "sdpa"
    with pytest.raises(NotApplicable, match="needs a GPU"):
        choose("flash", cpu, half)
    with pytest.raises(NotApplicable, match="no backward pass on a CPU"):
        choose("flex", cpu, half)
    for installed in (False, True):
        monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name, i=installed: object() if i else None)
        assert choose("auto", gpu, half) == ("flash" if installed else "sdpa")
        assert choose("auto", gpu, {torch.float32}) == "sdpa"
        with pytest.raises(NotApplicable, match="half precision" if installed else "not installed"):
            choose("flash", gpu, {torch.float32})
    assert choose("flash", gpu, half) == "flash"
    assert choose("flex", gpu, half) == "flex"


def test_the_key_of_a_run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("embedded_corpus: kjv\nmodel_config: {model_type: llama}\ntask: causal-lm\nattention: eager\n")
    assert load_config(path, []).methods == [{"attention": {"implementation": "eager"}}]
    with pytest.raises(InputError, match="attention"):
        load_config(path, ["attention=flsh"])


def test_refusals(tmp_path):
    with pytest.raises(NotApplicable, match="needs a GPU"):
        tiny.trainer(tmp_path, [{"attention": {"implementation": "flash"}}])
    with pytest.raises(InputError, match="implementation"):
        Recipe.parse([{"attention": {"implementation": "xformers"}}])


def test_the_planner_sees_the_scores_of_eager_attention(tmp_path, monkeypatch):
    from thrifty.planner.plan import estimate

    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
              "max_position_embeddings": 512}  # fmt: skip
    peaks = [
        estimate(config, device="a100", seq_len=512, micro_batch=2, methods=[{"attention": {"implementation": name}}])
        .peak_allocated_bytes
        for name in ("eager", "flash")
    ]  # fmt: skip
    scores = 2 * 4 * 512 * 512 * 4
    assert peaks[0] - peaks[1] > 2 * scores


def test_resumes(tmp_path):
    loops.resumes(tmp_path, [{"attention": {"implementation": "eager"}}], lambda: tiny.bert(dropout=0.1))
