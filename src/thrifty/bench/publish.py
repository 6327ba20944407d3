"""Result files: what was found, with machine, versions and date, for `benchmarks/results/` and the docs made of it.

A file is one JSON object with `format` (one of `KINDS`), `label` (`measured` or `estimated`), `name`, `date`,
`machine`, `versions` and the findings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thrifty.errors import InputError
from thrifty.report.files import from_json, to_json, write_atomic

KINDS = {
    "thrifty-bench/1": "bench",
    "thrifty-guide/1": "guide",
    "thrifty-evidence/1": "evidence",
    "thrifty-peers/1": "peers",
    "thrifty-bench-can-tell/1": "bench-can-tell",
    "thrifty-bench-repeat/1": "bench-repeat",
    "thrifty-depth-sweep/1": "depth-sweep",
}
_NEEDED = ("format", "label", "name", "date", "machine", "versions")


def publish(result: Mapping[str, Any], folder: str | Path) -> Path:
    """Writes `KIND-NAME.json` into `folder`, in place of an earlier one.

    Raises:
        InputError: The result is not complete.
    """
    check(result, "the result")
    if result.get("complete") is False:
        raise InputError("is not finished, so that it is not published", key=str(result["name"]), fix="let it finish")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kind = KINDS[result["format"]]
    name = re.sub(r"[^a-z0-9]+", "-", str(result["name"]).lower()).strip("-")
    path = folder / (f"{name}.json" if f"{name}-".startswith(f"{kind}-") else f"{kind}-{name}.json")
    return write_atomic(path, to_json(result, indent=1) + "\n")


def read(path: str | Path) -> dict[str, Any]:
    """Reads a result file.

    Raises:
        InputError: It is missing or no result.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("there is no such result file", key=str(path))
    try:
        result = from_json(path.read_bytes())
    except ValueError as error:
        raise InputError(f"it is not JSON ({error})", key=str(path)) from error
    check(result, str(path))
    return result


def check(result: Any, where: str) -> None:
    """Raises `InputError` where something that every number needs beside it is missing."""
    missing = [key for key in _NEEDED if key not in result] if isinstance(result, Mapping) else list(_NEEDED)
    if missing:
        raise InputError(f"lacks {', '.join(missing)}", key=where, fix="write it by `thrifty bench --publish`")
    if result["format"] not in KINDS:
        raise InputError("has an unknown format", key=where, value=result["format"], fix=", ".join(KINDS))
