"""What several verbs share about their arguments and their output."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from thrifty.errors import InputError

Samples = Annotated[
    int | None, typer.Option("--samples", help="Samples of the data set, to say how long the run takes.")
]
Epochs = Annotated[float | None, typer.Option("--epochs", help="Passes over them; default the run file's, or 3.")]
MeanLength = Annotated[int | None, typer.Option("--mean-len", help="Mean tokens of a sample, where shorter.")]


def split_arguments(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Divides `[FILE] key=value ...` into the file and the overrides.

    Raises:
        InputError: There are two files.

    >>> split_arguments(["my.yaml", "seed=1"])
    ('my.yaml', ['seed=1'])
    """
    files = [word for word in words if not _is_override(word)]
    if len(files) > 1:
        raise InputError(f"'{files[0]}' and '{files[1]}' cannot both be the run file", fix="one file, then key=value")
    return (files[0] if files else None), [word for word in words if _is_override(word)]


def quiet() -> None:
    """Keeps the libraries' progress bars and notes out of our output, unless the user asked for them. Call it first."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # transformers imports torchao where it is installed, whose enumerations torch warns about.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    # The profiler notes each start and stop, and every block that is older than it.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # On import these name every kernel that is not for this machine.
    for library in ("torchao", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(library).setLevel(logging.ERROR)


def _is_override(word: str) -> bool:
    # A path may hold an equals sign too, but not before its first slash or dot: keys are words.
    key, equals, _ = word.partition("=")
    return bool(equals) and all(part.replace("_", "a").replace("-", "a").isalnum() for part in key.split("."))
