"""Scores of training samples: computed once, kept on disk, looked at, and used by other runs.

A file holds one row a sample: `sample_id`, `score`, and `text` where the sample can be shown. Parquet is what this
module writes into the cache; CSV and JSON lines are read as well, so that scores may come from anywhere.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from thrifty.data.cache import cache_dir
from thrifty.errors import InputError, did_you_mean

SUFFIXES = (".parquet", ".csv", ".jsonl")
_TEXT_LENGTH = 500


@dataclass
class Scores:
    """One number for each sample.

    Args:
        ids: Sample ids, int64 of shape (n,).
        values: Scores, float64 of shape (n,).
        texts: What the samples say, where known.
        about: Method, settings, model, data: JSON-ready.
    """

    ids: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    texts: list[str] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, ids: Any, key: str = "scores", value: Any = None) -> np.ndarray[Any, Any]:
        """The scores of these samples, in this order.

        Raises:
            InputError: One of them has no score.
        """
        index = {int(known): place for place, known in enumerate(self.ids)}
        missing = [int(i) for i in ids if int(i) not in index]
        if missing:
            raise InputError(
                f"{len(missing)} of {len(ids)} samples have no score, the first is {missing[0]}",
                key=key,
                value=value,
                fix="score the same data (the ids are places in the training data)",
            )
        return self.values[[index[int(i)] for i in ids]]

    def order(self, *, largest: bool = True) -> np.ndarray[Any, Any]:
        """Rows by score, the largest (or smallest) first; of equal ones the smaller id."""
        return np.lexsort((self.ids, -self.values if largest else self.values))

    def save(self, path: Path) -> None:
        """Writes by suffix: .parquet, .csv or .jsonl. The parquet file also holds `about`."""
        suffix = _checked_suffix(path, "output")
        texts = self.texts if self.texts is not None else [None] * len(self)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        if suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            columns = {"sample_id": self.ids, "score": self.values, "text": pa.array(texts, type=pa.string())}
            table = pa.table(columns).replace_schema_metadata({"thrifty": json.dumps(self.about)})
            pq.write_table(table, temporary)
        else:
            rows = list(zip(self.ids.tolist(), self.values.tolist(), texts, strict=True))
            with temporary.open("w", encoding="utf-8", newline="") as file:
                if suffix == ".csv":
                    csv.writer(file).writerows([("sample_id", "score", "text"), *rows])
                else:
                    names = ("sample_id", "score", "text")
                    file.writelines(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
        temporary.replace(path)


def load(path: str | Path, key: str = "scores") -> Scores:
    """Reads a file of scores.

    Raises:
        InputError: There is no such file, or it has no columns `sample_id` and `score` with numbers.
    """
    from thrifty.data.reading import read_records

    file = Path(path).expanduser()
    _checked_suffix(file, key)
    records = read_records(file, key=key)
    for name in ("sample_id", "score"):
        if name not in records.column_names:
            raise InputError(
                f"there is no column {name!r}{did_you_mean(name, records.column_names)}",
                key=key,
                value=str(path),
                fix="give the columns sample_id and score",
            )
    try:
        ids = np.asarray([int(i) for i in records["sample_id"]], dtype=np.int64)
        values = np.asarray([float(v) for v in records["score"]], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"not a number ({error})", key=key, value=str(path), fix="repair that row") from error
    if not np.isfinite(values).all() or len(set(ids.tolist())) != len(ids):
        raise InputError(
            "a score is not finite, or a sample_id occurs twice", key=key, value=str(path), fix="repair that row"
        )
    texts = [str(text or "") for text in records["text"]] if "text" in records.column_names else None
    return Scores(ids, values, texts, _about(file))


def folder() -> Path:
    """Where computed scores are kept."""
    return cache_dir() / "scores"


def stored() -> list[Path]:
    """The files of computed scores, the newest first."""
    return sorted(folder().glob("*.parquet"), key=lambda file: -file.stat().st_mtime)


def find(name: str) -> Path:
    """The file that is meant by a path, or by the name (or its beginning) of stored scores.

    Raises:
        InputError: There is none, or several.
    """
    path = Path(name).expanduser()
    if path.exists() or path.suffix in SUFFIXES:
        return path
    fitting = [file for file in stored() if file.stem.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    names = [file.stem for file in stored()]
    what = f"{len(fitting)} stored scores begin so" if fitting else f"no such scores{did_you_mean(name, names)}"
    raise InputError(what, key="name", value=name, fix="a file, or a name that `thrifty scores list` shows")


def _about(file: Path) -> dict[str, Any]:
    if file.suffix.lower() != ".parquet":
        return {}
    import pyarrow.parquet as pq

    metadata = pq.read_schema(file).metadata or {}
    return json.loads(metadata.get(b"thrifty", b"{}"))


def _checked_suffix(path: Path, key: str) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"the suffix {suffix or '(none)'} is not known{did_you_mean(suffix, SUFFIXES)}",
            key=key,
            value=str(path),
            fix=f"one of {' '.join(SUFFIXES)}",
        )
    return suffix


def shorten(text: str) -> str:
    """A sample's text as it is kept beside its score."""
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 3] + "..."
