"""What the methods share that take the norms away or move them: loading, resuming, own loops, refusals; and depth."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    Gemma2Config,
    GPT2LMHeadModel,
)

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.architecture import LINEAR, main_blocks
from thrifty.methods.initialization._branches import norm_free_settings, remove_norms, xavier
from thrifty.methods.initialization.deepnorm import deepnorm
from thrifty.methods.initialization.fixup import fixup
from thrifty.methods.initialization.layerscale import layerscale
from thrifty.methods.initialization.rezero import rezero
from thrifty.methods.initialization.skipinit import skipinit
from thrifty.methods.initialization.t_fixup import t_fixup

METHODS: dict[str, Any] = {
    "fixup": fixup,
    "t-fixup": t_fixup,
    "skipinit": skipinit,
    "layerscale": layerscale,
    "deepnorm": deepnorm,
}
AUTOS: dict[str, Any] = {
    "llama": AutoModelForCausalLM,
    "gpt2": AutoModelForCausalLM,
    "bert": AutoModelForMaskedLM,
    "vit": AutoModelForImageClassification,
}


@pytest.fixture(autouse=True)
def _modules_of_written_code(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def _logits(model: Any) -> torch.Tensor:
    inputs = {key: value for key, value in loops.batch(model).items() if key != "labels"}
    with torch.no_grad():
        return model.eval()(**inputs).logits


def _is_plain(name: str, family: str) -> bool:
    return name == "layerscale" or (name == "deepnorm" and family == "bert")


@pytest.mark.parametrize("family", ["gpt2", "bert", "vit"])
@pytest.mark.parametrize("name", METHODS)
def test_trains_resumes_and_loads(tmp_path, name, family):
    run = loops.resumes(tmp_path, [name], tiny.FAMILIES[family], max_steps=2, step=1)
    run.save_model(str(tmp_path / "saved"))
    plain = _is_plain(name, family)
    assert run.recipe[name].saves_as == ("plain" if plain else "remote_code")
    loaded = AUTOS[family].from_pretrained(tmp_path / "saved", trust_remote_code=not plain)
    torch.testing.assert_close(_logits(loaded), _logits(run.model), rtol=1e-5, atol=1e-6)
    if plain:
        assert {n for n, _ in loaded.named_parameters()} == {n for n, _ in tiny.FAMILIES[family]().named_parameters()}
    else:
        with pytest.raises(ValueError, match="trust_remote_code"):
            AUTOS[family].from_pretrained(tmp_path / "saved", trust_remote_code=False)


@pytest.mark.parametrize(("name", "family"), [("layerscale", "gpt2"), ("layerscale", "vit"), ("deepnorm", "bert")])
def test_what_folds_is_plain_in_between_and_a_checkpoint_has_its_own_code(tmp_path, name, family):
    run = tiny.trainer(
        tmp_path, [name], tiny.FAMILIES[family](), max_steps=1, save_strategy="steps", save_steps=1, warmup_steps=0
    )
    run.finish = lambda: None  # type: ignore[method-assign]  # as if the run were stopped after its first step
    run.train()
    expected, own = _logits(run.model), tiny.weights(run.model)
    assert run.evaluate()["eval_loss"] > 0
    run.save_model(str(tmp_path / "between"))
    tiny.assert_same(tiny.weights(run.model), own)
    assert torch.equal(_logits(run.model), expected)
    between = AUTOS[family].from_pretrained(tmp_path / "between", trust_remote_code=False)
    torch.testing.assert_close(_logits(between), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AUTOS[family].from_pretrained(tmp_path / "checkpoint-1", trust_remote_code=False)
    checkpoint = AUTOS[family].from_pretrained(tmp_path / "checkpoint-1", trust_remote_code=True)
    torch.testing.assert_close(_logits(checkpoint), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_own_loops_agree_and_act(name):
    def make() -> loops.Setup:
        model = tiny.gpt2()
        torch.manual_seed(4)
        METHODS[name](model)
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    _, losses = loops.both_loops(make)
    assert losses != loops.baseline(tiny.gpt2)[1]


@pytest.mark.parametrize("name", ["fixup", "skipinit", "layerscale"])
def test_scalars_do_not_decay(tmp_path, name):
    run = tiny.trainer(tmp_path, [name])
    run.create_optimizer()
    assert run.optimizer is not None
    names = {id(p): n for n, p in run.model.named_parameters()}
    added = {"fixup": ("fixup_bias", "fixup_scale"), "skipinit": ("skipinit_scale",), "layerscale": ("layerscale",)}
    decays = {n: g["weight_decay"] for g in run.optimizer.param_groups for n in (names[id(p)] for p in g["params"])}
    scalars = {n: d for n, d in decays.items() if n.endswith(added[name])}
    assert len(scalars) >= 4
    assert set(scalars.values()) == {0.0}
    assert decays["model.layers.0.mlp.down_proj.weight"] == 0.1


class Custom(GPT2LMHeadModel):
    """A class of the user's own, on which no modelling file can build."""


@pytest.mark.parametrize("name", METHODS)
def test_refused_before_training(tmp_path, name):
    with pytest.raises(NotApplicable, match=rf"{name}: .*Custom is not a public class.* Fix: "):
        tiny.trainer(tmp_path, [name], Custom(tiny.gpt2().config))  # type: ignore[arg-type]
    sandwich = Gemma2Config(vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                            num_attention_heads=4, num_key_value_heads=2, head_dim=4)  # fmt: skip
    with pytest.raises(NotApplicable, match=rf"{name}: .* Fix: use"):
        tiny.trainer(tmp_path, [name], AutoModelForCausalLM.from_config(sandwich))


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("fixup", {"branch_depth": 1}),
        ("t-fixup", {"factor": 0.0}),
        ("skipinit", {"dropout": 1.0}),
        ("layerscale", {"epsilon": -1.0}),
        ("deepnorm", {"alpha": 0.0}),
        ("deepnorm", {"beta": -1.0}),
    ],
)
def test_bad_settings(name, setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Recipe.parse([{name: setting}])


# --- depth ---


def _without_norms(model: nn.Module) -> None:
    """The ordinary way to start a network, and no norms."""
    settings = norm_free_settings(model, "test")
    for block in main_blocks(model, "test"):
        remove_norms(block, settings["norms"])
        for module in block.modules():
            if isinstance(module, LINEAR):
                xavier(module, 1.0)


@functools.cache
def _trained(name: str, rate: float) -> list[float]:
    """The losses of a post-norm model of 32 blocks, 64 branches, without warm-up; they end where they diverge."""
    torch.manual_seed(0)
    model: Any = tiny.bert(32).train()
    {"plain": lambda m: None, "without norms": _without_norms, "rezero": rezero, **METHODS}[name](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    batch, losses = loops.batch(model, size=4), [0.0]
    while len(losses) < 13 and math.isfinite(losses[-1]):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[1:]


@pytest.mark.parametrize("name", ["rezero", "skipinit"])
def test_trains_deep_and_fast_where_a_plain_model_crawls(name):
    plain, ours = _trained("plain", 3e-2), _trained(name, 3e-2)
    assert ours[0] == pytest.approx(plain[0], rel=0.05)
    assert ours[-1] < 0.35 * plain[-1]


def test_fixup_trains_deep_where_a_model_without_norms_diverges():
    assert not math.isfinite(_trained("without norms", 1e-2)[-1])
    ours = _trained("fixup", 1e-2)
    assert ours[-1] < 0.65 * ours[0]
