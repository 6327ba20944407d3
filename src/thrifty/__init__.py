"""Efficient training of Transformers: plan it, train it, prove it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from thrifty.errors import InputError, NotApplicable, ThriftyError
    from thrifty.method import Method, registry
    from thrifty.planner.plan import estimate, plan
    from thrifty.recipe import Recipe
    from thrifty.trainer import Trainer

_PUBLIC = {
    "Trainer": "thrifty.trainer",
    "Recipe": "thrifty.recipe",
    "Method": "thrifty.method",
    "registry": "thrifty.method",
    "InputError": "thrifty.errors",
    "NotApplicable": "thrifty.errors",
    "ThriftyError": "thrifty.errors",
    "plan": "thrifty.planner.plan",
    "estimate": "thrifty.planner.plan",
}

__all__ = [
    "InputError",
    "Method",
    "NotApplicable",
    "Recipe",
    "ThriftyError",
    "Trainer",
    "__version__",
    "estimate",
    "plan",
    "registry",
]


def __getattr__(name: str) -> Any:
    """Imports public names on first use, so that `import thrifty` stays cheap."""
    import importlib

    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'thrifty' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
