"""The catalogue's dimensions, checked by building every model on the meta device."""

from __future__ import annotations

import json

import pytest

from thrifty.errors import InputError
from thrifty.planner.catalogue import find, list_models, make_config, resolve

ENTRIES = list_models()


def test_there_are_enough_models_and_names_are_unique() -> None:
    assert len(ENTRIES) >= 60
    names = [n.lower() for e in ENTRIES for n in (e.name, *e.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_parameter_count_equals_the_published_total(entry) -> None:
    import torch
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, entry.architecture)(resolve(entry.name))
    built = sum(p.numel() for p in model.parameters())
    assert built in {entry.parameters, entry.tied_parameters}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", "openai-community/gpt2"),
        ("BERT-Large", "google-bert/bert-large-uncased"),
        ("bert-large-uncased", "google-bert/bert-large-uncased"),
        ("meta-llama/Llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("somebody/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("gemma-2-2b-it", "google/gemma-2-2b"),
        ("Mistral-7B-v0.3", "mistralai/Mistral-7B-v0.3"),
    ],
)
def test_names_match_without_case_organisation_or_variant(name: str, expected: str) -> None:
    entry = find(name)
    assert entry is not None
    assert entry.name == expected


def test_unknown_model_suggests_a_near_one() -> None:
    with pytest.raises(InputError, match=r"llama-3\.1-9b.*did you mean 'llama-3\.1-8b'"):
        resolve("llama-3.1-9b")


def test_local_config_is_read(tmp_path) -> None:
    entry = find("gpt2")
    assert entry is not None
    (tmp_path / "config.json").write_text(json.dumps({**entry.config, "n_layer": 3}))
    assert resolve(tmp_path).num_hidden_layers == 3
    assert resolve(tmp_path / "config.json").num_hidden_layers == 3


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "gpt3"}', "{}"])
def test_a_broken_config_is_answered(tmp_path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError):
        resolve(tmp_path)


def test_a_missing_config_names_the_file(tmp_path) -> None:
    with pytest.raises(InputError, match=r"config\.json.*no such file"):
        resolve(tmp_path)


def test_make_config_refuses_an_unknown_type_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="did you mean 'llama'"):
        make_config({"model_type": "lama"})
