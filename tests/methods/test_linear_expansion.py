"""Linear expansion: exact folding, the update law of Arora et al., balanced factors, and what is saved when."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.overparameterization.linear_expansion import Expansion, factorize, fold, random_factors, targets


@pytest.fixture(autouse=True)
def _modules_of_written_code(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def _logits(model: Any) -> torch.Tensor:
    inputs = {key: value for key, value in loops.batch(model).items() if key != "labels"}
    with torch.no_grad():
        return model.eval()(**inputs).logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("factors", [2, 3])
def test_the_function_stays_at_the_start_and_after_folding(family, factors):
    model: Any = tiny.FAMILIES[family]().double()
    plain = _logits(model)
    names = {name for name, _ in model.named_parameters()}
    modules = targets(model)
    expansion = Expansion(modules, 1.5, factors)
    assert sum("parametrizations" in name for name, _ in model.named_parameters()) == factors * len(modules)
    torch.testing.assert_close(_logits(model), plain, rtol=0, atol=1e-12)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    trained = _logits(model)
    assert (trained - plain).abs().max() > 1e-3
    own = tiny.weights(model)
    with expansion.folded():
        assert {name for name, _ in model.named_parameters()} == names
        torch.testing.assert_close(_logits(model), trained, rtol=0, atol=1e-12)
    tiny.assert_same(tiny.weights(model), own)
    expansion.fold()
    assert {name for name, _ in model.named_parameters()} == names
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    torch.testing.assert_close(_logits(model), trained, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
def test_factors_are_balanced_and_full(shape):
    weight = torch.randn(shape, dtype=torch.float64)
    for count in (2, 3, 4):
        factors = factorize(weight, 12, count)
        assert [tuple(f.shape) for f in factors] == [(shape[0], 12), *[(12, 12)] * (count - 2), (12, shape[1])]
        torch.testing.assert_close(fold(factors), weight)
        for above, below in itertools.pairwise(factors):
            torch.testing.assert_close(above.mT @ above, below @ below.mT)


def test_factors_drawn_anew_have_the_variance():
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(256, 512)
    for count in (2, 3):
        factors = random_factors(weight, 512, count)
        assert abs(float(fold(factors).std() / weight.std()) - 1) < 0.03
        assert abs(float(torch.corrcoef(torch.stack([fold(factors).flatten(), weight.flatten()]))[0, 1])) < 0.02


def test_update_law_of_two_balanced_factors():
    """One step of gradient descent on the factors moves the product as the paper says, to second order in the rate:
    W - eta * (sqrt(W W') G + G sqrt(W' W)), and the factors stay balanced to second order."""
    torch.manual_seed(0)
    start, data, goal = (torch.randn(s, dtype=torch.float64) for s in ((4, 6), (6, 20), (4, 20)))
    errors, drifts = [], []
    for eta in (1e-4, 1e-5, 1e-6):
        layer = nn.Linear(6, 4, bias=False).double()
        layer.weight.data.copy_(start)
        expansion = Expansion({"layer": layer}, 2.0)
        loss = (layer(data.T).T - goal).square().mean()
        loss.backward()
        gradient = torch.autograd.grad(((w := start.clone().requires_grad_(True)) @ data - goal).square().mean(), w)[0]
        torch.optim.SGD(layer.parameters(), lr=eta).step()
        u, s, v = torch.linalg.svd(start, full_matrices=False)
        left, right = u @ torch.diag(s) @ u.T, v.T @ torch.diag(s) @ v
        law = start - eta * (left @ gradient + gradient @ right)
        factors: Any = [f.detach() for f in layer.parametrizations.weight.parameters()]  # type: ignore[union-attr]
        errors.append(float((fold(factors) - law).abs().max()))
        drifts.append(float((factors[0].T @ factors[0] - factors[1] @ factors[1].T).norm()))
        expansion.fold()
    for sizes in (errors, drifts):
        assert sizes[0] / sizes[1] == pytest.approx(100, rel=0.2)
        assert sizes[1] / sizes[2] == pytest.approx(100, rel=0.2)


def test_targets_are_split_by_place():
    for family, build in tiny.FAMILIES.items():
        model = build()
        everything, attention, ffn = (set(targets(model, which)) for which in ("all", "attention", "ffn"))
        assert attention | ffn == everything, family
        assert not attention & ffn
        assert len(ffn) == (6 if family == "llama" else 4)


def test_own_loops_agree_and_act():
    def make() -> loops.Setup:
        model = tiny.gpt2()
        Expansion(targets(model), 1.5)
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    setup, losses = loops.both_loops(make)
    plain = loops.baseline(tiny.gpt2)[1]
    assert losses[0] == pytest.approx(plain[0], rel=1e-5)
    assert losses[1:] != plain[1:]
    assert any("parametrizations" in name for name, _ in setup.model.named_parameters())


@pytest.mark.parametrize("family", ["gpt2", "bert", "vit"])
def test_trains_resumes_and_ends_as_the_plain_architecture(tmp_path, family):
    build = tiny.FAMILIES[family]
    run = loops.resumes(tmp_path, [{"linear-expansion": {"rate": 1.5}}], build)
    run.model.save_pretrained(tmp_path / "saved")
    loaded = type(build()).from_pretrained(tmp_path / "saved")
    tiny.assert_same(tiny.weights(loaded), tiny.weights(run.model))
    assert tiny.weights(loaded).keys() == tiny.weights(build()).keys()


@pytest.mark.parametrize(("family", "auto"), [("gpt2", AutoModelForCausalLM), ("vit", AutoModelForImageClassification)])
def test_a_checkpoint_loads_by_its_own_code_and_a_save_in_between_is_plain(tmp_path, family, auto):
    run = tiny.trainer(
        tmp_path, [{"linear-expansion": {"rate": 1.5}}], tiny.FAMILIES[family](), save_strategy="steps", save_steps=1,
        max_steps=1,
    )  # fmt: skip
    run.finish = lambda: None  # type: ignore[method-assign]  # as if the run were stopped after its first step
    run.train()
    expected = _logits(run.model)
    names = {name for name, _ in run.model.named_parameters()}
    run.save_model(str(tmp_path / "between"))
    assert {name for name, _ in run.model.named_parameters()} == names
    plain = auto.from_pretrained(tmp_path / "between", trust_remote_code=False)
    torch.testing.assert_close(_logits(plain), expected, rtol=1e-4, atol=1e-5)
    checkpoint = tmp_path / "checkpoint-1"
    with pytest.raises(ValueError, match="trust_remote_code"):
        auto.from_pretrained(checkpoint, trust_remote_code=False)
    loaded = auto.from_pretrained(checkpoint, trust_remote_code=True)
    torch.testing.assert_close(_logits(loaded), expected, rtol=1e-5, atol=1e-6)
    assert run.evaluate()["eval_loss"] > 0


def test_copies_of_a_block_have_factors_of_their_own(tmp_path):
    run = loops.resumes(
        tmp_path,
        [{"stacking": {"start_layers": 1, "boundaries": [0.5]}}, {"linear-expansion": {"rate": 1.5}}],
        tiny.llama,
        max_steps=4,
        step=3,
    )
    assert len(run.model.model.layers) == 2
    tiny.assert_same(tiny.weights(copy.deepcopy(run.model)), tiny.weights(run.model))


def test_refused_before_training(tmp_path):
    with pytest.raises(NotApplicable, match=r"linear-expansion: no linear layer.* Fix: unfreeze"):
        tiny.trainer(tmp_path, ["linear-expansion"], tiny.llama().requires_grad_(False))


@pytest.mark.parametrize("setting", [{"rate": 0.5}, {"factors": 1}, {"init": "no"}, {"targets": "no"}])
def test_bad_settings(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Recipe.parse([{"linear-expansion": setting}])
