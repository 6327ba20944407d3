"""`key=value` on the command line."""

from __future__ import annotations

import pytest

from thrifty.config.overrides import apply_overrides
from thrifty.errors import InputError


def test_values_are_typed_and_the_original_is_left_alone() -> None:
    original = {"model_config": {"hidden_size": 8}, "methods": ["lora", "packing"]}
    changed = apply_overrides(
        original, ["model_config.hidden_size=16", "bf16=true", "learning_rate=1e-4", "methods.lora.r=4"]
    )
    assert changed == {
        "model_config": {"hidden_size": 16},
        "methods": [{"lora": {"r": 4}}, "packing"],
        "bf16": True,
        "learning_rate": 1e-4,
    }
    assert original == {"model_config": {"hidden_size": 8}, "methods": ["lora", "packing"]}


def test_an_equals_sign_may_stand_in_the_value() -> None:
    assert apply_overrides({}, ["optim_args=betas=(0.9,0.95)"]) == {"optim_args": "betas=(0.9,0.95)"}


def test_settings_add_to_those_that_are_there() -> None:
    changed = apply_overrides({"methods": [{"lora": {"r": 4}}]}, ["methods.lora.lora_alpha=8"])
    assert changed == {"methods": [{"lora": {"r": 4, "lora_alpha": 8}}]}


def test_an_empty_value_is_null() -> None:
    assert apply_overrides({"vocab_size": 300}, ["vocab_size="]) == {"vocab_size": None}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learning_rate"], "key=value"),
        (["=3"], "key=value"),
        (["a..b=3"], "key=value"),
        (["seed=1", "seed=2"], "twice"),
        (["seed.x=1"], "seed holds a int"),
        (["methods.lorra.r=4"], "did you mean 'lora'"),
        (["methods.r=4"], "methods holds no 'r'"),
        (["model_config={a: 1"], "not valid YAML"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        apply_overrides({"seed": 3, "methods": ["lora"]}, overrides)
