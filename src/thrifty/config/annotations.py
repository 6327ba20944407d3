"""Annotations and docstrings of dataclasses, turned into what a checker and a person can use."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal


def describe(annotation: Any, limits: Mapping[str, float] | None = None) -> str:
    """Says in words what a key accepts; null goes without saying.

    >>> describe(int | None, {"ge": 1})
    'a whole number of at least 1'
    """
    bounds = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    bound = " and ".join(f"{bounds[name]} {value}" for name, value in (limits or {}).items())
    words = dict.fromkeys(word for word in _words(annotation) if word != "null")
    return " or ".join(f"{word} {bound}" if bound and "number" in word else word for word in words)


def _words(annotation: Any) -> list[str]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return [word for arg in args for word in _words(arg)]
    if origin is Literal:
        words = [_literal_word(arg) for arg in args]
        return ["one of " + ", ".join(words)] if len(words) > 1 else words
    simple = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if annotation in simple:
        return [simple[annotation]]
    if origin in (list, tuple) or annotation in (list, tuple):
        inner = dict.fromkeys(word for arg in args if arg is not Ellipsis for word in _words(arg))
        return ["a list of " + " or ".join(inner)] if inner else ["a list"]
    return ["a mapping"] if origin is dict or annotation is dict else ["a value"]


def _literal_word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def plain_type(annotation: Any, choices: Iterable[str] | None) -> Any:
    """Turns a dataclass annotation into one of plain values: enumerations by value, foreign classes as mappings."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        if any(inspect.isclass(arg) and issubclass(arg, enum.Enum) for arg in args):
            args = tuple(arg for arg in args if arg is not str)
        return functools.reduce(lambda left, right: left | right, [plain_type(arg, choices) for arg in args])
    if origin is list:
        return list[plain_type(args[0], None)]  # pyright: ignore[reportInvalidTypeArguments]
    if annotation is str and choices:
        return Literal[tuple(choices)]  # pyright: ignore[reportInvalidTypeForm]
    if annotation is dict:
        return dict[str, Any]
    if origin is not None or annotation in (int, float, bool, str, type(None), Any):
        return annotation
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return Literal[tuple(str(member.value) for member in annotation)]  # pyright: ignore[reportInvalidTypeForm]
    return dict[str, Any]


def attribute_docs(cls: type) -> dict[str, str]:
    """The strings that stand below the fields of a dataclass and of those that it derives from."""
    docs: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if dataclasses.is_dataclass(part):
            docs.update(_own_attribute_docs(part))
    return docs


def _own_attribute_docs(cls: type) -> dict[str, str]:
    tree: Any = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    docs: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


def argument_docs(docstring: str) -> dict[str, str]:
    """The first sentence on each argument of a docstring in transformers' format."""
    docs: dict[str, str] = {}
    pattern = re.compile(r"^ {4,8}(\w+) ?\(`[^\n]*\):[ ]*\n((?:^ {12,}.*\n|^\s*\n)*)", re.MULTILINE)
    for name, text in pattern.findall(docstring):
        sentence = re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]
        docs[name] = sentence
    return docs
