"""The dimensions of well-known models, so that planning needs no network.

`resolve` turns a name into a `transformers` configuration: a local folder or `config.json`, or an entry of
`data/models.yaml`. Names match without regard to case, with or without the organisation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Tuned variants have the dimensions of their base model.
_SUFFIXES = re.compile(r"(-(instruct|chat|hf|it|base|pt|v\d+(\.\d+)?))+$")


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue."""

    name: str
    """The hub id."""
    aliases: tuple[str, ...]
    architecture: str
    """The `transformers` class that `parameters` counts."""
    parameters: int
    """Published total; a tied matrix counts once."""
    config: dict[str, Any]
    """What `config.json` holds."""
    source: str
    tied_parameters: int | None = None
    """The total where transformers ties a matrix that the published model keeps apart."""


def list_models() -> list[Entry]:
    """All models of the catalogue, in the order of the file."""
    return list(_entries())


def find(name: str) -> Entry | None:
    """The entry of that name or alias, or None."""
    index = _index()
    key = name.lower().strip("/")
    short = key.rsplit("/", 1)[-1]
    for candidate in (key, short, short.removeprefix("meta-"), _SUFFIXES.sub("", short), short.replace("_", "-")):
        if candidate in index:
            return index[candidate]
    return None


def resolve(name: str | Path) -> PretrainedConfig:
    """The configuration of a model, without the network.

    Args:
        name: A folder with a `config.json`, such a file, or the name of a model in the catalogue.

    Raises:
        InputError: Nothing has this name, or the file is not a configuration.
    """
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _from_file(path / "config.json" if path.is_dir() else path)
    entry = find(str(name))
    if entry is None:
        guess = did_you_mean(str(name).lower().rsplit("/", 1)[-1], (n.rsplit("/", 1)[-1] for n in _index()))
        raise InputError(
            f"this model is neither a local folder nor in the catalogue{guess}",
            key="model",
            value=str(name),
            fix="give a catalogue name, or the path of the model's config.json",
        )
    return make_config({**entry.config, "architectures": [entry.architecture]})


def make_config(data: dict[str, Any]) -> PretrainedConfig:
    """Builds a configuration from a mapping as in `config.json`; it must name its `model_type`.

    Raises:
        InputError: `model_type` is missing or unknown to the installed transformers, or a value is refused.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    data = dict(data)
    kind = data.pop("model_type", None)
    if kind not in CONFIG_MAPPING_NAMES:
        guess = did_you_mean(str(kind), CONFIG_MAPPING_NAMES)
        raise InputError(
            f"unknown model type{guess}", key="model_type", value=kind, fix="name one that transformers knows"
        )
    try:
        return AutoConfig.for_model(kind, **data)
    except (TypeError, ValueError) as error:
        raise InputError(f"transformers refuses this configuration: {error}", key="model_config", value=kind) from error


def _from_file(path: Path) -> PretrainedConfig:
    import json

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            "no such file", key="model", value=str(path), fix="the folder must hold a config.json"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not JSON: {error}", key="model", value=str(path)) from None
    if not isinstance(data, dict):
        raise InputError("a model configuration is a mapping", key="model", value=str(path))
    return make_config(data)


@cache
def _entries() -> tuple[Entry, ...]:
    import yaml

    text = resources.files("thrifty.planner").joinpath("data/models.yaml").read_text(encoding="utf-8")
    families = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(
        Entry(
            name=name,
            aliases=tuple(model.get("aliases", ())),
            architecture=family["architecture"],
            parameters=model["parameters"],
            config={**family["config"], **model["config"]},
            source=family["source"],
            tied_parameters=model.get("tied_parameters"),
        )
        for family in families.values()
        for name, model in family["models"].items()
    )


@cache
def _index() -> dict[str, Entry]:
    index: dict[str, Entry] = {}
    for entry in _entries():
        for name in (entry.name, entry.name.rsplit("/", 1)[-1], *entry.aliases):
            index.setdefault(name.lower(), entry)
    return index
