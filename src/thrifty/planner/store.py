"""Dry runs on disk, by the hash of everything that decides them."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.planner.program import Rows

if TYPE_CHECKING:
    from thrifty.planner.memory import OptimizerModel, StepModel
    from thrifty.planner.program import Program
    from thrifty.planner.replay import ClosedForm

CACHE_FORMAT = 2
PASSES: dict[str, StepModel] = {}
"""Dry runs of micro-batches in this process, shared by classes that differ in the optimizer only."""
UPDATES: dict[str, OptimizerModel | ClosedForm] = {}
"""Dry runs of updates in this process, shared by classes with the same parameters."""
REGIONS: dict[str, dict[Any, Any]] = {}
"""Graphs of compiled blocks in this process, by workload and device; they hold no weights."""
_MOST_KEPT = 256


def forget_compiled() -> None:
    """Forgets the dry runs that this process holds; those on disk stay."""
    PASSES.clear()
    UPDATES.clear()
    REGIONS.clear()


def remember(known: dict[str, Any], key: str, value: Any) -> Any:
    """Keeps `value` in one of the two above, where the oldest give way, and returns it."""
    while len(known) >= _MOST_KEPT:
        del known[next(iter(known))]
    known[key] = value
    return value


def content_hash(content: list[Any]) -> str:
    """A name for what JSON can say of `content`."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


@functools.cache
def own_version() -> list[Any]:
    """Of this package: the version, and the sizes and times of its sources, so that a changed method is run anew."""
    import thrifty

    folder = Path(thrifty.__file__).parent
    states = [path.stat() for path in sorted(folder.rglob("*.py"))]
    return [thrifty.__version__, len(states), sum(s.st_size for s in states), max(s.st_mtime_ns for s in states)]


def cache_folder() -> Path:
    """Where dry runs are kept."""
    root = os.environ.get("THRIFTY_CACHE") or Path.home() / ".cache" / "thrifty"
    return Path(root) / "planner"


def write(save: Callable[[Path], Any], path: Path) -> None:
    """Lets `save` write a file that others see complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save(temporary)
    os.replace(temporary, path)


_OF_STEP, _OF_UPDATE = ("rows", "accumulating_rows"), ("rows",)


def save_step(model: StepModel, path: Path) -> None:
    """Keeps a model, what others can use of it, and its rows."""
    facts = {"meta": model.meta, "units": model.units}
    write(lambda file: file.write_text(json.dumps(facts)), _facts_beside(path))
    programs = {name: model.programs[name] for name in set(model.stored_as().values())}
    # The file that others look for is written last, so that it vouches for the other.
    _write_arrays(model.to_arrays() | _rows_of(programs, _OF_STEP), path)


def load_step(path: Path) -> StepModel:
    """Reads what `save_step` wrote."""
    from thrifty.planner.memory import StepModel

    arrays = _read_arrays(path)
    model = StepModel.from_arrays(arrays)
    _fill_rows({name: model.programs[name] for name in set(model.stored_as().values())}, _OF_STEP, arrays)
    return model


def load_facts(path: Path) -> dict[str, Any] | None:
    """What a dry run found out that others can use: `meta` and `units` of `StepModel`; None where there is none."""
    return json.loads(_facts_beside(path).read_text()) if path.exists() else None


def save_update(model: OptimizerModel, path: Path) -> None:
    """Keeps a model and its rows."""
    _write_arrays(model.to_arrays() | _rows_of({"update": model.program}, _OF_UPDATE), path)


def load_update(path: Path) -> OptimizerModel:
    """Reads what `save_update` wrote."""
    from thrifty.planner.memory import OptimizerModel

    arrays = _read_arrays(path)
    model = OptimizerModel.from_arrays(arrays)
    _fill_rows({"update": model.program}, _OF_UPDATE, arrays)
    return model


def _rows_of(programs: Mapping[str, Program], sets: Sequence[str]) -> dict[str, np.ndarray]:
    """The pruned moments, to lie beside the programs: finding them takes longer than reading them."""
    return {
        f"rows/{name}/{which}/{part.name}": getattr(getattr(program, which), part.name)
        for name, program in programs.items()
        for which in sets
        for part in fields(Rows)
    }


def _fill_rows(programs: Mapping[str, Program], sets: Sequence[str], arrays: Mapping[str, np.ndarray]) -> None:
    for name, program in programs.items():
        for which in sets:
            # Fills the cached property.
            found = {part.name: arrays[f"rows/{name}/{which}/{part.name}"] for part in fields(Rows)}
            program.__dict__[which] = Rows(**found)


def _write_arrays(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """One file: a line of JSON with name, type and shape of each array, then their bytes.

    A search reads a hundred of these, and the archives of numpy take a third of a millisecond for every array.
    """
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    index = json.dumps([[name, array.dtype.str, list(arrays[name].shape)] for name, array in whole.items()])
    content = b"".join([index.encode(), b"\n", *(array.tobytes() for array in whole.values())])
    write(lambda file: file.write_bytes(content), path)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    content = path.read_bytes()
    start = content.index(b"\n") + 1
    arrays = {}
    for name, dtype, shape in json.loads(content[: start - 1]):
        kind, count = np.dtype(dtype), math.prod(shape)
        arrays[name] = np.frombuffer(content, kind, count, start).reshape(shape)
        start += kind.itemsize * count
    return arrays


def _facts_beside(path: Path) -> Path:
    return path.with_suffix(".facts.json")
