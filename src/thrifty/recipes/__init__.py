"""Run files that are a good start: `thrifty recipes` lists, shows and copies them."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from thrifty.errors import InputError, did_you_mean


def names() -> list[str]:
    """All recipes."""
    return sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir() if path.name.endswith(".yaml"))


def read(name: str) -> str:
    """The run file as text.

    Raises:
        InputError: There is no such recipe.
    """
    stem = name.removesuffix(".yaml")
    if stem not in names():
        raise InputError(
            f"there is no such recipe{did_you_mean(stem, names())}", key="recipe", value=name, fix=", ".join(names())
        )
    return (_folder() / f"{stem}.yaml").read_text(encoding="utf-8")


def about(name: str) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines = []
    for line in read(name).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    text = " ".join(lines)
    return text.split(". ")[0].split(": ")[0].rstrip(".") + "."


def copy(name: str, target: str | Path) -> Path:
    """Writes a recipe where nothing stands yet.

    Args:
        name: Of the recipe.
        target: A file, or a folder that exists.

    Raises:
        InputError: There is no such recipe, or the target exists.
    """
    path = Path(target)
    if path.is_dir():
        path = path / f"{name.removesuffix('.yaml')}.yaml"
    content = read(name)
    if path.exists():
        raise InputError("exists already", key="target", value=str(path), fix="give another name, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def _folder() -> Traversable:
    return resources.files("thrifty.recipes")
