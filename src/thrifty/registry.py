"""The registry of methods: found by walking `thrifty.methods` and the entry point `thrifty.methods`."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from thrifty.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from thrifty.method import Method

# The survey's sections in its own order; the registry and the docs list methods in it.
SECTIONS = (
    "optimizers",
    "initialization",
    "sparsity",
    "overparameterization",
    "large_batch",
    "growth",
    "selection",
    "precision",
    "checkpointing",
    "offload",
    "parallelism",
    "peft",
    "moe",
    "attention",
    "loss",
    "compilation",
    "sharing",
    "data_loading",
)


class Registry:
    """Name to method class. Modules are imported when looked up, so that `import thrifty` stays cheap."""

    def __init__(self) -> None:
        self._methods: dict[str, type[Method]] = {}
        self._discovered = False

    def add(self, name: str, cls: type[Method]) -> None:
        """Adds a class; the same name from another class is an error."""
        other = self._methods.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InputError(
                f"two methods register the same name: {other.__module__}.{other.__qualname__} and "
                f"{cls.__module__}.{cls.__qualname__}",
                key="method",
                value=name,
                fix="rename one of them",
            )
        self._methods[name] = cls

    def discover(self) -> None:
        """Imports every module that registers methods, once."""
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module("thrifty.methods")
        for module in pkgutil.walk_packages(package.__path__, "thrifty.methods."):
            importlib.import_module(module.name)
        for point in entry_points(group="thrifty.methods"):
            point.load()

    def place(self, name: str) -> tuple[int, str]:
        """Sorts as `names` does, the unregistered first; imports nothing."""
        return (SECTIONS.index(self._methods[name].spec.section), name) if name in self._methods else (-1, "")

    def names(self) -> list[str]:
        """All names, in the order of the survey's sections."""
        self.discover()
        return sorted(self._methods, key=self.place)

    def get(self, name: str) -> type[Method]:
        """The class registered under `name`; an unknown name is an `InputError` with the nearest known one."""
        if name not in self._methods:
            self._import_by_name(name)
        if name not in self._methods:
            self.discover()
        if name not in self._methods:
            raise InputError(
                f"unknown method{did_you_mean(name, self._methods)}",
                key="methods",
                value=name,
                fix="`thrifty methods` lists all of them",
            )
        return self._methods[name]

    def _import_by_name(self, name: str) -> None:
        """Imports the module that has the method's name, where there is one: the others cost half a second."""
        stem = name.replace("-", "_")
        if self._discovered or not stem.isidentifier():
            return
        package = importlib.import_module("thrifty.methods")
        for folder in package.__path__:
            for path in Path(folder).glob(f"*/{stem}.py"):
                importlib.import_module(f"thrifty.methods.{path.parent.name}.{stem}")


registry = Registry()
