"""QLoRA and LoftQ: the four-bit format, the algebra of the adapters on it, and the way back to dense weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn

import tiny
from methods import adapters, loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.peft._adapters import add_lora, lora_layers
from thrifty.methods.peft._four_bit import dequantised, quantise, quantised_bytes, restore
from thrifty.methods.peft._nf4 import normal_float_codes, round_to_nf4
from thrifty.methods.peft.loftq import loftq_start
from thrifty.methods.peft.qlora import add_qlora, merge_qlora

pytest.importorskip("bitsandbytes")

PAPER = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0]
PAPER += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1]


def test_the_codes_are_those_of_the_paper():
    torch.testing.assert_close(normal_float_codes(), torch.tensor(PAPER), rtol=0, atol=6e-5)


def test_the_error_on_normal_numbers():
    numbers = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    assert float((round_to_nf4(numbers) - numbers).abs().mean()) == pytest.approx(0.073, abs=0.001)


@pytest.mark.parametrize("shape", [(6, 64), (80, 96), (8, 16), (5, 6)])
def test_the_weights_in_four_bits_are_those_of_the_formula(shape):
    """Also where a row is no multiple of the block, which the library's kernels for CPUs get wrong."""
    model: Any = nn.Module()
    linear = nn.Linear(shape[1], shape[0])
    model.layers = nn.ModuleList([nn.Sequential(linear, nn.Linear(2, 2))])
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    linear.weight.data.copy_(weight)
    quantise(model, "test", double=False)
    found = dequantised(model.layers[0][0])
    torch.testing.assert_close(round_to_nf4(weight), found, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(round_to_nf4(found), found, rtol=1e-6, atol=1e-7)
    x = torch.randn(2, 3, shape[1], requires_grad=True)
    y = model.layers[0][0](x)
    torch.testing.assert_close(y, nn.functional.linear(x, found, linear.bias))
    y.sum().backward()
    torch.testing.assert_close(x.grad, found.sum(0).expand_as(x))


@pytest.mark.parametrize("double", [True, False])
def test_the_bytes_of_a_weight(double):
    """The formula, the real tensors, and what the dry run takes on."""
    model, planned = tiny.llama(), tiny.llama().to("meta")
    shapes = {n: p.shape for n, p in model.named_parameters()}
    names = quantise(model, "test", double=double)
    quantise(planned, "test", double=double, planning=True)
    assert len(names) == 14
    for name in names:
        state = model.get_submodule(name).weight.quant_state
        tensors = [model.get_submodule(name).weight, state.absmax, state.code]
        tensors += [state.offset, state.state2.absmax, state.state2.code] if double else []
        real = sum(t.numel() * t.element_size() for t in tensors)
        layer = planned.get_submodule(name)
        fake = sum(t.numel() * t.element_size() for t in [*layer.parameters(), *layer.buffers()])
        assert real == fake == quantised_bytes(shapes[f"{name}.weight"].numel(), double)
    bits = 8 * quantised_bytes(1 << 26, double) / (1 << 26)
    assert bits == pytest.approx(4.127 if double else 4.5, abs=1e-3)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gradients_are_those_of_the_dequantised_model(family):
    build = tiny.FAMILIES[family]
    inputs = loops.batch(build())
    model, dense = build(), build()
    torch.manual_seed(0)
    model = add_qlora(model, r=2)
    quantise(dense, "test")
    restore(dense, {})
    assert not torch.equal(adapters.logits(dense, inputs), adapters.logits(build(), inputs))
    torch.manual_seed(0)
    reference = add_lora(dense, r=2)
    for trained in (model, reference):
        adapters.scramble(trained)
        trained.train()
        trained(**inputs).loss.backward()
    theirs = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    ours = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
    merged = merge_qlora(model)
    torch.testing.assert_close(
        adapters.logits(merged, inputs), adapters.logits(reference, inputs), rtol=1e-4, atol=1e-5
    )
    assert merged.state_dict().keys() == build().state_dict().keys()


def test_what_a_model_keeps_in_full_precision_stays(tmp_path):
    """T5's code reads the data type of `wo`; transformers does not quantise it either."""
    model = tiny.t5()
    names = quantise(model, "test")
    assert names
    assert not any(name.endswith(".wo") for name in names)
    assert type(model.encoder.block[0].layer[1].DenseReluDense.wo) is torch.nn.Linear
    run = tiny.trainer(tmp_path, [{"qlora": {"r": 2, "alpha": 4}}], tiny.t5(), max_steps=2)
    run.train()
    assert all(torch.isfinite(torch.tensor(tiny.losses(run))))


def test_merging_into_the_original_weights_would_be_wrong():
    """The adapter learned on rounded weights: this is why `merge` adds to those."""
    inputs = loops.batch(tiny.llama())
    model = add_qlora(tiny.llama(), r=2)
    adapters.scramble(model)
    expected = adapters.logits(model, inputs)
    original = tiny.llama()
    with torch.no_grad():
        for name, layer in lora_layers(model).items():
            change = layer.get_delta_weight("default")
            original.get_parameter(name.removeprefix("base_model.model.") + ".weight").add_(change)
    wrong = float((adapters.logits(original, inputs) - expected).abs().max())
    right = float((adapters.logits(merge_qlora(model), inputs) - expected).abs().max())
    assert right < 1e-5 < 1e-3 < wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merged_weights_have_the_precision_of_the_base(dtype):
    model = add_qlora(tiny.gpt2().to(dtype), r=2)
    merged = merge_qlora(model)
    assert {p.dtype for p in merged.parameters()} == {dtype}


def test_evaluation_does_not_stop_training():
    """On some CPUs bitsandbytes repacks weights in evaluation, after which no gradient comes back."""
    model = add_qlora(tiny.llama(), r=2)
    inputs = loops.batch(tiny.llama())
    adapters.logits(model, inputs)
    model.train()
    model(**inputs).loss.backward()
    first = next(p for n, p in model.named_parameters() if "layers.0" in n and "lora_B" in n)
    assert first.grad is not None
    assert first.grad.any()


@pytest.mark.parametrize("family", ["gpt2", "vit"])
def test_qlora_trains_merges_and_resumes(tmp_path, family):
    run = adapters.trained(tmp_path, {"qlora": {"r": 2}}, family, eval_strategy="steps", eval_steps=1)
    assert not [m for m in run.model.modules() if "bit" in type(m).__name__.lower()]
    inputs = loops.batch(run.model)
    loaded = adapters.AUTO[family].from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(
        adapters.logits(loaded, inputs), adapters.logits(run.model, inputs), rtol=1e-4, atol=1e-5
    )
    # The adapter beside it belongs to the base in four bits.
    base = adapters.AUTO[family].from_pretrained(tmp_path / "base")
    quantise(base, "test")
    restore(base, {})
    with_adapter = PeftModel.from_pretrained(base, str(tmp_path / "saved" / "adapter"))
    adapters.check_same(with_adapter, run.model, inputs)


def test_an_unmerged_adapter_fits_the_base_that_transformers_quantises(tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

    sizes = {"vocab_size": tiny.VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=2))
    model.save_pretrained(tmp_path / "base")
    methods = [{"qlora": {"r": 2, "merge": False}}]
    run = tiny.trainer(tmp_path / "run", methods, model, max_steps=2, learning_rate=0.05)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config, device_map="cpu")
    for layer in base.modules():
        layer.support_avx512bf16_for_cpu = False  # those kernels compute in bfloat16 whatever is asked for
    inputs = loops.batch(model)
    assert not torch.allclose(adapters.logits(base, inputs), adapters.logits(run.model, inputs), atol=1e-3)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "saved"))
    adapters.check_same(loaded, run.model, inputs)


