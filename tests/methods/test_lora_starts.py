"""PiSSA, OLoRA and LoRA-GA: what they start from, that the function stays, and that the result fits the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import tiny
from methods import adapters, loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.peft._adapters import add_lora, lora_layers
from thrifty.methods.peft._compensated import dense_weight, on_original_base
from thrifty.methods.peft.lora_ga import base_gradients, gradient_start

METHODS = ("pissa", "olora", "lora-ga")


def _prepared(tmp_path, method: str, family: str, **settings: Any) -> Any:
    return tiny.trainer(tmp_path, [{method: {"r": 2, **settings}}], tiny.FAMILIES[family]())


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_the_start_is_the_base_model(tmp_path, method, family):
    inputs = loops.batch(tiny.FAMILIES[family]())
    expected = adapters.logits(tiny.FAMILIES[family](), inputs)
    run = _prepared(tmp_path, method, family)
    torch.testing.assert_close(adapters.logits(run.model, inputs), expected, rtol=1e-5, atol=2e-6)
    for layer in lora_layers(run.model).values():
        small = min(dense_weight(layer).shape) < 4
        assert layer.lora_B["default"].weight.any() or small
        assert not layer.get_base_layer().weight.requires_grad


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("iterations", [None, 8])
def test_pissa_keeps_the_small_singular_values_frozen(tmp_path, family, iterations):
    plain = add_lora(tiny.FAMILIES[family](), r=2)
    run = _prepared(tmp_path, "pissa", family, alpha=6, iterations=iterations)
    for name, layer in lora_layers(run.model).items():
        u, s, v = torch.linalg.svd(dense_weight(lora_layers(plain)[name]), full_matrices=False)
        tail = s[2:].pow(2).sum().sqrt()
        assert dense_weight(layer).norm() == pytest.approx(float(tail), rel=1e-4 if iterations is None else 0.1)
        product = 3.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        if iterations is None:
            torch.testing.assert_close(product, (u[:, :2] * s[:2]) @ v[:2], rtol=1e-3, atol=1e-5)
            both = layer.lora_A["default"].weight.norm(dim=1) / layer.lora_B["default"].weight.norm(dim=0)
            torch.testing.assert_close(both, torch.ones(2), rtol=1e-4, atol=1e-4)


def test_olora_is_orthonormal_and_pefts_own(tmp_path):
    run = _prepared(tmp_path, "olora", "llama")
    theirs = get_peft_model(
        tiny.llama(),
        LoraConfig(r=2, lora_alpha=16, target_modules="all-linear", init_lora_weights="olora"),
    )
    tiny.assert_same(tiny.weights(run.model), tiny.weights(theirs), atol=1e-6)
    for layer in lora_layers(run.model).values():
        b = layer.lora_B["default"].weight.detach()
        torch.testing.assert_close(b.T @ b, torch.eye(2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_gradients_are_those_of_full_training(family):
    full = tiny.FAMILIES[family]().eval()
    batches = list(loops.loader(full, count=4, size=2))
    sum(full(**batch).loss for batch in batches).div(2).backward()
    model = add_lora(tiny.FAMILIES[family](), r=2)
    found = base_gradients(model, lora_layers(model), batches)
    for name, layer in lora_layers(model).items():
        gradient = full.get_parameter(name.removeprefix("base_model.model.") + ".weight").grad
        assert gradient is not None
        torch.testing.assert_close(found[name], gradient.T if layer.fan_in_fan_out else gradient, rtol=1e-4, atol=1e-6)
        assert not layer.get_base_layer().weight.requires_grad
        assert layer.get_base_layer().weight.grad is None


def test_lora_ga_starts_in_the_spans_of_its_paper():
    gradient = torch.randn(12, 9, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    a, b = gradient_start(gradient, r=3, gamma=16.0)
    assert a.shape == (3, 9)
    assert b.shape == (12, 3)
    torch.testing.assert_close(a @ v[:3].T @ v[:3], a, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(u[:, 3:6] @ u[:, 3:6].T @ b, b, rtol=1e-4, atol=1e-5)
    scale = 12**0.25 / 4
    torch.testing.assert_close(a @ a.T, scale**2 * torch.eye(3), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(b.T @ b, scale**2 * torch.eye(3), rtol=1e-4, atol=1e-5)


def test_lora_gas_first_step_follows_the_gradient():
    """By the paper's theorem no other start of rank r gives a first update nearer to the full gradient.

    To first order a step changes the weight by s^2 (B B' G + G A' A).
    """
    gradient = torch.randn(12, 9, generator=torch.Generator().manual_seed(0))
    rank = 2

    def error(a: torch.Tensor, b: torch.Tensor) -> float:
        # The best multiple of the update, since the learning rate is free.
        update = b @ b.T @ gradient + gradient @ a.T @ a
        best = (update * gradient).sum() / update.pow(2).sum()
        return float((best * update - gradient).norm())

    found = error(*gradient_start(gradient, rank, 16.0))
    s = torch.linalg.svdvals(gradient)
    assert found == pytest.approx(float(s[2 * rank :].norm()), rel=1e-4)
    others = torch.Generator().manual_seed(1)
    for _ in range(20):
        a, b = torch.randn(rank, 9, generator=others), torch.randn(12, rank, generator=others)
        assert error(torch.linalg.qr(a.T).Q.T, torch.linalg.qr(b).Q) > found


def test_lora_ga_starts_alike_for_the_same_data(tmp_path):
    first, second = (_prepared(tmp_path, "lora-ga", "llama", batches=2) for _ in range(2))
    tiny.assert_same(tiny.weights(first.model), tiny.weights(second.model))


@pytest.mark.parametrize("rslora", [False, True])
def test_the_difference_is_a_plain_lora_of_twice_the_rank(rslora):
    from thrifty.methods.peft._compensated import factors, start_from

    inputs = loops.batch(tiny.gpt2())
    model = add_lora(tiny.gpt2(), r=2, lora_alpha=6, use_rslora=rslora)
    for layer in lora_layers(model).values():
        q, r = torch.linalg.qr(dense_weight(layer))
        start_from(layer, r[:2], q[:, :2])
    start = factors(model)
    adapters.scramble(model)
    expected = adapters.logits(model, inputs)
    plain = on_original_base(model, start)
    assert plain.peft_config["default"].r == 4
    torch.testing.assert_close(adapters.logits(plain, inputs), expected, rtol=1e-4, atol=1e-5)
    with plain.disable_adapter():
        torch.testing.assert_close(
            adapters.logits(plain, inputs), adapters.logits(tiny.gpt2(), inputs), rtol=1e-5, atol=2e-6
        )


@pytest.mark.parametrize(("method", "family"), [("pissa", "gpt2"), ("olora", "bert"), ("lora-ga", "vit")])
def test_trains_merges_and_resumes(tmp_path, method, family):
    run = adapters.trained(tmp_path, {method: {"r": 2}}, family)
    assert not isinstance(run.model, PeftModel)
    adapters.check_plain_and_adapter(tmp_path, run, family)


@pytest.mark.parametrize(("method", "family"), [("pissa", "vit"), ("lora-ga", "gpt2")])
def test_without_merging_it_fits_the_original_base(tmp_path, method, family):
    run = adapters.trained(tmp_path, {method: {"r": 2, "merge": False}}, family, resume=False)
    adapters.check_adapter(tmp_path, run, family)


def test_resumes_where_another_start_was_found(tmp_path):
    """On another machine the decomposition may have other signs: the saved start decides."""
    run = _prepared(tmp_path, "olora", "llama")
    method = run.recipe["olora"]
    saved = {name: {k: -v for k, v in pair.items()} for name, pair in method.state_dict()["start"].items()}
    saved = {name: {"A": pair["A"] * 2, "B": pair["B"]} for name, pair in saved.items()}
    before = {name: dense_weight(layer).clone() for name, layer in lora_layers(run.model).items()}
    method.load_state_dict({"start": saved})
    method.restore_model(run.model, run.ctx)
    for name, layer in lora_layers(run.model).items():
        a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
        torch.testing.assert_close(dense_weight(layer), before[name] - 8 * b @ a, rtol=1e-4, atol=1e-5)
    assert method.state_dict()["start"] is saved


def test_refusals(tmp_path):
    with pytest.raises(NotApplicable, match=r"methods\.pissa\.r=17.*no layer has as many.* Fix: a smaller r"):
        tiny.trainer(tmp_path, [{"pissa": {"r": 17}}])
    with pytest.raises(NotApplicable, match=r"methods\.lora-ga\.r=9.*needs 18 singular vectors"):
        tiny.trainer(tmp_path, [{"lora-ga": {"r": 9}}])
    for name in ("pissa", "olora", "lora-ga"):
        with pytest.raises(NotApplicable, match=rf"methods\.{name}\.target_modules.*MixtralExperts.*'q_proj'"):
            tiny.trainer(tmp_path, [{name: {"r": 2}}], tiny.mixtral())
        named = tiny.trainer(tmp_path, [{name: {"r": 2, "target_modules": ["q_proj", "v_proj"]}}], tiny.mixtral())
        assert len(lora_layers(named.model)) == 4
    for setting in ({"pissa": {"iterations": 0}}, {"lora-ga": {"batches": 0}}, {"lora-ga": {"gamma": 0}}):
        with pytest.raises(InputError, match=next(iter(next(iter(setting.values()))))):
            Recipe.parse([setting])
    with pytest.raises(InputError, match="'lora' and 'pissa' both want the one slot 'adapter'"):
        Recipe.parse(["lora", "pissa"])
