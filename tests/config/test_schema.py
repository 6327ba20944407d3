"""The JSON schema and the documentation of the keys, both made from the dataclasses."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

import pytest
from transformers import TrainingArguments

from thrifty.config.annotations import describe
from thrifty.config.schema import all_keys, json_schema
from thrifty.data.options import DataOptions
from thrifty.method import registry


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema()


def test_every_training_argument_may_be_set_but_those_that_a_verb_decides() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    missing = fields - set(all_keys())
    assert missing <= {
        "do_train",
        "do_eval",
        "do_predict",
        "local_rank",
        "resume_from_checkpoint",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
    }


def test_the_schema_is_json_and_knows_every_key(schema: dict[str, Any]) -> None:
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["properties"]) == set(all_keys())
    assert schema["additionalProperties"] is False


def test_every_key_of_ours_is_documented(schema: dict[str, Any]) -> None:
    for key in all_keys().values():
        if key.owner != "training":
            assert key.description, key.name
            assert schema["properties"][key.name]["description"] == key.description
    documented = [key for key in all_keys().values() if key.owner == "training" and key.description]
    assert len(documented) > 90


def test_limits_and_choices_are_part_of_the_schema(schema: dict[str, Any]) -> None:
    properties = schema["properties"]
    assert properties["per_device_train_batch_size"]["minimum"] == 1
    assert properties["eval_strategy"]["enum"] == ["no", "steps", "epoch"]
    assert properties["dataset_format"]["default"] == DataOptions().dataset_format
    assert properties["learning_rate"]["default"] == 5e-5


def test_methods_are_listed_with_their_settings(schema: dict[str, Any]) -> None:
    names, entry = schema["properties"]["methods"]["items"]["anyOf"]
    assert names["enum"] == registry.names()
    window = entry["properties"]["lawa"]["anyOf"][0]["properties"]["window"]
    assert window["type"] == "integer"
    assert window["description"]


@pytest.mark.parametrize(
    ("annotation", "limits", "words"),
    [
        (int, {"ge": 1}, "a whole number of at least 1"),
        (float | None, {"ge": 0, "lt": 1}, "a number of at least 0 and below 1"),
        (Literal["a", "b"], None, "one of a, b"),
        (Literal[False, "auto"] | str, None, "one of false, auto or text"),
        (list[str] | None, None, "a list of text"),
        (tuple[float, ...], None, "a list of a number"),
        (dict[str, int], None, "a mapping"),
    ],
)
def test_types_in_words(annotation: Any, limits: Any, words: str) -> None:
    assert describe(annotation, limits) == words
