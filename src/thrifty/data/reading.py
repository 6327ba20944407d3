"""Reading the user's files into a `datasets.Dataset`. Every fault names the key, the file, the place in it and the fix.

Nothing is written beside the files, nothing is unpacked and nothing is unpickled. A .txt file becomes one record with
the column `text`; an image folder gives `image` and `label`.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.data.cache import content_hash
from thrifty.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt")
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".npy", ".npz")
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
_CHUNK_RECORDS = 10_000


def read_records(path: str | Path, *, key: str = "train_file") -> Dataset:
    """Reads a local file, or a folder of images, by its suffix.

    Args:
        path: A .jsonl, .json, .csv, .parquet, .arrow or .txt file, or a folder with one sub-folder of images a class.
        key: The configuration key that names the path, for messages.

    Returns:
        One row a record, with the data's own columns.

    Raises:
        InputError: The path is missing, empty, of another kind, or its content is broken.
    """
    file = Path(path).expanduser()
    try:
        is_folder, exists = file.is_dir(), file.exists()
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", key=key, value=str(path), fix="check the path and the permissions"
        ) from error
    if is_folder:
        from thrifty.data.images import read_image_folder

        return read_image_folder(file, key=key)
    suffix = _checked_suffix(file, exists, key)
    try:
        raw = b"" if suffix in (".parquet", ".arrow") else file.read_bytes()
        size = file.stat().st_size
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", key=key, value=str(path), fix="check the permissions"
        ) from error
    if size == 0 or (raw and not raw.strip()):
        raise InputError("the file is empty", key=key, value=str(path), fix="give a file with records")

    fault = _Fault(key, str(path))
    if suffix in (".parquet", ".arrow"):
        table = _read_parquet(file, fault) if suffix == ".parquet" else _read_arrow(file, fault)
        stat = file.stat()
        identity = content_hash([str(file.resolve()), str(stat.st_size), str(stat.st_mtime_ns)])
    else:
        text = _decode(raw, fault)
        identity = content_hash([suffix, raw])
        if suffix == ".txt":
            table = _table([(1, {"text": text})], fault)
        elif suffix == ".csv":
            table = _table(_csv_rows(text, fault), fault)
        elif suffix == ".jsonl":
            table = _table(_jsonl_rows(text, fault), fault)
        else:
            table = _table(_json_rows(text, fault), fault)
    if table.num_rows == 0 or table.num_columns == 0:
        raise fault("the file holds no records", fix="give a file with records")
    return _dataset(table, identity, fault)


def read_hub(
    name: str, *, config: str | None = None, split: str = "train", optional: bool = False, key: str = "dataset_name"
) -> Dataset | None:
    """Reads one split of a data set of the Hugging Face hub: the only function here that may use the network.

    Args:
        name: A hub id, `owner/name`.
        config: Its configuration.
        split: The split to read.
        optional: Return None where there is no such split, instead of raising.
        key: The configuration key, for messages.

    Raises:
        InputError: It is no hub id, or the hub has no such data set, configuration or split, or cannot be reached.
    """
    import re

    import datasets

    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or Path(name).suffix in (
        *SUFFIXES,
        *_PICKLES,
        *_ARCHIVES,
    ):
        raise InputError("not a hub id", key=key, value=name, fix="owner/name; a local file goes under train_file")
    if Path(name).exists():
        raise InputError(
            "a local path, but this key takes a hub id", key=key, value=name, fix=f"train_file: a file in {name}"
        )
    try:
        found = datasets.load_dataset(name, config)
    except Exception as error:  # the hub client raises errors of many unrelated classes
        raise InputError(
            f"cannot be loaded from the hub ({_first_line(error)})",
            key=key,
            value=name,
            fix="check the id, dataset_config_name and the network (HF_HUB_OFFLINE), or give a train_file",
        ) from error
    splits = list(found)
    if split in splits:
        return found[split]  # pyright: ignore[reportReturnType, reportArgumentType]
    if optional:
        return None
    raise InputError(
        f"the data set has no split {split!r}{did_you_mean(split, map(str, splits))}",
        key=key,
        value=name,
        fix=f"one of {', '.join(map(str, splits))}",
    )


class _Fault:
    """Makes the `InputError`s about one file."""

    def __init__(self, key: str, path: str) -> None:
        self.key, self.path = key, path
        self.unit = "line" if path.lower().endswith((".jsonl", ".csv")) else "record"
        """What the numbers of rows count."""

    def __call__(self, message: str, *, fix: str) -> InputError:
        return InputError(message, key=self.key, value=self.path, fix=fix)


def _checked_suffix(file: Path, exists: bool, key: str) -> str:
    value = str(file)
    if not exists:
        parent = file.parent
        near = did_you_mean(file.name, (p.name for p in parent.iterdir())) if parent.is_dir() else ""
        looks_like_hub = file.suffix == "" and value.count("/") == 1 and not value.startswith((".", "/", "~"))
        fix = "a hub id goes under dataset_name" if looks_like_hub else "check the path"
        raise InputError(f"no such file{near}", key=key, value=value, fix=fix)
    if not file.is_file():
        raise InputError("not a regular file", key=key, value=value, fix="give a file")
    suffix = file.suffix.lower()
    if suffix in SUFFIXES:
        return suffix
    if suffix in _PICKLES:
        raise InputError(
            f"{suffix} files may run code when they are opened, so they are refused",
            key=key,
            value=value,
            fix="store the records as .jsonl or .parquet",
        )
    if suffix in _ARCHIVES:
        raise InputError("archives are not unpacked", key=key, value=value, fix="unpack it and give the file inside")
    raise InputError(
        f"the suffix {suffix or '(none)'} is not known{did_you_mean(suffix, SUFFIXES)}",
        key=key,
        value=value,
        fix=f"one of {' '.join(SUFFIXES)}, or a folder of images",
    )


def _decode(raw: bytes, fault: _Fault) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise fault(
            f"line {line} is not UTF-8 (byte {raw[error.start]:#04x})", fix="save the file in the encoding UTF-8"
        ) from error


def _jsonl_rows(text: str, fault: _Fault) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(io.StringIO(text, newline="\n"), start=1):
        if line.strip():
            yield number, _record(_json(line.strip(), fault, number), f"line {number}", fault)


def _json_rows(text: str, fault: _Fault) -> Iterable[tuple[int, dict[str, Any]]]:
    """A list of objects, an object with such a list under `data`, or (as many .json files are) one object a line."""
    first, _, rest = text.lstrip().partition("\n")
    if rest.strip() and first.lstrip().startswith("{") and first.rstrip().endswith("}") and _parses(first):
        return _jsonl_rows(text, fault)
    content = _json(text, fault, 1)
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise fault(f"holds {_kind(content)}", fix="a list of objects, or one object a line")
    return [(number, _record(row, f"record {number}", fault)) for number, row in enumerate(content, start=1)]


def _parses(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _json(text: str, fault: _Fault, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise fault(
            f"line {line + error.lineno - 1}, column {error.colno}: broken JSON ({error.msg})", fix="repair that line"
        ) from error
    except (RecursionError, ValueError) as error:
        raise fault(f"line {line}: JSON that cannot be read ({_first_line(error)})", fix="repair that line") from error


def _record(row: Any, place: str, fault: _Fault) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise fault(f"{place} is {_kind(row)}, not an object", fix='write each record as {"column": value, ...}')
    return row


def _csv_rows(text: str, fault: _Fault) -> Iterator[tuple[int, dict[str, Any]]]:
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # process-wide, so it is put back
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = [name.strip() for name in next(reader, [])]
        _check_header(header, fault)
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise fault(
                    f"line {reader.line_num} has {len(row)} fields, the header has {len(header)}",
                    fix="give every row as many fields, and quote text that holds commas or line breaks",
                )
            yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise fault(f"broken CSV ({error})", fix="quote fields with double quotes") from error
    finally:
        csv.field_size_limit(limit)


def _check_header(header: list[str], fault: _Fault) -> None:
    if len(header) == 1 and any(mark in header[0] for mark in (";", "\t", "|")):
        raise fault("the columns are not separated by commas", fix="save it with commas")
    for name in header:
        if not name:
            raise fault("a column has no name", fix="name every column in the first line")
        if header.count(name) > 1:
            raise fault(f"the column {name!r} occurs twice", fix="rename one of them")


def _table(rows: Iterable[tuple[int, dict[str, Any]]], fault: _Fault) -> pa.Table:
    """Turns numbered rows into a table, some thousand at a time, so that Python objects never hold the whole file."""
    import pyarrow as pa

    chunks: list[pa.Table] = []
    iterator = iter(rows)
    while numbered := list(itertools.islice(iterator, _CHUNK_RECORDS)):
        names = list(dict.fromkeys(name for _, row in numbered for name in row))
        columns = [_column(name, [(number, row.get(name)) for number, row in numbered], fault) for name in names]
        chunks.append(pa.table(columns, names=names))
    if not chunks:
        return pa.table({})
    try:
        return pa.concat_tables(chunks, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise fault(
            f"a column changes its type within the file ({_first_line(error)})", fix="give each column one type"
        ) from error


def _column(name: str, cells: list[tuple[int, Any]], fault: _Fault) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array([cell for _, cell in cells])
    except (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError) as error:
        first = next((kind for _, cell in cells if (kind := _kind(cell)) != "null"), "null")
        for number, cell in cells:
            if _kind(cell) not in (first, "null"):
                raise fault(
                    f"{fault.unit} {number}: column {name!r} is {_kind(cell)}, but {first} before",
                    fix="give each column one type",
                ) from error
        raise fault(f"column {name!r} cannot be stored ({_first_line(error)})", fix="repair that column") from error


def _read_parquet(file: Path, fault: _Fault) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise fault(f"not a readable parquet file ({_first_line(error)})", fix="write it again") from error


def _read_arrow(file: Path, fault: _Fault) -> pa.Table:
    """Reads either of Arrow's two IPC formats. The file stays mapped, so that it need not fit in memory."""
    import pyarrow as pa

    try:
        source = pa.memory_map(str(file))
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()
    except (pa.ArrowException, OSError) as error:
        raise fault(f"not a readable arrow file ({_first_line(error)})", fix="write it again") from error


def _dataset(table: pa.Table, identity: str, fault: _Fault) -> Dataset:
    from datasets import Dataset

    if len(set(table.column_names)) != table.num_columns:
        raise fault("two columns have the same name", fix="rename one of them")
    try:
        return Dataset(table, fingerprint=identity)  # pyright: ignore[reportArgumentType]
    except Exception as error:  # the file's own metadata may hold any declaration of features
        raise fault(f"the columns cannot be read ({_first_line(error)})", fix="write it again as .jsonl") from error


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        dict: "an object",
    }
    return "a list" if isinstance(value, list) else names.get(type(value), type(value).__name__)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
