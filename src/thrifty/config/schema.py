"""One strict pydantic model of a run file, made from the dataclasses that document its keys.

Importing this module loads pydantic; building the model loads transformers, whose installed version decides which
`TrainingArguments` fields exist.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from thrifty.config.annotations import argument_docs, attribute_docs, plain_type
from thrifty.config.keys import RunKeys
from thrifty.data.options import DataOptions
from thrifty.safety.options import Guards

Owner = Literal["run", "data", "guards", "training"]

POSITIVE: Mapping[str, float] = {"ge": 1}
NOT_NEGATIVE: Mapping[str, float] = {"ge": 0}
LIMITS: Mapping[str, Mapping[str, float]] = {
    "per_device_train_batch_size": POSITIVE,
    "per_device_eval_batch_size": POSITIVE,
    "gradient_accumulation_steps": POSITIVE,
    "num_train_epochs": {"gt": 0},
    "learning_rate": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "adam_beta1": {"ge": 0, "lt": 1},
    "adam_beta2": {"ge": 0, "lt": 1},
    "adam_epsilon": {"gt": 0},
    "label_smoothing_factor": {"ge": 0, "lt": 1},
    "logging_steps": {"gt": 0},
    "eval_steps": {"gt": 0},
    "save_steps": {"gt": 0},
    "save_total_limit": POSITIVE,
    "seed": {"ge": 0, "lt": 2**32},
    "data_seed": {"ge": 0, "lt": 2**32},
    "dataloader_num_workers": NOT_NEGATIVE,
    "dataloader_prefetch_factor": POSITIVE,
    "vocab_size": {"ge": 259},
    "max_new_tokens": NOT_NEGATIVE,
    "global_batch_size": POSITIVE,
    "num_threads": POSITIVE,
    "validation_fraction": {"ge": 0, "lt": 1},
    "max_length": {"ge": 2},
    "max_non_finite_in_a_row": POSITIVE,
    "neftune_noise_alpha": {"gt": 0, "lt": 1000},
    "mlm_probability": {"gt": 0, "lt": 1},
    "preprocessing_num_workers": POSITIVE,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "dataset_format": ("auto", "text", "prompt-completion", "messages", "alpaca", "sharegpt", "tokenized"),
    "long_samples": ("split", "truncate", "error"),
}
RENAMED_INSIDE = {"model_config": "model_config_"}
"""`model_config` is pydantic's own attribute, so the field behind that key has another name."""


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a run file: its type, default and documentation, and which dataclass it belongs to."""

    name: str
    annotation: Any
    default: Any
    description: str
    owner: Owner


@functools.cache
def all_keys() -> dict[str, Key]:
    """Every key that a run file may hold. Where two dataclasses share a name (`seed`), the first one documents it."""
    from transformers import TrainingArguments

    keys: dict[str, Key] = {}
    documentation = {
        RunKeys: attribute_docs(RunKeys),
        DataOptions: attribute_docs(DataOptions),
        Guards: attribute_docs(Guards),
        TrainingArguments: argument_docs(TrainingArguments.__doc__ or ""),
    }
    owners: tuple[tuple[type, Owner], ...] = (
        (RunKeys, "run"),
        (DataOptions, "data"),
        (Guards, "guards"),
        (TrainingArguments, "training"),
    )
    for cls, owner in owners:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if not field.init or field.name in keys or field.name in _NOT_IN_A_FILE:
                continue
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            annotation = plain_type(hints[field.name], field.metadata.get("choices") or CHOICES.get(field.name))
            description = documentation[cls].get(field.name, "")
            keys[field.name] = Key(field.name, annotation, getattr(default, "value", default), description, owner)
    return keys


# Launchers and verbs decide these, not run files; `thrifty.config.retired` says so to who sets them.
_NOT_IN_A_FILE = frozenset(
    {
        "do_train",
        "do_eval",
        "do_predict",
        "local_rank",
        "resume_from_checkpoint",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
    }
)


@functools.cache
def run_file_model() -> type[BaseModel]:
    """The pydantic model: strict types, no unknown key."""
    fields: dict[str, Any] = {}
    for key in all_keys().values():
        limits: Any = LIMITS.get(key.name, {})
        annotation = _with_limits(key.annotation, limits) if limits else key.annotation
        fields[RENAMED_INSIDE.get(key.name, key.name)] = (
            annotation,
            Field(default=key.default, alias=key.name, description=key.description or None),
        )
    config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    return create_model("RunFile", __config__=config, __doc__="A run file of thrifty.", **fields)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a run file, for editors; the methods and their settings included."""
    from thrifty.method import registry

    schema = run_file_model().model_json_schema(by_alias=True)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    named: dict[str, Any] = {name: _settings_schema(registry.get(name)) for name in registry.names()}
    entry = {
        "anyOf": [
            {"enum": list(named)},
            {
                "type": "object",
                "properties": named,
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 1,
            },
        ]
    }
    schema["properties"]["methods"]["items"] = entry
    return json.loads(json.dumps(schema))  # tuples, such as a method's betas, become lists


def _settings_schema(method: type) -> dict[str, Any]:
    docs = attribute_docs(method)
    hints = typing.get_type_hints(method)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(method):
        if field.init:
            default = {} if field.default is dataclasses.MISSING else {"default": field.default}
            properties[field.name] = {
                **_json_type(hints[field.name]),
                "description": docs.get(field.name, ""),
                **default,
            }
    form = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"anyOf": [form, {"type": "null"}], "description": method.spec.title}  # pyright: ignore[reportAttributeAccessIssue]


def _json_type(hint: Any) -> dict[str, Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(hint).json_schema()


def _with_limits(annotation: Any, limits: Mapping[str, Any]) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [_with_limits(arg, limits) if arg in (int, float) else arg for arg in typing.get_args(annotation)]
        return functools.reduce(lambda left, right: left | right, parts)
    return Annotated[annotation, Field(**limits)]
