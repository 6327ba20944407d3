"""Reading and writing YAML for run files.

PyYAML follows YAML 1.1, where `1e-4` is a string, `no` is false and `1:30` is ninety. Run files follow the core
schema of YAML 1.2 instead, and a key that stands twice is an error rather than a silent choice.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from thrifty.errors import InputError

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS = (
    ("tag:yaml.org,2002:bool", _BOOL, "tTfF"),
    ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:null", _NULL, "~nN\0"),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), "<"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own protocol


class _Dumper(yaml.SafeDumper):
    """Quotes exactly those strings that `_Loader` would read as something else."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own protocol

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    for _cls in (_Loader, _Dumper):
        _cls.add_implicit_resolver(_tag, _pattern, ["" if c == "\0" else c for c in _first])


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)).replace("_", ""), 10)


def _construct_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = str(key_node.value)
        line = key_node.start_mark.line + 1
        if key in seen and key != "<<":
            raise InputError(
                f"the key stands twice, in lines {seen[key]} and {line} of {loader.name}", key=str(key), fix="keep one"
            )
        seen[key] = line
    loader.flatten_mapping(node)
    compound = next((key for key, _ in node.value if not isinstance(key, yaml.ScalarNode)), None)
    if compound is not None:
        line = compound.start_mark.line + 1
        raise InputError(f"line {line} of {loader.name} has a key that is no word", fix="write keys as plain words")
    mapping: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    wrong = next((key for key in mapping if not isinstance(key, str)), None)
    if wrong is not None:
        raise InputError(f"a key in {loader.name} is not a word", key=str(wrong), fix=f"write it in quotes: '{wrong}'")
    return mapping


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse(text: str, name: str = "the text") -> Any:
    """Reads one YAML (or JSON) document.

    Args:
        text: The document.
        name: What to call it in messages.

    Raises:
        InputError: The text is no valid YAML, or a key stands twice.

    >>> parse("learning_rate: 1e-4")
    {'learning_rate': 0.0001}
    """
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise InputError(
            f"{name}{where} is not valid YAML: {problem}", fix="check quotes, colons and indentation"
        ) from error
    except RecursionError:
        raise InputError(f"{name} is nested too deeply", fix="check brackets and indentation") from None
    finally:
        loader.dispose()


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Reads a run file: a YAML or JSON file that holds one mapping; an empty file is an empty mapping.

    Raises:
        InputError: The file is missing, unreadable, malformed or holds something else.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError("there is no such file", key="config", value=str(path), fix="check the path") from None
    except IsADirectoryError:
        raise InputError(
            "this is a folder, not a file", key="config", value=str(path), fix="name the YAML file in it"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot be read: {error}", key="config", value=str(path), fix="a readable UTF-8 file"
        ) from error
    content = _parse_json(text, str(path)) if path.suffix == ".json" else parse(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(
            f"holds a {type(content).__name__}, not keys and values",
            key="config",
            value=str(path),
            fix="lines like `max_steps: 100`",
        )
    return content


def _parse_json(text: str, name: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise InputError(f"the key stands twice in {name}", key=twice, fix="keep one")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{name}, line {error.lineno}, column {error.colno} is not valid JSON: {error.msg}",
            fix="check quotes and commas",
        ) from error
    except RecursionError:
        raise InputError(f"{name} is nested too deeply", fix="check brackets") from None


def dump(content: Any) -> str:
    """Writes YAML that `parse` reads back to an equal object; floats keep every bit."""
    options: dict[str, Any] = {"sort_keys": False, "width": 100, "default_flow_style": False}
    text = yaml.dump(content, Dumper=_Dumper, allow_unicode=True, **options)
    # PyYAML leaves the rarer line breaks bare, and reads them back as spaces.
    return yaml.dump(content, Dumper=_Dumper, **options) if any(c in text for c in "\x85\u2028\u2029\ufeff") else text
