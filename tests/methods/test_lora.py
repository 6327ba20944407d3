"""LoRA: the algebra of the adapters, what is frozen, and what is saved in which form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe, tasks
from thrifty.methods.peft.lora import add_lora

AUTO: dict[str, Any] = {
    "llama": AutoModelForCausalLM,
    "gpt2": AutoModelForCausalLM,
    "bert": AutoModelForMaskedLM,
    "vit": AutoModelForImageClassification,
}


def _logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs).logits


def _layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _scramble(model: nn.Module) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_start_is_the_identity_and_the_base_is_frozen(family):
    plain = tiny.FAMILIES[family]()
    inputs = loops.batch(plain)
    expected = _logits(plain, inputs)
    model = add_lora(tiny.FAMILIES[family](), r=2)
    assert torch.equal(_logits(model, inputs), expected)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("r", [2, 5])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_number_of_parameters(family, r):
    model = add_lora(tiny.FAMILIES[family](), r=r)
    expected = sum(r * sum(layer.get_base_layer().weight.shape) for layer in _layers(model).values())
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected > 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_first_gradients(family):
    """At B = 0: nothing for A, and scale * dW A' for B, with dW from training the weight itself."""
    full = tiny.FAMILIES[family]().train()
    inputs = loops.batch(full)
    full(**inputs).loss.backward()
    model = add_lora(tiny.FAMILIES[family](), r=2, lora_alpha=6).train()
    model(**inputs).loss.backward()
    for name, layer in _layers(model).items():
        weight = full.get_parameter(name.removeprefix("base_model.model.") + ".weight")
        assert weight.grad is not None
        # GPT-2's Conv1D keeps its weight as (in, out).
        gradient = weight.grad if isinstance(layer.get_base_layer(), nn.Linear) else weight.grad.T
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert not a.grad.any()
        torch.testing.assert_close(b.grad, 6 / 2 * gradient @ a.detach().T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_merging_is_the_sum_by_hand(family, rslora):
    model = add_lora(tiny.FAMILIES[family](), r=4, lora_alpha=16, use_rslora=rslora)
    _scramble(model)
    inputs = loops.batch(tiny.FAMILIES[family]())
    expected = _logits(model, inputs)
    scale = 16 / 4**0.5 if rslora else 16 / 4
    plain = tiny.FAMILIES[family]()
    for name, layer in _layers(model).items():
        delta = scale * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        if not isinstance(layer.get_base_layer(), nn.Linear):
            delta = delta.T
        with torch.no_grad():
            plain.get_parameter(name.removeprefix("base_model.model.") + ".weight").add_(delta)
    torch.testing.assert_close(_logits(plain, inputs), expected, rtol=1e-4, atol=1e-5)
    merged: Any = model.merge_and_unload()  # type: ignore[operator]
    torch.testing.assert_close(_logits(merged, inputs), expected, rtol=1e-4, atol=1e-5)
    tiny.assert_same(tiny.weights(merged), tiny.weights(plain), atol=1e-6)


def test_unmerging_restores_the_weights():
    model: Any = add_lora(tiny.gpt2(), r=4)
    _scramble(model)
    before = {name: layer.get_base_layer().weight.detach().clone() for name, layer in _layers(model).items()}
    model.merge_adapter()
    assert any(not torch.equal(layer.get_base_layer().weight, before[n]) for n, layer in _layers(model).items())
    model.unmerge_adapter()
    after = {name: layer.get_base_layer().weight.detach() for name, layer in _layers(model).items()}
    tiny.assert_same(after, before, atol=1e-6)


def test_full_rank_reaches_any_change():
    linear: Any = nn.Sequential(nn.Linear(6, 4, bias=False))
    change = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    model: Any = add_lora(linear, r=4, lora_alpha=4, target_modules=["0"])
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    with torch.no_grad():
        model.base_model.model[0].lora_B["default"].weight.copy_(u * s)
        model.base_model.model[0].lora_A["default"].weight.copy_(v)
        x = torch.randn(5, 6)
        torch.testing.assert_close(model(x), x @ (linear[0].weight + change).T, rtol=1e-4, atol=1e-5)


def test_own_loops_agree_and_act():
    def make() -> loops.Setup:
        model = add_lora(tiny.gpt2(), r=2)
        trained = [p for p in model.parameters() if p.requires_grad]
        return loops.Setup(model, torch.optim.AdamW(trained, lr=5e-2))

    setup, losses = loops.both_loops(make)
    assert losses != loops.baseline(tiny.gpt2)[1]
    before, after = tiny.weights(add_lora(tiny.gpt2(), r=2)), tiny.weights(setup.model)
    assert all(torch.equal(before[n], after[n]) for n in before if "lora_" not in n)
    assert all(after[n].any() for n in after if "lora_B" in n)


# --- in the trainer ---


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trains_merges_and_resumes(tmp_path, family):
    """The merged model loads as any other, and the adapter beside it gives the same on the base model."""
    build = tiny.FAMILIES[family]
    base = tmp_path / "base"
    build().save_pretrained(base)  # type: ignore[operator]
    run = loops.resumes(
        tmp_path,
        [{"lora": {"r": 2}}],
        build,
        learning_rate=0.05,
        eval_strategy="steps",
        eval_steps=1,
        prediction_loss_only=True,
    )
    assert len([row["eval_loss"] for row in run.state.log_history if "eval_loss" in row]) == 3
    assert not isinstance(run.model, PeftModel)
    run.save_model(str(tmp_path / "saved"))
    inputs = loops.batch(run.model)
    expected = _logits(run.model, inputs)
    assert not torch.equal(expected, _logits(build(), inputs))
    loaded = AUTO[family].from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(_logits(loaded, inputs), expected, rtol=1e-4, atol=1e-5)
    with_adapter = PeftModel.from_pretrained(AUTO[family].from_pretrained(base), str(tmp_path / "saved" / "adapter"))
    torch.testing.assert_close(_logits(with_adapter, inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_without_merging_peft_loads_it(tmp_path, family):
    build = tiny.FAMILIES[family]
    build().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    run = tiny.trainer(tmp_path / "run", [{"lora": {"r": 2, "merge": False}}], build(), max_steps=3, learning_rate=0.05)
    assert run.recipe["lora"].saves_as == "peft"
    run.train()
    assert isinstance(run.model, PeftModel)
    run.save_model(str(tmp_path / "saved"))
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "model.safetensors" not in files
    inputs = loops.batch(build())
    loaded = PeftModel.from_pretrained(AUTO[family].from_pretrained(tmp_path / "base"), str(tmp_path / "saved"))
    torch.testing.assert_close(_logits(loaded, inputs), _logits(run.model, inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_evaluation_reports_a_loss(tmp_path, family, merge):
    """The wrapper hides the name `labels` in its signature. Before, during and after training."""
    run = tiny.trainer(tmp_path, [{"lora": {"merge": merge}}], tiny.FAMILIES[family](), max_steps=1)
    plain = tiny.trainer(tmp_path / "plain", [], tiny.FAMILIES[family]())
    assert run.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    run.train()
    assert run.evaluate()["eval_loss"] > 0


def test_a_new_head_is_trained_and_saved(tmp_path):
    """`modules_to_save`: in the merged model, and in the adapter."""
    tiny.vit().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    methods = [{"lora": {"r": 2, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]}}]
    run = tiny.trainer(tmp_path / "run", methods, tiny.vit(), max_steps=3, learning_rate=0.05)
    run.train()
    head = run.model.get_parameter("classifier.weight")
    assert not torch.equal(head, tiny.vit().get_parameter("classifier.weight"))
    run.save_model(str(tmp_path / "saved"))
    inputs = loops.batch(run.model)
    base = AutoModelForImageClassification.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "saved" / "adapter"))
    torch.testing.assert_close(_logits(loaded, inputs), _logits(run.model, inputs), rtol=1e-4, atol=1e-5)


def test_the_optimizer_holds_adapters_only(tmp_path):
    run = tiny.trainer(tmp_path, ["lora"], tiny.gpt2(), max_steps=1)
    adapters = sum(p.numel() for name, p in run.model.named_parameters() if "lora_" in name)
    run.train()
    inner: Any = run.ctx.optimizer
    assert sum(p.numel() for group in inner.param_groups for p in group["params"]) == adapters
    base = tiny.weights(tiny.gpt2())
    assert torch.equal(run.model.get_parameter("transformer.wte.weight"), base["transformer.wte.weight"])


def test_dropout_is_off_when_merged(tmp_path):
    run = tiny.trainer(tmp_path, [{"lora": {"dropout": 0.5}}], tiny.llama(), max_steps=2, learning_rate=0.05)
    run.train()
    inputs = loops.batch(run.model)
    run.model.train()
    with torch.no_grad():
        assert torch.equal(run.model(**inputs).logits, run.model(**inputs).logits)


def test_conflicts_and_refusals(tmp_path):
    with pytest.raises(NotApplicable, match=r"lora: the model has adapters already.* Fix: "):
        tiny.trainer(tmp_path, ["lora"], add_lora(tiny.llama()))
    with pytest.raises(
        NotApplicable, match=r"methods\.lora\.target_modules=.*nothing_like_it.*lora: .* Fix: name linear"
    ):
        tiny.trainer(tmp_path, [{"lora": {"target_modules": ["nothing_like_it"]}}])
    for other in ("rezero", "rigl", "stacking"):
        with pytest.raises(InputError, match=f"lora.*{other}|{other}.*lora"):
            Recipe.parse(["lora", other])


@pytest.mark.parametrize("setting", [{"r": 0}, {"alpha": 0}, {"dropout": 1.0}, {"dropout": -0.1}])
def test_bad_settings(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Recipe.parse([{"lora": setting}])


def test_the_task_reaches_peft(tmp_path):
    run = tiny.trainer(tmp_path, [{"lora": {"merge": False}}], tiny.llama(), max_steps=1)
    run.ctx.task = tasks.get("causal-lm")
    model: Any = run.recipe["lora"].prepare_model(tiny.llama(), run.ctx)
    assert model.peft_config["default"].task_type == "CAUSAL_LM"
