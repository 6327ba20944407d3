"""Reading a run file into a `RunConfig`: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from thrifty.config import load_config, parse_config, yaml_text
from thrifty.config.retired import RETIRED_KEYS, RETIRED_VALUES
from thrifty.config.run_config import default_text
from thrifty.config.schema import all_keys
from thrifty.errors import InputError

LLAMA = {"model_type": "llama", "hidden_size": 16}
BASE = {"model_config": LLAMA, "embedded_corpus": "kjv"}


def test_the_embedded_default_is_a_run_of_fixed_length() -> None:
    config = load_config()
    assert config.embedded_corpus == "kjv"
    assert config.arguments["max_steps"] > 0
    assert config.model_config is not None
    assert "learning_rate: " in default_text()


def test_keys_go_where_they_belong() -> None:
    config = parse_config(
        {**BASE, "seed": 7, "max_length": 64, "max_steps": 3, "task": "masked-lm", "learning_rate": 1}
    )
    assert config.data.seed == 7
    assert config.data.max_length == 64
    assert config.task == "masked-lm"
    assert config.arguments == {"max_steps": 3, "learning_rate": 1}
    args = config.training_arguments("unused")
    assert (args.seed, args.max_steps, args.learning_rate) == (7, 3, 1)


def test_the_resolved_form_is_read_back_equal(tmp_path: Path) -> None:
    config = parse_config(
        {**BASE, "methods": ["lawa"], "learning_rate": 3e-4, "run_name": "1e-4", "hub_token": "secret"}
    )
    resolved = config.to_dict(config.training_arguments(tmp_path))
    text = yaml_text.dump(resolved)
    assert "secret" not in text
    again = parse_config(yaml_text.parse(text))
    assert again.to_dict(again.training_arguments(tmp_path)) == resolved
    assert dataclasses.replace(again, arguments={}) == dataclasses.replace(config, arguments={})
    assert {"weight_decay", "adam_beta2", "seed", "max_length", "dtype"} <= set(resolved)


def test_a_config_json_is_read_into_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama", "hidden_size": 16}')
    config = parse_config({**BASE, "model_config": str(file)})
    assert config.model_config == LLAMA


def test_local_paths_become_absolute_and_hub_ids_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    config = parse_config({"model_name_or_path": "organisation/name", "train_file": "data.jsonl"})
    assert config.data.train_file == str(tmp_path / "data.jsonl")
    assert config.model_name_or_path == "organisation/name"


@pytest.mark.parametrize("value", ["lion", {"lion": {"betas": [0.9, 0.95]}}])
def test_a_shorthand_puts_a_method_into_its_slot(value: Any) -> None:
    config = parse_config({**BASE, "optimizer": value})
    assert config.methods == [value]
    assert config.optimizer is None


def test_a_model_of_ones_own_does_not_inherit_the_default() -> None:
    config = load_config(None, ["model_name_or_path=some/model", "train_file=x.txt"])
    assert config.model_config is None
    assert config.arguments == {}


def test_data_of_ones_own_replaces_the_embedded_text() -> None:
    config = load_config(None, ["train_file=x.txt"])
    assert config.embedded_corpus is None
    assert config.model_config is not None


def test_the_quiet_defaults_of_a_run_are_ours_unless_set() -> None:
    assert parse_config(BASE).training_arguments("unused").logging_steps == 10
    assert parse_config({**BASE, "logging_steps": 3}).training_arguments("unused").logging_steps == 3


WRONG = {
    "unknown key": ({"max_stps": 4}, ["max_stps=4", "did you mean 'max_steps'"]),
    "negative batch": ({"per_device_train_batch_size": -4}, ["per_device_train_batch_size=-4", "at least 1"]),
    "no steps": ({"max_steps": 0}, ["max_steps=0", "at least one step"]),
    "text for a number": ({"learning_rate": "fast"}, ["learning_rate='fast'", "a number of at least 0"]),
    "number for a switch": ({"bf16": 1}, ["bf16=1", "true or false"]),
    "word for a switch": ({"overwrite": "yes"}, ["overwrite='yes'", "true or false"]),
    "share above one": ({"validation_fraction": 2}, ["validation_fraction=2", "below 1"]),
    "null": ({"max_length": None}, ["max_length", "whole number"]),
    "near choice": ({"lr_scheduler_type": "cosin"}, ["lr_scheduler_type='cosin'", "did you mean 'cosine'"]),
    "unknown task": ({"task": "causal_lm"}, ["task='causal_lm'", "causal-lm"]),
    "tiny vocabulary": ({"vocab_size": 100}, ["vocab_size=100", "at least 259"]),
    "unknown method": ({"methods": ["lawwa"]}, ["lawwa", "did you mean 'lawa'"]),
    "unknown setting": ({"methods": [{"lawa": {"windw": 3}}]}, ["windw", "did you mean 'window'"]),
    "methods as text": ({"methods": "lawa"}, ["methods='lawa'", "a list"]),
    "conflicting methods": ({"methods": ["bf16", "fp16"]}, ["bf16", "fp16"]),
    "method twice": ({"methods": ["lawa", "lawa"]}, ["lawa"]),
    "slot twice": ({"optimizer": "lion", "methods": ["lion"]}, ["optimizer: lion", "twice"]),
    "slot and argument": ({"optimizer": "lion", "optim": "sgd"}, ["optim='sgd'", "'lion'", "twice"]),
    "precision twice": ({"methods": ["fp16"], "bf16": True}, ["bf16=True", "'fp16'", "twice"]),
    "wrong slot": ({"optimizer": "lawa"}, ["optimizer='lawa'", "lion"]),
    "both kinds of model": ({"model_name_or_path": "a/b"}, ["model_name_or_path='a/b'", "model_config"]),
    "two sources": ({"train_file": "a.txt"}, ["train_file='a.txt'", "embedded_corpus"]),
    "no kind of model": ({"model_config": {"hidden_size": 4}}, ["model_config", "model_type"]),
    "missing config.json": ({"model_config": "nowhere.json"}, ["model_config='nowhere.json'", "no such file"]),
    "resume without folder": ({"resume": "auto"}, ["resume='auto'", "output_dir"]),
    "resume and overwrite": ({"resume": "auto", "overwrite": True, "output_dir": "x"}, ["resume='auto'", "overwrite"]),
    "unknown back end": ({"torch_compile_backend": "inductr"}, ["torch_compile_backend='inductr'", "inductor"]),
    "unknown tracker": ({"report_to": "wandbb"}, ["report_to='wandbb'", "wandb"]),
}


@pytest.mark.parametrize(("values", "parts"), WRONG.values(), ids=WRONG.keys())
def test_a_fault_is_named_with_key_value_and_fix(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_config({**BASE, **values})
    message = str(caught.value)
    assert "Fix: " in message
    for part in parts:
        assert part in message


def test_nothing_is_trained_without_model_or_data() -> None:
    with pytest.raises(InputError, match="model_name_or_path"):
        parse_config({"train_file": "x.txt"})
    with pytest.raises(InputError, match="train_file"):
        parse_config({"model_config": LLAMA})


def test_a_combination_that_transformers_refuses_is_wrong_input() -> None:
    config = parse_config({**BASE, "load_best_model_at_end": True})
    with pytest.raises(InputError, match="load_best_model_at_end"):
        config.training_arguments("unused")


@pytest.mark.parametrize("key", RETIRED_KEYS)
def test_every_retired_key_is_answered_with_what_replaced_it(key: str) -> None:
    assert key not in all_keys()
    with pytest.raises(InputError) as caught:
        parse_config({**BASE, key: 1})
    assert str(caught.value).endswith(f"Fix: {RETIRED_KEYS[key]}")


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in RETIRED_VALUES for value in RETIRED_VALUES[key]])
def test_every_retired_value_is_answered_with_what_replaced_it(key: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_config({**BASE, key: value})
    assert RETIRED_VALUES[key][value] in str(caught.value)


def test_the_answers_name_keys_that_exist() -> None:
    for key, answer in RETIRED_KEYS.items():
        quoted = [word for word in answer.split("`")[1::2] if word.replace("_", "").isalpha() and "_" in word]
        for word in quoted:
            assert word in all_keys(), f"the answer to {key} names {word}"
