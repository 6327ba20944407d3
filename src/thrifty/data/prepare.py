"""Tokenised, map-style training sets: deterministic, cached by content, with a `sample_id` in every sample.

A stream of documents (.txt files, the embedded corpus) is cut into blocks of `max_length` tokens that overlap by one,
so that every token of the text is predicted exactly once; the last block is shorter and stays. Records give one sample
each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.data.cache import cache_dir, content_hash, is_whole, write_folder
from thrifty.data.encode import IGNORED, Encoded, blocks, encode_rendered, encode_stream
from thrifty.data.formats import converter, describe, detect_format
from thrifty.data.render import ensure_chat_template, render
from thrifty.data.sources import record_error
from thrifty.data.tokenizer import affixes, fingerprint, require_fast
from thrifty.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from thrifty.data.options import DataOptions

LONG_SAMPLES = ("split", "truncate", "error")
_CACHE_ABOVE_CHARACTERS = 1_000_000
_VERSION = "1"


@dataclass
class Prepared:
    """A tokenised data set and what is known about it."""

    dataset: Dataset
    """Columns `input_ids` (int32 list), `labels` (int32 list, -100: not trained on), `sample_id` (int64)."""
    trained_tokens: int
    """How many tokens a causal model predicts in one pass (the first of each sample is not predicted)."""
    bytes: int | None
    """UTF-8 bytes of the text whose tokens are predicted; None where answers alone are trained on."""
    notes: list[str] = field(default_factory=list)


@dataclass
class Samples:
    """Collects samples of one data set."""

    ids: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    bytes: int | None = 0
    notes: list[str] = field(default_factory=list)

    def add(self, ids: Any, labels: Any) -> None:
        """Adds one sample: token ids and labels of the same length."""
        self.ids.append(ids)
        self.labels.append(labels)

    def prepared(self) -> Prepared:
        """Returns the finished data set."""
        trained = sum(int(np.count_nonzero(labels[1:] != IGNORED)) for labels in self.labels)
        columns = {"input_ids": _lists(self.ids), "labels": _lists(self.labels)}
        return Prepared(_numbered(columns), trained, self.bytes, self.notes)


def prepare_causal(
    part: list[str] | Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    *,
    key: str = "train_file",
) -> Prepared:
    """Turns documents or records of any known format into samples for a causal language model.

    Args:
        part: Documents or records, as `thrifty.data.sources.load_sources` gives them.
        tokenizer: A fast tokenizer. It is given the plain chat template where the data needs one and it has none.
        options: `max_length`, `long_samples`, `train_on_prompt` and `dataset_format` count here.
        key: The configuration key that names the part, for messages.

    Raises:
        InputError: A record is broken, longer than allowed, or nothing is left to train on.
    """
    check_lengths(options)
    require_fast(tokenizer)
    if isinstance(part, list):
        return _cached(part, tokenizer, options, "stream", lambda: _stream(part, tokenizer, options))
    format_name = detect_format(part.column_names, options.dataset_format)
    notes = [describe(format_name, options, part.column_names)]
    if format_name == "tokenized":
        prepared = _tokenized(part, tokenizer, options, key).prepared()
    else:
        has_template = tokenizer.chat_template is not None
        if format_name in ("messages", "sharegpt") or _is_chat(part, format_name):
            template_note = ensure_chat_template(tokenizer)
            notes += [template_note] if template_note else []
        convert = converter(format_name, chat=has_template)
        rendered: list[Any] = []
        for number, record in enumerate(part, start=1):
            try:
                rendered.append(render(convert(record), tokenizer))  # pyright: ignore[reportArgumentType]
            except ValueError as error:
                raise record_error(key, options, number, error) from error
        prepared = _cached(
            [f"{item.text}\0{item.spans}" for item in rendered],
            tokenizer,
            options,
            format_name,
            lambda: _records(rendered, tokenizer, options, format_name, key),
        )
    prepared.notes = notes + prepared.notes
    if len(prepared.dataset) == 0 or prepared.trained_tokens == 0:
        raise InputError(
            "no token is left to train on",
            key=key,
            value=getattr(options, key, None),
            fix="check dataset_format and column_mapping, raise max_length, or set train_on_prompt: true",
        )
    return prepared


def check_lengths(options: DataOptions) -> None:
    """Checks `max_length` and `long_samples`.

    Raises:
        InputError: One of them is out of its range.
    """
    if options.max_length < 2:
        raise InputError(
            "a sample needs two tokens or more", key="max_length", value=options.max_length, fix="e.g. 256"
        )
    if options.long_samples not in LONG_SAMPLES:
        raise InputError(
            "unknown choice", key="long_samples", value=options.long_samples, fix=f"one of {', '.join(LONG_SAMPLES)}"
        )


def _is_chat(part: Dataset, format_name: str) -> bool:
    return format_name == "prompt-completion" and isinstance(part[0]["prompt"], list)


def _stream(documents: list[str], tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> Samples:
    ids, labels = encode_stream(documents, tokenizer, affixes(tokenizer), workers=options.preprocessing_num_workers)
    samples = Samples(bytes=sum(len(document.encode("utf-8", "surrogatepass")) for document in documents))
    for start, end in blocks(len(ids), options.max_length):
        samples.add(ids[start:end], labels[start:end])
    samples.notes.append(
        f"{len(documents)} documents, {len(ids)} tokens, in {len(samples.ids)} blocks of {options.max_length} that "
        f"overlap by one token (the last: {len(samples.ids[-1])})"
    )
    return samples


def _records(
    rendered: Sequence[Any], tokenizer: PreTrainedTokenizerBase, options: DataOptions, format_name: str, key: str
) -> Samples:
    whole = format_name == "text"
    empty = 0
    if whole:
        kept = [item for item in rendered if item.text]
        empty, rendered = len(rendered) - len(kept), kept
    encoded = encode_rendered(
        rendered,
        tokenizer,
        affixes(tokenizer),
        train_on_prompt=options.train_on_prompt,
        workers=options.preprocessing_num_workers,
    )
    samples = Samples(bytes=0 if whole else None)
    fit_samples(samples, encoded, options, splittable=whole, key=key)
    if empty:
        samples.notes.append(f"{empty} empty records left out")
    return samples


def fit_samples(
    samples: Samples, encoded: Iterable[Encoded], options: DataOptions, *, splittable: bool, key: str
) -> None:
    """Adds encoded texts to `samples`, none longer than `max_length`: longer ones are split, cut or refused.

    Raises:
        InputError: There are longer ones, and they may be neither split nor cut.
    """
    limit = options.max_length
    too_long, longest, untrained = 0, 0, 0
    for item in encoded:
        length = len(item.ids)
        longest = max(longest, length)
        ranges: Iterable[tuple[int, int]] = [(0, length)]
        if length > limit:
            too_long += 1
            if options.long_samples == "error" or (options.long_samples == "split" and not splittable):
                continue
            ranges = [(0, limit)] if options.long_samples == "truncate" else blocks(length, limit)
        for start, end in ranges:
            if not np.any(item.labels[start + 1 : end] != IGNORED):
                untrained += 1
                continue
            samples.add(item.ids[start:end], item.labels[start:end])
            if samples.bytes is not None:
                samples.bytes += int(item.ends[end - 1] - item.ends[start])
    if not too_long:
        pass
    elif options.long_samples == "error" or (options.long_samples == "split" and not splittable):
        why = "" if options.long_samples == "error" else " (only plain text can be split)"
        raise too_long_error(key, options, too_long, longest, why)
    else:
        done = "cut off at" if options.long_samples == "truncate" else "split into pieces of"
        samples.notes.append(f"{too_long} samples {done} {limit} tokens (the longest had {longest})")
    if untrained:
        samples.notes.append(f"{untrained} samples have no token to train on and are left out")


def too_long_error(key: str, options: DataOptions, count: int, longest: int, why: str = "") -> InputError:
    """Returns the `InputError` for `count` samples above `max_length`, the longest of which has `longest` tokens."""
    return InputError(
        f"{count} samples are longer than max_length={options.max_length}, the longest has {longest} tokens{why}",
        key=key,
        value=getattr(options, key, None),
        fix=f"max_length: {longest}, or long_samples: truncate",
    )


def _tokenized(part: Dataset, tokenizer: PreTrainedTokenizerBase, options: DataOptions, key: str) -> Samples:
    size = len(tokenizer)
    labelled = "labels" in part.column_names
    samples = Samples(bytes=None)

    def encoded() -> Iterator[Encoded]:
        for number, record in enumerate(part, start=1):
            try:
                ids = _token_ids(record["input_ids"], size, "input_ids")  # pyright: ignore
                labels = _token_ids(record["labels"], size, "labels", IGNORED) if labelled else ids  # pyright: ignore
                if len(ids) != len(labels):
                    raise ValueError(f"{len(ids)} input_ids but {len(labels)} labels")
            except ValueError as error:
                raise record_error(key, options, number, error) from error
            yield Encoded(ids, labels, np.zeros(len(ids), dtype=np.int64))

    fit_samples(samples, encoded(), options, splittable=not labelled, key=key)
    return samples


def _token_ids(values: Any, size: int, column: str, *also: int) -> Any:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{column} is not a list of token ids") from error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{column} is not a list of token ids")
    wrong = array[((array < 0) | (array >= size)) & ~np.isin(array, also)]
    if len(wrong):
        raise ValueError(f"{column} holds {wrong[0]}, but the tokenizer has the ids 0 to {size - 1}")
    return array.astype(np.int32)


def _lists(arrays: Sequence[Any]) -> Any:
    import pyarrow as pa

    lengths = np.fromiter((len(array) for array in arrays), dtype=np.int64, count=len(arrays))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    flat = np.concatenate(arrays).astype(np.int32) if arrays else np.zeros(0, dtype=np.int32)
    if offsets[-1] < 2**31:
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(flat))
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _numbered(columns: dict[str, Any]) -> Dataset:
    import pyarrow as pa
    from datasets import Dataset

    count = len(columns["input_ids"])
    return Dataset(pa.table({**columns, "sample_id": pa.array(np.arange(count, dtype=np.int64))}))  # pyright: ignore


def _cached(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    kind: str,
    build: Callable[[], Samples],
) -> Prepared:
    """Builds a data set, or maps it from the cache where the same text was tokenised in the same way before.

    A cache that cannot be written is left alone: the result is the same, in memory.
    """
    if sum(map(len, texts)) < _CACHE_ABOVE_CHARACTERS:
        return build().prepared()
    from datasets import Dataset

    how = [
        _VERSION,
        kind,
        fingerprint(tokenizer),
        str(options.max_length),
        options.long_samples,
        str(options.train_on_prompt),
    ]
    folder = cache_dir() / "prepared" / content_hash([*how, *texts])
    data, facts = folder / "data.arrow", folder / "facts.json"
    if is_whole(folder):
        known = json.loads(facts.read_text(encoding="utf-8"))
        dataset = Dataset.from_file(str(data))
        return Prepared(dataset, known["trained_tokens"], known["bytes"], known["notes"])
    prepared = build().prepared()

    def save(temporary: Path) -> None:
        import pyarrow as pa

        table = prepared.dataset.with_format("arrow")[:]
        with pa.OSFile(str(temporary / data.name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:  # pyright: ignore
            writer.write_table(table)
        content = {
            "trained_tokens": prepared.trained_tokens,
            "bytes": prepared.bytes,
            "notes": prepared.notes,
        }
        (temporary / facts.name).write_text(json.dumps(content), encoding="utf-8")

    write_folder(folder, save)
    return prepared
