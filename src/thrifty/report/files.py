"""Writing a file so that a reader sees the old content or the new one, never half of either."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Replaces `path` by `content` in one step.

    The content goes to a hidden file beside `path`, is forced to disk, and then takes the name. A crash at any moment
    leaves the previous file intact; an error removes the hidden file and is raised.

    Args:
        path: The file to write. Its folder must exist.
        content: Text (written as UTF-8) or bytes.

    Returns:
        The path written.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        # A cleanup that fails too (the folder went away) must not hide the first error.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return path


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Serialises to JSON that every parser accepts.

    JSON has no NaN or infinities; they become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which `from_json`
    turns back into floats. NumPy and torch scalars become Python numbers, paths become strings.

    Raises:
        TypeError: A value has no JSON form.
    """
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def from_json(text: str | bytes) -> Any:
    """Parses what `to_json` wrote.

    Raises:
        ValueError: `text` is not JSON.
    """
    return _restore(json.loads(text))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _plain(value.item())
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form: {value!r}")


def _restore(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restore(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restore(item) for item in value]
    return value
