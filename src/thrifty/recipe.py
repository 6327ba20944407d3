"""`Recipe`: an ordered, checked set of methods."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thrifty.errors import InputError, did_you_mean
from thrifty.method import Method, overrides, registry
from thrifty.settings import check_settings


class Recipe:
    """Methods in the order in which their hooks run. Immutable after construction.

    Args:
        methods: Method instances. Their order does not matter: declarations decide.

    Raises:
        InputError: Two methods conflict, claim the same slot, appear twice, or one lacks what it requires.
    """

    def __init__(self, methods: Sequence[Method] = ()) -> None:
        _check_duplicates(methods)
        _check_conflicts(methods)
        _check_claims(methods)
        _check_requirements(methods)
        self.methods: tuple[Method, ...] = tuple(_sorted(methods))

    @classmethod
    def parse(cls, items: Recipe | Sequence[str | Mapping[str, Any] | Method] | None) -> Recipe:
        """Builds a recipe from names, `{name: {setting: value}}` mappings and instances, in any mixture."""
        if isinstance(items, Recipe):
            return items
        if isinstance(items, str | Mapping):
            raise InputError(
                "is not a list", key="methods", value=items, fix="write a list, e.g. methods: [bf16, {lora: {r: 8}}]"
            )
        return cls([method for item in items or () for method in _parse_item(item)])

    def __iter__(self) -> Iterator[Method]:
        return iter(self.methods)

    def __len__(self) -> int:
        return len(self.methods)

    def __contains__(self, name: str) -> bool:
        return any(method.name == name for method in self.methods)

    def __repr__(self) -> str:
        return f"Recipe({', '.join(method.name for method in self.methods)})"

    def __getitem__(self, name: str) -> Method:
        for method in self.methods:
            if method.name == name:
                return method
        raise KeyError(name)

    # --- views ---

    def using(self, hook: str) -> list[Method]:
        """The methods that override a hook, in order."""
        return [method for method in self.methods if overrides(method, hook)]

    def owner(self, slot: str) -> Method | None:
        """The method that claims a slot."""
        return next((method for method in self.methods if slot in method.spec.claims), None)

    def describe(self) -> list[dict[str, str]]:
        """Name, title, settings, reason, source and findings of each part, in order."""
        return [
            {
                "name": method.name,
                "title": method.spec.title,
                "settings": ", ".join(f"{key}={value}" for key, value in method.settings().items()),
                "reason": method.reason(),
                "source": "; ".join(str(source) for source in method.spec.sources),
                "facts": method_facts(method),
            }
            for method in self.methods
        ]

    def to_config(self) -> list[str | dict[str, Any]]:
        """The list form that `parse` reads back."""
        return [{m.name: settings} if (settings := m.settings()) else m.name for m in self.methods]

    @property
    def exact(self) -> bool:
        """Do all methods leave the mathematics of a step unchanged?"""
        return all(method.spec.exact for method in self.methods)

    # --- hooks that are the same for all users ---

    def configure(self, args: Any, ctx: Any) -> Any:
        """Returns a copy of `args` with the fields that the methods set.

        Raises:
            InputError: A field was set by the user or by another method too.
        """
        from thrifty._hf import default_argument, replace_arguments

        changes: dict[str, tuple[str, Any]] = {}
        for method in self.using("configure"):
            for key, value in method.configure(args, ctx).items():
                if key in changes and changes[key][1] != value:
                    raise InputError(
                        f"methods '{changes[key][0]}' and '{method.name}' set it to {changes[key][1]!r} and {value!r}",
                        key=key,
                        fix="remove one of the two methods",
                    )
                current, default = getattr(args, key), default_argument(type(args), key)
                if key not in changes and current != default and bool(current or default):
                    raise InputError(
                        f"is set twice: by you and by the method '{method.name}' ({value!r})",
                        key=key,
                        value=current,
                        fix=f"remove `{key}`, or the method '{method.name}'",
                    )
                changes[key] = (method.name, value)
        values = {key: value for key, (_, value) in changes.items()}
        if not ctx.planning and ctx.device.type == "cpu" and any(values.get(key) for key in ("bf16", "fp16")):
            # The run is on the processor already, but transformers takes that for an oversight unless it is said.
            values["use_cpu"] = True
        return replace_arguments(args, values) if values else args

    @contextlib.contextmanager
    def evaluating(self, model: Any) -> Iterator[None]:
        """All methods' `evaluating` contexts, in order."""
        with contextlib.ExitStack() as stack:
            for method in self.using("evaluating"):
                stack.enter_context(method.evaluating(model))
            yield

    def no_decay(self) -> tuple[str, ...]:
        """Substrings of parameter names without weight decay."""
        return tuple(part for method in self.methods for part in method.no_decay)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The state of every method by name."""
        return {method.name: method.state_dict() for method in self.methods}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]], where: str) -> None:
        """Loads every method's state; a recipe other than the saved one is an `InputError`."""
        saved, ours = set(state), {method.name for method in self.methods}
        if saved != ours:
            raise InputError(
                f"the checkpoint {where} was written with the methods {sorted(saved)}, "
                f"but the recipe has {sorted(ours)}",
                key="methods",
                fix="resume with the same methods, or start a new run from the checkpoint's weights "
                "(model_name_or_path)",
            )
        for method in self.methods:
            method.load_state_dict(state[method.name])


