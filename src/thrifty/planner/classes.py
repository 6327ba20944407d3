"""The structural classes of a search, each once, and their dry runs on several cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError
from thrifty.planner.compiled import Compiled
from thrifty.planner.structure import Structure

if TYPE_CHECKING:
    from thrifty.hardware.devices import Device
    from thrifty.planner.workload import Workload
    from thrifty.recipe import Recipe

_MOST_RECIPES = 1024
_MOST_LOOKED_AT = 8192


def distinct(
    workload: Workload, recipes: Iterable[Recipe], device: Device, most_passes: int
) -> tuple[list[Structure], bool]:
    """The classes of recipes that cost different things, and whether some were left out.

    Recipes that lead to the same step (the optimizer that the run has anyway, by another name) are one class. Classes
    that differ in the optimizer only share the dry run of the micro-batch, so they are not counted.

    Args:
        workload: The run.
        recipes: In the order of preference.
        device: Decides the kernels.
        most_passes: The most micro-batches to dry-run.
    """
    found: list[Structure] = []
    known: set[str] = set()
    passes: set[str] = set()
    complete = True
    single: dict[str, Structure] = {}
    own = 0
    for count, recipe in enumerate(recipes):
        if count == _MOST_LOOKED_AT or len(found) == _MOST_RECIPES:
            return found, False
        structure = Structure(workload, recipe, device)
        own = len(recipe) if count == 0 else own
        entries = [repr(entry) for entry in recipe.to_config()[own:]]
        try:
            structure.check_device()
            key, identity = structure.key, structure.identity
        except InputError:
            found.append(structure)  # It is answered with its reason when it is compiled.
            continue
        if len(entries) == 1:
            single[entries[0]] = structure
        elif entries and all(entry in single for entry in entries):
            structure.parts = [single[entry] for entry in entries]
        if identity in known:
            continue
        if key not in passes and len(passes) >= most_passes:
            complete = False
            continue
        known.add(identity)
        passes.add(key)
        found.append(structure)
    return found, complete


def compile_all(structures: Sequence[Structure], processes: int = 2) -> list[Compiled | InputError]:
    """Compiles several classes, on several cores where many are new; what cannot work is returned as its error.

    A fault in the dry run of the first class, the user's own, is raised; that of another one only rules it out.
    """
    passes: dict[str, Structure] = {}
    for structure in structures:
        # In order: what several methods do together is quicker found once each of them is known.
        if _has_key(structure) and not structure.is_answered():
            passes.setdefault(structure.key, structure)
    failed = {s.key: error for s, error in _in_parallel(passes, Structure.compile_pass, processes)}
    updates: dict[str, Structure] = {}
    steps: dict[str, Any] = {}
    for structure in structures:
        if not _has_key(structure) or structure.key in failed:
            continue
        step = steps.get(structure.key)
        if step is None and structure.is_stored():
            step = steps[structure.key] = structure.compile_pass()
        if step is not None and not structure.update_is_stored(step):
            updates.setdefault(structure.update_key(step), structure)
    bad_updates = {
        structure.update_key(steps[structure.key]): error
        for structure, error in _in_parallel(updates, Structure.compile, processes)
    }
    found: list[Compiled | InputError] = []
    for index, structure in enumerate(structures):
        if index and _has_key(structure):
            known = failed.get(structure.key)
            if known is None and structure.key in steps:
                known = bad_updates.get(structure.update_key(steps[structure.key]))
            if known is not None:
                found.append(known)
                continue
        try:
            found.append(structure.compile())
        except Exception as error:
            if index == 0 and not isinstance(error, InputError):
                raise
            found.append(_answer(structure, error))
    return found


def _has_key(structure: Structure) -> bool:
    """Whether the methods accept the run's arguments, so that the class can be dry-run."""
    try:
        structure.check_device()
    except InputError:
        return False
    return True


def _in_parallel(
    missing: dict[str, Structure], job: Callable[[Structure], Any], processes: int
) -> list[tuple[Structure, InputError]]:
    """Runs `job` for each class in other processes, where more than two are missing; returns those that failed."""
    from thrifty.planner.fit import compile_many

    if len(missing) <= 2 or processes <= 1:
        return []
    structures = list(missing.values())
    answers = compile_many([partial(_try, structure, job) for structure in structures], processes)
    return [(s, answer) for s, answer in zip(structures, answers, strict=True) if answer is not None]


def _try(structure: Structure, job: Callable[[Structure], Any]) -> InputError | None:
    try:
        job(structure)
    except Exception as error:
        return _answer(structure, error)
    return None


def _answer(structure: Structure, error: Exception) -> InputError:
    if isinstance(error, InputError):
        return error
    text = f"the dry run of {structure.names} failed: {type(error).__name__}: {error}"
    return InputError(text, key="methods")
