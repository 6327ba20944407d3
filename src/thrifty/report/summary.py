"""The result of a run in one file: `summary.json`."""

from __future__ import annotations

import contextlib
import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import thrifty
from thrifty.errors import InputError
from thrifty.report.files import from_json, to_json, write_atomic

SUMMARY_FILE = "summary.json"

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors", "numpy")


def write_summary(run_dir: str | os.PathLike[str], **fields: Any) -> Path:
    """Writes `summary.json` in one step, in place of an earlier one.

    Fields that the report and the model card know; all are optional, others are kept and shown in the file only:

    - results: `eval_loss` (nats per token), `perplexity`, `bits_per_byte`, other `eval_*` metrics, `train_loss`;
    - cost: `steps`, `epochs`, `tokens` (non-padding), `tokens_per_second`, `step_seconds`, `wall_seconds`,
      `peak_memory_bytes`, `mfu` (share of the device's peak rate);
    - what was trained: `task`, `model` (a name for people), `parameters`, `trainable_parameters`, `data` (a name for
      people), `base_model` and `dataset` (ids on the Hugging Face hub);
    - `methods`: the recipe in order, a list of names or of mappings with `name`, `title`, `reason`, `source` (text, or
      a list of texts; web addresses and arXiv numbers become links);
    - `prompt` and `sample_text`: a generated passage;
    - `hardware`: text, or a mapping of names to values.

    `versions` and `date` (UTC, ISO 8601) are added where they are not given.

    Args:
        run_dir: The run folder, which must exist.
        fields: The values; floats that are not finite are written as strings.

    Returns:
        The path of the file.

    Raises:
        TypeError: A value has no JSON form.
        OSError: The file cannot be written; an earlier one is left as it was.
    """
    added = {"versions": versions(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    return write_atomic(Path(run_dir) / SUMMARY_FILE, to_json({**added, **fields}, indent=2) + "\n")


def read_summary(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads `summary.json` of a run folder.

    Raises:
        InputError: The file is missing or is not a JSON object.
    """
    path = Path(run_dir) / SUMMARY_FILE
    if not path.is_file():
        raise InputError("there is no such file", key=str(path), fix="give the folder of a finished thrifty run")
    try:
        summary = from_json(path.read_bytes())
    except ValueError as error:
        raise InputError(f"it is not JSON ({error})", key=str(path), fix="train again, or restore the file") from error
    if not isinstance(summary, dict):
        raise InputError("it does not hold a JSON object", key=str(path), fix="train again, or restore the file")
    return summary


def versions() -> dict[str, str]:
    """Returns the versions of Python, thrifty and the libraries that shape a run, without importing them."""
    found = {"python": platform.python_version(), "thrifty": thrifty.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