def method_facts(method: Method) -> str:
    """What the method found out during the run, as a text; empty before it."""
    return ", ".join(f"{key}: {value}" for key, value in method.facts().items())


def _parse_item(item: str | Mapping[str, Any] | Method) -> list[Method]:
    if isinstance(item, Method):
        return [item]
    if isinstance(item, str):
        return [_build(item, {})]
    if isinstance(item, Mapping):
        return [_build(str(name), settings) for name, settings in item.items()]
    raise InputError("is neither a name, a mapping nor a Method", key="methods", value=item, fix="write e.g. 'bf16'")


def _build(name: str, settings: Any) -> Method:
    cls = registry.get(name)
    if settings is None or settings is True:
        settings = {}
    if not isinstance(settings, Mapping):
        raise InputError(
            "settings of a method are a mapping",
            key=f"methods.{name}",
            value=settings,
            fix=f"{{{name}: {{key: value}}}}",
        )
    known = [f.name for f in dataclasses.fields(cls) if f.init]
    for key in settings:
        if key not in known:
            raise InputError(
                f"method '{name}' has no such setting{did_you_mean(key, known)}",
                key=f"methods.{name}.{key}",
                value=settings[key],
                fix=f"its settings are: {', '.join(known) or 'none'}",
            )
    checked = check_settings(cls, settings, prefix=f"methods.{name}")
    try:
        return cls(**checked)
    except ValueError as error:
        raise InputError(str(error), key=f"methods.{name}", value=dict(settings)) from error


def _matches(method: Method, pattern: str) -> bool:
    return pattern == method.name or pattern == f"section:{method.spec.section}"


def _check_duplicates(methods: Sequence[Method]) -> None:
    seen: set[str] = set()
    for method in methods:
        if method.name in seen:
            raise InputError("is listed twice", key="methods", value=method.name, fix="keep one of the two entries")
        seen.add(method.name)


def _check_conflicts(methods: Sequence[Method]) -> None:
    for first in methods:
        for pattern, why in first.spec.conflicts_with.items():
            for second in methods:
                if second is not first and _matches(second, pattern):
                    raise InputError(
                        f"'{first.name}' and '{second.name}' cannot be combined: {why}",
                        key="methods",
                        value=[first.name, second.name],
                        fix="remove one of the two",
                    )


def _check_claims(methods: Sequence[Method]) -> None:
    owners: dict[str, str] = {}
    for method in methods:
        for slot in method.spec.claims:
            if slot in owners:
                raise InputError(
                    f"'{owners[slot]}' and '{method.name}' both want the one slot '{slot}'",
                    key="methods",
                    value=[owners[slot], method.name],
                    fix="remove one of the two",
                )
            owners[slot] = method.name


def _check_requirements(methods: Sequence[Method]) -> None:
    names = {method.name for method in methods}
    for method in methods:
        for required in method.spec.requires:
            if required not in names:
                raise InputError(
                    f"'{method.name}' needs '{required}'", key="methods", fix=f"add '{required}' to the list"
                )


def _sorted(methods: Sequence[Method]) -> list[Method]:
    """Topological order by `runs_before`; ties go by the survey's order, so the user's order never matters."""
    remaining = sorted(methods, key=lambda m: registry.place(m.name))
    ordered: list[Method] = []
    while remaining:
        for method in remaining:
            if not any(
                _matches(method, p) for other in remaining if other is not method for p in other.spec.runs_before
            ):
                ordered.append(method)
                remaining.remove(method)
                break
        else:
            names = [method.name for method in remaining]
            raise InputError("their declarations of order form a circle", key="methods", value=names)
    return ordered