def test_bf16_decides_the_products(tmp_path):
    run = tiny.trainer(tmp_path, ["qlora", "bf16"], tiny.llama(), max_steps=1)
    assert {m.compute_dtype for m in run.model.modules() if hasattr(m, "original")} == {torch.bfloat16}
    run.train()
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(NotApplicable, match=r"methods\.qlora\.paged.*unified memory.* Fix: remove"):
        tiny.trainer(tmp_path, [{"qlora": {"paged": True}}])
    with pytest.raises(NotApplicable, match=r"'muon' is in the list"):
        tiny.trainer(tmp_path, [{"qlora": {"paged": True}}, "muon"])
    with pytest.raises(InputError, match="compute_dtype"):
        Recipe.parse([{"qlora": {"compute_dtype": "int8"}}])
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(NotApplicable, match=r"qlora: needs bitsandbytes.* Fix: pip install thrifty\[quant\]"):
        tiny.trainer(tmp_path, ["qlora"])


# --- LoftQ ---


def test_loftq_is_nearer_than_rounding_alone():
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(2))
    plain = (weight - round_to_nf4(weight)).norm()
    errors = []
    for steps in (1, 2, 5, 10):
        q, a, b = loftq_start(weight, 6, steps)
        torch.testing.assert_close(round_to_nf4(q), q, rtol=1e-5, atol=1e-6)
        errors.append(float((weight - q - b @ a).norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < float(plain)
    assert errors[-1] < errors[0]


@pytest.mark.parametrize("family", ["gpt2", "vit"])
def test_loftq_in_four_bits_is_loftq_in_dense(tmp_path, family):
    build = tiny.FAMILIES[family]
    inputs = loops.batch(build())
    runs = [
        tiny.trainer(tmp_path, [{"loftq": {"r": 3, "alpha": 12, "storage": storage}}], build())
        for storage in ("dense", "4bit")
    ]
    dense, packed = (adapters.logits(run.model, inputs) for run in runs)
    torch.testing.assert_close(packed, dense, rtol=1e-4, atol=1e-5)
    inside: Any = [m for m in runs[1].model.modules() if hasattr(m, "original")]
    for linear, layer in zip(inside, [m for n, m in lora_layers(runs[0].model).items() if _in_block(n)], strict=True):
        weight = layer.get_base_layer().weight
        weight = weight if isinstance(layer.get_base_layer(), nn.Linear) else weight.T
        torch.testing.assert_close(dequantised(linear), weight.detach(), rtol=1e-5, atol=1e-6)
    quantised = build()
    quantise(quantised, "test", double=False)
    plain = adapters.logits(restore(quantised, {}), inputs)
    expected = adapters.logits(build(), inputs)
    assert (dense - expected).norm() < (plain - expected).norm()


def _in_block(name: str) -> bool:
    return ".layer" in name or ".h." in name


def test_layers_without_adapters_are_rounded_too(tmp_path):
    methods = [{"loftq": {"r": 2, "target_modules": ["q_proj"], "storage": "dense"}}]
    run = tiny.trainer(tmp_path, methods, tiny.llama())
    found = run.model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.weight")
    original = tiny.llama().get_parameter("model.layers.0.mlp.up_proj.weight").detach()
    torch.testing.assert_close(found, round_to_nf4(original))


def test_loftq_trains_merges_and_resumes(tmp_path):
    run = adapters.trained(tmp_path, {"loftq": {"r": 2}}, "gpt2")
    inputs = loops.batch(run.model)
    loaded = adapters.AUTO["gpt2"].from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(
        adapters.logits(loaded, inputs), adapters.logits(run.model, inputs), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("family", "storage"), [("gpt2", "4bit"), ("vit", "dense")])
def test_an_unmerged_loftq_brings_its_base(tmp_path, family, storage):
    method = {"loftq": {"r": 2, "merge": False, "storage": storage}}
    run = adapters.trained(tmp_path, method, family, resume=False)
    base = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["base_model_name_or_path"]
    loaded = PeftModel.from_pretrained(adapters.AUTO[family].from_pretrained(base), str(tmp_path / "saved"))
    inputs = loops.batch(tiny.FAMILIES[family]())
    torch.testing.assert_close(
        adapters.logits(loaded, inputs), adapters.logits(run.model, inputs), rtol=1e-4, atol=2e-5
    )
