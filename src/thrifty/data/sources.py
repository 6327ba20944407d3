"""Where the training and the validation part come from, before anything is turned into tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from thrifty.data import corpus, reading
from thrifty.data.formats import Conversation, converter, detect_format, rename_columns
from thrifty.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

    from thrifty.data.options import DataOptions

T = TypeVar("T")


@dataclass
class Sources:
    """The two parts of the data: documents (a stream of text) or records."""

    train: list[str] | Dataset
    validation: list[str] | Dataset | None
    train_key: str = "train_file"
    """The configuration key that named the training part."""
    validation_key: str = "validation_file"
    notes: list[str] = field(default_factory=list)
    """One line for the log about each thing that was decided."""

    def map(self, make: Callable[[Any, str], T]) -> tuple[T, T | None]:
        """Does the same to both parts: `make(part, key)`. The second is None where nothing is held out."""
        train = make(self.train, self.train_key)
        return train, None if self.validation is None else make(self.validation, self.validation_key)


def load_sources(options: DataOptions) -> Sources:
    """Reads what `options` names; without any name, the embedded corpus.

    Raises:
        InputError: Two sources are named, or one of them is at fault.
    """
    if options.train_file and options.dataset_name:
        raise InputError(
            "two training sources: train_file and dataset_name",
            key="dataset_name",
            value=options.dataset_name,
            fix="remove one of them",
        )
    if not 0 <= options.validation_fraction < 1:
        raise InputError(
            "not a share", key="validation_fraction", value=options.validation_fraction, fix="0 <= share < 1"
        )
    if options.dataset_name:
        return _from_hub(options)
    if options.train_file is None:
        return _embedded(options)
    notes: list[str] = []
    train = _read(options.train_file, "train_file", options)
    if options.validation_file:
        validation = _read(options.validation_file, "validation_file", options)
    else:
        train, validation = _hold_out(train, options, "train_file", notes)
    return Sources(train, validation, notes=notes, validation_key=_key(options))


def _key(options: DataOptions) -> str:
    return "validation_file" if options.validation_file else "dataset_name" if options.dataset_name else "train_file"


def _embedded(options: DataOptions) -> Sources:
    text = corpus.kjv()
    notes = [f"no train_file: the embedded corpus is used ({text.origin})"]
    validation: list[str] | Dataset = text.validation
    if options.validation_file:
        validation = _read(options.validation_file, "validation_file", options)
    else:
        notes.append(
            f"validation: {len(corpus.KJV_VALIDATION_BOOKS)} whole books, {', '.join(corpus.KJV_VALIDATION_BOOKS)}"
        )
    return Sources(text.train, validation, notes=notes, validation_key=_key(options))


def _from_hub(options: DataOptions) -> Sources:
    notes: list[str] = []
    name, config = str(options.dataset_name), options.dataset_config_name
    train = reading.read_hub(name, config=config, split=options.train_split)
    assert train is not None
    records: list[str] | Dataset = rename_columns(train, options, key="dataset_name")
    validation: list[str] | Dataset | None
    if options.validation_file:
        validation = _read(options.validation_file, "validation_file", options)
    else:
        split = options.validation_split or "validation"
        held = reading.read_hub(name, config=config, split=split, optional=options.validation_split is None)
        if held is not None:
            validation = rename_columns(held, options, key="dataset_name")
            notes.append(f"validation: the split {split!r}, {len(held)} records")
        else:
            records, validation = _hold_out(records, options, "dataset_name", notes)
    return Sources(records, validation, train_key="dataset_name", validation_key=_key(options), notes=notes)


def _read(path: str, key: str, options: DataOptions) -> list[str] | Dataset:
    records = reading.read_records(path, key=key)
    if Path(path).suffix.lower() == ".txt":
        return [str(records[0]["text"])]
    return rename_columns(records, options, key=key)


def _hold_out(
    part: list[str] | Dataset, options: DataOptions, key: str, notes: list[str]
) -> tuple[list[str] | Dataset, list[str] | Dataset | None]:
    """Holds out `validation_fraction`: the end of a text (from a line break on), or records drawn with `seed`."""
    share = options.validation_fraction
    if share == 0:
        notes.append("validation: none (validation_fraction is 0)")
        return part, None
    if isinstance(part, list):
        text = "".join(part)
        near = int(len(text) * (1 - share))
        cut = text.rfind("\n", len(text) // 2, near) + 1 or near
        if not text[:cut].strip() or not text[cut:].strip():
            raise _too_small(key, options)
        notes.append(f"validation: the last {len(text) - cut} of {len(text)} characters")
        return [text[:cut]], [text[cut:]]
    count = max(1, round(len(part) * share))
    if count >= len(part):
        raise _too_small(key, options)
    order = np.random.default_rng(options.seed).permutation(len(part))
    notes.append(f"validation: {count} of {len(part)} records, drawn with seed {options.seed}")
    return part.select(np.sort(order[count:])), part.select(np.sort(order[:count]))


def _too_small(key: str, options: DataOptions) -> InputError:
    value = options.train_file if key == "train_file" else options.dataset_name
    return InputError(
        "too little data to hold out a validation part",
        key=key,
        value=value,
        fix="give a validation_file, or validation_fraction: 0",
    )


def training_texts(sources: Sources, options: DataOptions, *, most_characters: int = 64_000_000) -> list[str]:
    """Returns the words of the training part, to train a tokenizer on: all strings of every record's known columns.

    Args:
        sources: What `load_sources` returned.
        options: The options it was given.
        most_characters: Stop after so many. A vocabulary hardly changes beyond.

    Raises:
        InputError: The data holds token ids and not text.
    """
    texts: list[str] = []
    size = 0
    for text in _texts(sources, options):
        texts.append(text)
        size += len(text)
        if size >= most_characters:
            break
    return texts


def _texts(sources: Sources, options: DataOptions) -> Any:
    if isinstance(sources.train, list):
        yield from sources.train
        return
    columns = sources.train.column_names
    if "image" in columns and "caption" in columns:
        yield from (str(record["caption"]) for record in sources.train.select_columns(["caption"]))  # pyright: ignore
        return
    if "label" in columns or ("labels" in columns and "input_ids" not in columns):
        names = [name for name in columns if name not in ("label", "labels")]
        for record in sources.train:
            yield from (str(record[name]) for name in names if isinstance(record[name], str))  # pyright: ignore
        return
    format_name = detect_format(columns, options.dataset_format)
    if format_name == "tokenized":
        raise InputError(
            "a tokenizer cannot be trained on token ids",
            key=sources.train_key,
            value=options.train_file or options.dataset_name,
            fix="give tokenizer_name_or_path",
        )
    convert = converter(format_name, chat=False)
    for number, record in enumerate(sources.train, start=1):
        try:
            example = convert(record)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            raise record_error(sources.train_key, options, number, error) from error
        if isinstance(example, Conversation):
            yield from (str(message["content"]) for message in example.messages)
        else:
            yield "".join(piece.text for piece in example)


def record_error(key: str, options: DataOptions, number: int, error: ValueError) -> InputError:
    """Returns the `InputError` for the record `number` (counted from 1) of the part that `key` names."""
    return InputError(
        f"record {number}: {error}",
        key=key,
        value=getattr(options, key, None),
        fix="repair or remove that record, or map the columns (column_mapping)",
    )
