"""rsLoRA and DoRA, as peft computes them, against the formulas of their papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn

import tiny
from methods import adapters, loops
from thrifty.methods.peft._adapters import add_lora, lora_layers


def _weight(layer: Any) -> torch.Tensor:
    """The frozen weight as (out, in)."""
    weight = layer.get_base_layer().weight.detach()
    return weight if isinstance(layer.get_base_layer(), nn.Linear) else weight.T


def test_the_scale_of_rslora():
    for use, expected in ((False, 2.0), (True, 5.657)):
        model = add_lora(tiny.llama(), r=8, lora_alpha=16, use_rslora=use)
        assert {round(layer.scaling["default"], 3) for layer in lora_layers(model).values()} == {expected}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dora_starts_as_the_identity_and_merges_by_its_formula(family):
    """W' = m (W + s B A) / |W + s B A|, with the norm over the inputs of each output row."""
    build = tiny.FAMILIES[family]
    inputs = loops.batch(build())
    expected = adapters.logits(build(), inputs)
    model = add_lora(build(), r=3, lora_alpha=12, use_dora=True)
    torch.testing.assert_close(adapters.logits(model, inputs), expected, rtol=1e-5, atol=1e-6)
    for layer in lora_layers(model).values():
        magnitude = layer.lora_magnitude_vector["default"].weight
        torch.testing.assert_close(magnitude.flatten(), _weight(layer).norm(dim=1), rtol=1e-5, atol=1e-6)
    adapters.scramble(model)
    changed = adapters.logits(model, inputs)
    plain = build()
    for name, layer in lora_layers(model).items():
        direction = _weight(layer) + 4.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        magnitude = layer.lora_magnitude_vector["default"].weight.flatten()
        merged = (magnitude / direction.norm(dim=1))[:, None] * direction
        with torch.no_grad():
            target = plain.get_parameter(name.removeprefix("base_model.model.") + ".weight")
            target.copy_(merged if isinstance(layer.get_base_layer(), nn.Linear) else merged.T)
    torch.testing.assert_close(adapters.logits(plain, inputs), changed, rtol=1e-4, atol=1e-5)
    merged_model: Any = model.merge_and_unload()  # type: ignore[operator]
    tiny.assert_same(tiny.weights(merged_model), tiny.weights(plain), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_gradient_of_doras_norms(family):
    """At B = 0 it is, row by row, the product of the weight's own gradient with its direction."""
    full = tiny.FAMILIES[family]().train()
    inputs = loops.batch(full)
    full(**inputs).loss.backward()
    model = add_lora(tiny.FAMILIES[family](), r=2, use_dora=True).train()
    model(**inputs).loss.backward()
    for name, layer in lora_layers(model).items():
        gradient = full.get_parameter(name.removeprefix("base_model.model.") + ".weight").grad
        assert gradient is not None
        gradient = gradient if isinstance(layer.get_base_layer(), nn.Linear) else gradient.T
        weight = _weight(layer)
        expected = (gradient * weight / weight.norm(dim=1, keepdim=True)).sum(1)
        found = layer.lora_magnitude_vector["default"].weight.grad.flatten()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_doras_norm_is_a_constant_in_the_backward_pass():
    """The gradient differs from the full derivative exactly by the term of the norm."""
    torch.manual_seed(0)
    base: Any = nn.Sequential(nn.Linear(6, 4, bias=False))
    model: Any = add_lora(base, r=2, lora_alpha=2, target_modules=["0"], use_dora=True)
    adapters.scramble(model)
    layer = model.base_model.model[0]
    x = torch.randn(5, 6)
    model(x).pow(2).sum().backward()
    weight, a = layer.get_base_layer().weight.detach(), layer.lora_A["default"].weight.detach()
    magnitude = layer.lora_magnitude_vector["default"].weight.detach().flatten()[:, None]
    gradients = {}
    for detached in (True, False):
        b = layer.lora_B["default"].weight.detach().clone().requires_grad_()
        direction = weight + b @ a
        norm = direction.norm(dim=1, keepdim=True)
        (x @ (magnitude * direction / (norm.detach() if detached else norm)).T).pow(2).sum().backward()
        gradients[detached] = b.grad
    torch.testing.assert_close(layer.lora_B["default"].weight.grad, gradients[True], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(gradients[True], gradients[False], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("method", "family"), [("rslora", "bert"), ("dora", "gpt2"), ("dora", "vit")])
def test_trains_merges_and_resumes(tmp_path, method, family):
    run = adapters.trained(tmp_path, {method: {"r": 2}}, family)
    assert not isinstance(run.model, PeftModel)
    adapters.check_plain_and_adapter(tmp_path, run, family)


def test_without_merging_peft_loads_it(tmp_path):
    run = adapters.trained(tmp_path, {"dora": {"r": 2, "merge": False}}, "gpt2", resume=False)
    adapters.check_adapter(tmp_path, run, "gpt2")
