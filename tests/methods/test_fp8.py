"""fp8: the format's own error bounds, one layer against high precision, and a model that loads plain afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.precision import fp8
from thrifty.methods.precision.fp8 import from_fp8, to_fp8

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


@pytest.mark.parametrize(("dtype", "bound", "largest"), [("float8_e4m3fn", 2**-4, 448), ("float8_e5m2", 2**-3, 57344)])
def test_error_bounds_of_the_formats(dtype, bound, largest):
    kind = getattr(torch, dtype)
    assert torch.finfo(kind).max == largest
    values = torch.rand(20_000, generator=torch.Generator().manual_seed(1)) * 100 + 0.1
    error = (values.to(kind).float() - values).abs() / values
    assert bound / 2 < error.max() <= bound


def test_the_largest_value_maps_to_the_largest_number():
    from torchao.float8.float8_utils import tensor_to_amax, to_fp8_saturated

    values = torch.randn(64, generator=torch.Generator().manual_seed(2))
    scaled = values * (448 / tensor_to_amax(values))
    assert to_fp8_saturated(scaled, torch.float8_e4m3fn).float().abs().max() == 448


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_layer_against_high_precision(recipe):
    """Measured on Gaussian data: 3.7 % of the output, 5.3 and 5.9 % of the two gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 256, bias=False))
    low = nn.Sequential(nn.Linear(256, 256, bias=False))
    low.load_state_dict(plain.state_dict())
    assert to_fp8(low, recipe=recipe, smallest=256, emulate=True) == ["0"]
    x = torch.randn(256, 256)
    upstream = torch.randn(256, 256)
    results = []
    for model in (plain, low):
        inputs = x.clone().requires_grad_()
        output = model(inputs)
        output.backward(upstream)
        results.append((output.detach(), inputs.grad, model[0].weight.grad))
    for exact, found in zip(*results, strict=True):
        error = (found - exact).norm() / exact.norm()
        assert 0 < error < 0.08 or (recipe == "rowwise_with_gw_hp" and torch.equal(found, exact))


def test_layers_are_filtered_by_shape_and_the_head_stays():
    model = nn.ModuleDict({"odd": nn.Linear(24, 32), "small": nn.Linear(16, 64), "good": nn.Linear(32, 64)})
    assert to_fp8(model, smallest=32, emulate=True) == ["good"]
    language = tiny.llama()
    names = to_fp8(language, smallest=16, emulate=True)
    assert "lm_head" not in names
    assert "model.layers.0.self_attn.k_proj" not in names  # 8 outputs
    assert "model.layers.1.mlp.down_proj" in names
    assert list(language.state_dict()) == list(tiny.llama().state_dict())


def test_the_way_back():
    model, plain = tiny.bert(), tiny.bert()
    names = to_fp8(model, smallest=16, emulate=True)
    assert from_fp8(model) == len(names) > 0
    batch = loops.batch(plain)
    assert torch.equal(model.eval()(**batch).logits, plain.eval()(**batch).logits)
    assert {type(model.get_submodule(name)) for name in names} == {nn.Linear}


@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
def test_families_train_and_resume(tmp_path, family):
    run = loops.resumes(tmp_path, [{"fp8": {"smallest": 16}}], tiny.FAMILIES[family])
    facts = run.recipe["fp8"].facts()
    assert facts["layers in fp8"] == len(run.recipe["fp8"].layers) > 0
    assert "no fp8 units" in facts["emulated"]


def test_with_bf16_lora_and_checkpointing(tmp_path):
    for index, others in enumerate((["bf16", "gradient-checkpointing"], ["bf16-pure"], [{"lora": {"r": 2}}])):
        run = tiny.trainer(tmp_path / str(index), [{"fp8": {"smallest": 16}}, *others], tiny.llama(), max_steps=2)
        run.train()
        plain = tiny.trainer(tmp_path / f"p{index}", others, tiny.llama(), max_steps=2)
        plain.train()
        assert tiny.losses(run) != tiny.losses(plain)
        assert tiny.losses(run) == pytest.approx(tiny.losses(plain), rel=0.01)


def test_own_loops_agree():
    def make() -> loops.Setup:
        model = tiny.llama()
        to_fp8(model, smallest=16, emulate=True)
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    loops.both_loops(make)


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(NotApplicable, match="no linear layer"):
        tiny.trainer(tmp_path, ["fp8"], tiny.llama())
    with pytest.raises(NotApplicable, match="no linear layer"):  # its layers are of a class of their own
        tiny.trainer(tmp_path, [{"fp8": {"smallest": 16}}], tiny.gpt2())
    with pytest.raises(InputError, match="smallest"):
        Recipe.parse([{"fp8": {"smallest": 8}}])
    with pytest.raises(InputError, match="fp16"):
        Recipe.parse(["fp8", "fp16"])
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotApplicable, match=r"pip install thrifty\[quant\]"):
        to_fp8(tiny.llama(), smallest=16)
