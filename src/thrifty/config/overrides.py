"""`key=value` overrides from the command line: dotted keys, values typed as in YAML."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from thrifty.config import yaml_text
from thrifty.errors import InputError, did_you_mean


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Returns a copy of `values` with every `key=value` applied.

    A dotted key goes into a mapping (`model_config.hidden_size=128`), or into the settings of a method in the list
    (`methods.lora.r=8`).

    Raises:
        InputError: An override is malformed, stands twice, or leads into something that is no mapping.

    >>> apply_overrides({"seed": 1}, ["learning_rate=1e-4", "model_config.hidden_size=64"])
    {'seed': 1, 'learning_rate': 0.0001, 'model_config': {'hidden_size': 64}}
    """
    result = copy.deepcopy(values)
    seen: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not all(part.strip() for part in key.split(".")):
            raise InputError("is not of the form key=value", key=override, fix="for example learning_rate=1e-4")
        if key in seen:
            raise InputError("is set twice on the command line", key=key, fix="keep one")
        seen.add(key)
        _put(result, key, yaml_text.parse(text, f"the value of {key}"))
    return result


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    if path[:1] == ["methods"] and isinstance(values.get("methods"), list):
        values, path = _settings_of(values["methods"], path[1] if len(path) > 1 else last, key), path[2:]
    for depth, part in enumerate(path):
        if values.get(part) is None:
            values[part] = {}
        if not isinstance(values[part], dict):
            where = ".".join(path[: depth + 1])
            raise InputError(
                f"{where} holds a {type(values[part]).__name__}, so nothing can be set inside it",
                key=key,
                value=value,
                fix=f"set {where} as a whole",
            )
        values = values[part]
    values[last] = value


def _settings_of(methods: list[Any], name: str, key: str) -> dict[str, Any]:
    """The settings of the method `name` in a `methods` list, where `lora` and `{lora: {r: 8}}` are both entries."""
    names: list[str] = []
    for index, entry in enumerate(methods):
        if entry == name or (isinstance(entry, dict) and list(entry) == [name]):
            settings = dict(entry[name] or {}) if isinstance(entry, dict) else {}
            methods[index] = {name: settings}
            return settings
        names += [entry] if isinstance(entry, str) else list(entry) if isinstance(entry, dict) else []
    raise InputError(
        f"methods holds no '{name}'{did_you_mean(name, names)}", key=key, fix=f"add {name} to methods first"
    )
