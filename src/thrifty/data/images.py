"""Image folders: one sub-folder a class, in alphabetical order, or images alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thrifty.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


def read_image_folder(folder: Path, *, key: str = "train_file") -> Dataset:
    """Reads a folder of images.

    Args:
        folder: Holds one sub-folder a class; the images lie in it at any depth. Hidden files are left out. Without
            sub-folders it holds the images themselves, which then have no label.
        key: The configuration key that names the folder, for messages.

    Returns:
        Rows with `image` (decoded when a row is read) and `label` (a `ClassLabel` with the sub-folders' names).

    Raises:
        InputError: There are no sub-folders, a class has no image, or a file is no readable image.
    """
    from datasets import ClassLabel, Dataset, Features, Image

    value = str(folder)
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    alone = _images(folder) if not classes else []
    if alone:
        for path in alone:
            check_image(path, key=key)
        return Dataset.from_dict({"image": [str(path) for path in alone]}, features=Features({"image": Image()}))
    if not classes:
        raise InputError(
            "a folder without sub-folders",
            key=key,
            value=value,
            fix="for text give one file (.jsonl .json .csv .parquet .arrow .txt), for images one sub-folder a class",
        )
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = _images(folder / name)
        if not found:
            raise InputError(
                f"the class {name!r} holds no image",
                key=key,
                value=value,
                fix=f"put images ({' '.join(IMAGE_SUFFIXES)}) into it or remove the folder",
            )
        for path in found:
            check_image(path, key=key)
            paths.append(str(path))
            labels.append(label)
    features = Features({"image": Image(), "label": ClassLabel(names=classes)})
    return Dataset.from_dict({"image": paths, "label": labels}, features=features)


def check_image(path: Path, *, key: str) -> None:
    """Reads the header of an image.

    Raises:
        InputError: `path` is missing or is no image.
    """
    import PIL
    import PIL.Image

    try:
        with PIL.Image.open(path) as image:
            image.size  # noqa: B018  opening reads the header and nothing more
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise InputError(
            f"not a readable image ({type(error).__name__})", key=key, value=str(path), fix="replace or remove it"
        ) from error


def _images(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file() and not path.name.startswith(".")
    )
