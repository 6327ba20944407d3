"""(IA)3, prompts, prefixes, bottlenecks and biases: what they train, that they start as they should, how they load."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    DistilBertConfig,
    DistilBertForSequenceClassification,
)

import tiny
from methods import adapters, loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.peft.bitfit import train_biases
from thrifty.methods.peft.houlsby_adapter import add_adapters, load_adapters
from thrifty.methods.peft.ia3 import add_ia3, ia3_targets
from thrifty.methods.peft.visual_prompt import add_visual_prompts

LAYERS, WIDTH, INNER = 2, 16, 32


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _base_is_untouched(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    model.train()
    model(**inputs).loss.backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) is not p.requires_grad, name


# --- (IA)3 ---


@pytest.mark.parametrize(("family", "vectors"), [("llama", 8 + 8), ("gpt2", 48), ("bert", 32), ("vit", 32)])
def test_ia3_starts_as_the_identity_and_merges_by_its_formula(family, vectors):
    build = tiny.FAMILIES[family]
    inputs = loops.batch(build())
    expected = adapters.logits(build(), inputs)
    model = add_ia3(build())
    assert torch.equal(adapters.logits(model, inputs), expected)
    inner = 64 if family == "gpt2" else INNER
    assert _count(model) == LAYERS * (vectors + inner)
    _base_is_untouched(model, inputs)
    adapters.scramble(model)
    changed = adapters.logits(model, inputs)
    scaled, feed_forward = ia3_targets(build())
    plain = build()
    with torch.no_grad():
        for name in scaled + feed_forward:
            vector = model.get_submodule(f"base_model.model.{name}").ia3_l["default"].flatten()
            layer: Any = plain.get_submodule(name)
            weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
            weight.mul_(vector[None] if name in feed_forward else vector[:, None])
            if name in scaled and layer.bias is not None:
                layer.bias.mul_(vector)
    torch.testing.assert_close(adapters.logits(plain, inputs), changed, rtol=1e-4, atol=1e-5)
    merged: Any = model.merge_and_unload()  # type: ignore[operator]
    tiny.assert_same(tiny.weights(merged), tiny.weights(plain), atol=1e-6)


def test_ia3_trains_merges_and_resumes(tmp_path):
    run = adapters.trained(tmp_path, {"ia3": {}}, "gpt2")
    adapters.check_plain_and_adapter(tmp_path, run, "gpt2")


def test_ia3_refusals(tmp_path):
    with pytest.raises(InputError, match=r"feedforward_modules must be among target_modules.*down_proj"):
        Recipe.parse([{"ia3": {"target_modules": ["k_proj"], "feedforward_modules": ["down_proj"]}}])
    with pytest.raises(NotApplicable, match=r"methods\.ia3\.target_modules=\['nothing'\].* Fix: name linear layers"):
        tiny.trainer(tmp_path, [{"ia3": {"target_modules": ["nothing"]}}])


# --- virtual tokens ---


@pytest.mark.parametrize(
    ("method", "family", "count"),
    [
        ({"prompt-tuning": {"tokens": 5}}, "llama", 5 * WIDTH),
        ({"prompt-tuning": {"tokens": 5}}, "gpt2", 5 * WIDTH),
        # Two layers, keys and values, and as many heads of width 4 as the family keeps in its cache.
        ({"prefix-tuning": {"tokens": 5}}, "llama", 5 * LAYERS * 2 * 2 * 4),
        ({"prefix-tuning": {"tokens": 5}}, "gpt2", 5 * LAYERS * 2 * WIDTH),
    ],
)
def test_virtual_tokens(tmp_path, method, family, count):
    run = tiny.trainer(tmp_path, [method], tiny.FAMILIES[family]())
    assert _count(run.model) == count
    inputs = loops.batch(tiny.FAMILIES[family]())
    base = adapters.logits(tiny.FAMILIES[family](), inputs)
    assert not torch.allclose(adapters.logits(run.model, inputs)[:, -10:], base[:, -10:], atol=1e-4)
    with run.model.disable_adapter():
        assert torch.equal(adapters.logits(run.model, inputs), base)
    run.model.train()
    run.model(**inputs).loss.backward()
    for name, p in run.model.named_parameters():
        assert (p.grad is not None) is ("prompt_encoder" in name), name


def test_prompts_are_embeddings_in_front_of_the_text(tmp_path):
    """The loss is that of the base model on the joined embeddings, with no label on a prompt."""
    run = tiny.trainer(tmp_path, [{"prompt-tuning": {"tokens": 4}}], tiny.llama())
    inputs = loops.batch(tiny.llama())
    prompt = run.model.prompt_encoder["default"].embedding.weight.detach()
    base: Any = tiny.llama().eval()
    table = base.get_input_embeddings().weight.detach()
    assert all(any(torch.equal(row, word) for word in table) for row in prompt)
    rows = len(inputs["input_ids"])
    joined = torch.cat([prompt.expand(rows, -1, -1), table[inputs["input_ids"]]], dim=1)
    labels = torch.cat([torch.full((rows, 4), -100), inputs["labels"]], dim=1)
    mask = torch.cat([torch.ones(rows, 4, dtype=torch.int64), inputs["attention_mask"]], dim=1)
    with torch.no_grad():
        expected = base(inputs_embeds=joined, labels=labels, attention_mask=mask).loss
        torch.testing.assert_close(run.model.eval()(**inputs).loss, expected)


@pytest.mark.parametrize(
    "method", [{"prompt-tuning": {"tokens": 3}}, {"prefix-tuning": {"tokens": 3, "projection": True, "hidden_size": 8}}]
)
def test_virtual_tokens_train_resume_and_load(tmp_path, method):
    run = adapters.trained(tmp_path, method, "gpt2")
    adapters.check_adapter(tmp_path, run, "gpt2")


def test_virtual_tokens_refusals(tmp_path):
    for name in ("prompt-tuning", "prefix-tuning"):
        with pytest.raises(NotApplicable, match=f"{name}: peft puts virtual tokens in front of .*BertForMaskedLM"):
            tiny.trainer(tmp_path, [name], tiny.bert())
        with pytest.raises(NotApplicable, match=rf"methods\.{name}\.tokens=64.*64 positions"):
            tiny.trainer(tmp_path, [{name: {"tokens": 64}}])
        with pytest.raises(InputError, match="tokens must be at least 1"):
            Recipe.parse([{name: {"tokens": 0}}])
    config = DistilBertConfig(vocab_size=64, dim=16, n_layers=1, n_heads=4, hidden_dim=32)
    classifier = DistilBertForSequenceClassification(config)
    with pytest.raises(NotApplicable, match=r"`past_key_values`, and DistilBertForSequenceClassification .* Fix: lora"):
        tiny.trainer(tmp_path, ["prefix-tuning"], classifier)
    with pytest.raises(NotApplicable, match=r"prefix-tuning: a recomputed block"):
        tiny.trainer(tmp_path, ["prefix-tuning"], gradient_checkpointing=True)


# --- prompts for images ---


@pytest.mark.parametrize("deep", [False, True])
def test_visual_prompts_by_hand(deep):
    """[class, prompts, patches] through the blocks; deep prompts take the places of those before."""
    inputs = loops.batch(tiny.vit())
    model: Any = tiny.vit()
    add_visual_prompts(model, 3, deep=deep)
    assert _count(model) == 3 * WIDTH * (LAYERS if deep else 1) + 3 * WIDTH + 3
    _base_is_untouched(model, inputs)
    prompts = model.visual_prompts.tokens.detach()
    assert float(prompts.abs().max()) < (6 / (16 + WIDTH)) ** 0.5
    plain: Any = tiny.vit().eval()
    with torch.no_grad():
        hidden = plain.vit.embeddings(inputs["pixel_values"])
        rows = len(hidden)
        for index, block in enumerate(plain.vit.layers):
            if index == 0:
                hidden = torch.cat([hidden[:, :1], prompts[0].expand(rows, -1, -1), hidden[:, 1:]], dim=1)
            elif deep:
                hidden = torch.cat([hidden[:, :1], prompts[index].expand(rows, -1, -1), hidden[:, 4:]], dim=1)
            hidden = block(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            assert hidden.shape[1] == 1 + 3 + 4
        expected = plain.classifier(plain.vit.layernorm(hidden)[:, 0])
    torch.testing.assert_close(adapters.logits(model, inputs), expected, rtol=1e-5, atol=1e-6)
    again = copy.deepcopy(model)
    again.visual_prompts.tokens.data.zero_()
    assert not torch.equal(adapters.logits(again, inputs), adapters.logits(model, inputs))


@pytest.mark.parametrize("settings", [{"tokens": 2}, {"tokens": 2, "deep": True, "head": False}])
def test_visual_prompts_train_resume_and_load(tmp_path, settings):
    run = adapters.trained(tmp_path, {"visual-prompt": settings}, "vit")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    adapters.check_same(loaded, run.model, loops.batch(tiny.vit()))
    head = run.model.get_parameter("classifier.weight")
    assert torch.equal(head, tiny.vit().get_parameter("classifier.weight")) is (settings.get("head") is False)


def test_visual_prompts_refusals(tmp_path):
    with pytest.raises(NotApplicable, match=r"visual-prompt: LlamaForCausalLM is no vision Transformer"):
        tiny.trainer(tmp_path, ["visual-prompt"])
    with pytest.raises(InputError, match="tokens must be at least 1"):
        Recipe.parse([{"visual-prompt": {"tokens": 0}}])


# --- bottleneck adapters ---


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bottlenecks_start_as_the_identity(family):
    build = tiny.FAMILIES[family]
    inputs = loops.batch(build())
    expected = adapters.logits(build(), inputs)
    model = build()
    add_adapters(model, 4, norms=False, head=False)
    assert torch.equal(adapters.logits(model, inputs), expected)
    assert _count(model) == LAYERS * 2 * (2 * 4 * WIDTH + WIDTH + 4)
    _base_is_untouched(model, inputs)
    adapters.scramble(model)
    assert not torch.allclose(adapters.logits(model, inputs), expected, atol=1e-3)
    half = build()
    add_adapters(half, 4, placement="feed-forward", norms=False, head=False)
    assert _count(half) * 2 == _count(model)
    with_norms = build()
    add_adapters(with_norms, 4)
    names = {name for name, p in with_norms.named_parameters() if p.requires_grad and "houlsby" not in name}
    assert names
    assert all("norm" in name.lower() or "ln_" in name or name.startswith("classifier.") for name in names)


def test_a_bottleneck_stands_before_the_residual_addition():
    model: Any = tiny.llama().eval()
    add_adapters(model, 4)
    adapters.scramble(model, 0.3)
    block = model.model.layers[0]
    seen = {}
    block.mlp.down_proj.register_forward_hook(lambda m, i, o: seen.update(inside=i[0], out=o))
    inputs = loops.batch(model)
    adapters.logits(model, inputs)
    raw = nn.functional.linear(seen["inside"], block.mlp.down_proj.weight)
    adapter = block.houlsby_adapters[1]
    expected = raw + adapter.up(nn.functional.gelu(adapter.down(raw)))
    torch.testing.assert_close(seen["out"], expected)


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_bottlenecks_train_resume_and_load(tmp_path, family):
    run = adapters.trained(tmp_path, {"houlsby-adapter": {"size": 4}}, family)
    auto = AutoModelForMaskedLM if family == "bert" else AutoModelForImageClassification
    inputs = loops.batch(run.model)
    adapters.check_same(auto.from_pretrained(tmp_path / "saved", trust_remote_code=True), run.model, inputs)
    base = adapters.AUTO[family].from_pretrained(tmp_path / "base")
    file = tmp_path / "saved" / "houlsby_adapter.safetensors"
    adapters.check_same(load_adapters(base, str(file), size=4), run.model, inputs)
    assert file.stat().st_size < (tmp_path / "saved" / "model.safetensors").stat().st_size


def test_bottlenecks_refusals():
    with pytest.raises(InputError, match="size must be at least 1"):
        Recipe.parse([{"houlsby-adapter": {"size": 0}}])
    with pytest.raises(InputError, match=r"houlsby-adapter.*rezero|rezero.*houlsby-adapter"):
        Recipe.parse(["houlsby-adapter", "rezero"])


# --- biases ---


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bitfit_trains_biases_only(family):
    build = tiny.FAMILIES[family]
    inputs = loops.batch(build())
    expected = adapters.logits(build(), inputs)
    model = build()
    trained = train_biases(model, head=False)
    assert all(name.endswith("bias") for name in trained)
    assert torch.equal(adapters.logits(model, inputs), expected)
    assert trained == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    _base_is_untouched(model, inputs)
    if family == "llama":
        assert len(trained) == 7 * LAYERS
    else:
        assert trained == sorted(name for name, _ in build().named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("family", ["llama", "vit"])
def test_bitfit_trains_resumes_and_loads(tmp_path, family):
    run = adapters.trained(tmp_path, {"bitfit": {}}, family)
    loaded = adapters.AUTO[family].from_pretrained(tmp_path / "saved")
    adapters.check_same(loaded, run.model, loops.batch(run.model))
    before, after = tiny.weights(tiny.FAMILIES[family]()), tiny.weights(run.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.endswith("bias") or name.startswith("classifier.") for name in changed)
    assert any(after[name].any() for name in after if name.endswith("bias"))


def test_bitfit_refuses_a_model_without_biases(tmp_path):
    from transformers import AutoModelForCausalLM, MistralConfig

    sizes = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    with pytest.raises(NotApplicable, match=r"bitfit: MistralForCausalLM has no biases.* Fix: lora or ia3"):
        tiny.trainer(tmp_path, ["bitfit"], model)
