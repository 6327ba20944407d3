"""Checks a method's settings against its dataclass annotations, with plain Python (no pydantic at import)."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from thrifty.errors import InputError, did_you_mean


def check_settings(cls: type, settings: Mapping[str, Any], *, prefix: str) -> dict[str, Any]:
    """Returns `settings` with values converted to the annotated types.

    Integers pass for floats, lists for tuples, and strings such as `1e-4` (which YAML reads as text) for floats.

    Raises:
        InputError: A value has another type.
    """
    hints = typing.get_type_hints(cls)
    return {key: _convert(value, hints[key], f"{prefix}.{key}") for key, value in settings.items()}


def _convert(value: Any, hint: Any, key: str) -> Any:
    try:
        return _coerce(value, hint)
    except (TypeError, ValueError) as error:
        if typing.get_origin(hint) is Literal:
            choices = typing.get_args(hint)
            raise InputError(
                f"is not one of {list(choices)}{did_you_mean(str(value), [str(c) for c in choices])}",
                key=key,
                value=value,
            ) from error
        raise InputError(f"is not {_describe(hint)}", key=key, value=value, fix=f"give {_describe(hint)}") from error


def _coerce(value: Any, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        for option in sorted(args, key=lambda option: type(value) is not option):
            try:
                return _coerce(value, option)
            except (TypeError, ValueError):
                continue
        raise TypeError
    if origin is Literal:
        if value in args:
            return value
        raise ValueError
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise TypeError
        inner = args[0] if args else Any
        if origin is tuple and args and args[-1] is not Ellipsis:
            if len(args) != len(value):
                raise TypeError
            return tuple(_coerce(item, arg) for item, arg in zip(value, args, strict=True))
        return origin(_coerce(item, inner) for item in value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError
        return {_coerce(k, args[0]): _coerce(v, args[1]) for k, v in value.items()}
    if hint in (None, type(None)):
        if value is None:
            return None
        raise TypeError
    if hint is float:
        if isinstance(value, bool):
            raise TypeError
        if isinstance(value, int | float | str):
            return float(value)
    if isinstance(value, bool) != (hint is bool) or not isinstance(value, hint):
        raise TypeError
    return value


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if hint in names:
        return names[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(arg) for arg in args if arg is not type(None))
    if origin in (list, tuple):
        inner = " and ".join(dict.fromkeys(_describe(arg) for arg in args if arg is not Ellipsis))
        return f"a list of {inner}"
    if origin is Literal:
        return " or ".join(repr(arg) for arg in args)
    if origin is dict:
        return "a mapping"
    return getattr(hint, "__name__", str(hint))
