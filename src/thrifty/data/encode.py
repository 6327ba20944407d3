"""From text to token ids and labels.

Labels are -100 where the model is not trained. A token takes part as soon as it holds one character of a trained
stretch. The end-of-sequence token closes every text and every answer, is trained on, and is never doubled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from thrifty.data.render import Rendered
from thrifty.data.tokenizer import Affixes, eos_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
_CHUNK_CHARACTERS = 4_000_000

Ids = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Encoded:
    """One text in tokens."""

    ids: Ids
    """Token ids, shape (length,)."""
    labels: Ids
    """The same ids, or -100 where the model is not trained, shape (length,)."""
    ends: np.ndarray[Any, np.dtype[np.int64]]
    """For each token the number of UTF-8 bytes of the text up to its end, shape (length,)."""


def encode_rendered(
    rendered: Sequence[Rendered],
    tokenizer: PreTrainedTokenizerBase,
    around: Affixes,
    *,
    train_on_prompt: bool = False,
    workers: int | None = None,
) -> Iterator[Encoded]:
    """Encodes texts with their trained spans, some thousand at a time through the tokenizer's own batch encoding."""
    eos = eos_id(tokenizer)
    for chunk in _chunks(rendered):
        with threads(workers):
            batch = tokenizer(
                [item.text for item in chunk], add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        for item, ids, offsets in zip(chunk, batch["input_ids"], batch["offset_mapping"], strict=True):
            yield _labelled(item, list(ids), offsets, around, eos, train_on_prompt)


def _labelled(
    item: Rendered,
    ids: list[int],
    offsets: Sequence[tuple[int, int]],
    around: Affixes,
    eos: int,
    train_on_prompt: bool,
) -> Encoded:
    bounds = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    labels = np.full(len(ids), IGNORED, dtype=np.int32)
    array = np.asarray(ids, dtype=np.int32)
    for start, end in item.spans:
        # A token without characters of its own (a lone byte, a marker) belongs where it stands.
        inside = (bounds[:, 0] < end) & (np.maximum(bounds[:, 1], bounds[:, 0] + 1) > start)
        labels[inside] = array[inside]
    trained = labels[labels != IGNORED]
    closed = len(trained) > 0 and trained[-1] == eos
    if train_on_prompt:
        labels = array.copy()
    ends = _byte_ends(item.text, bounds[:, 1])
    answer_is_last = bool(item.spans) and not item.text[item.spans[-1][1] :].strip()
    if answer_is_last and not closed:
        array, labels, ends = (
            np.append(array, eos),
            np.append(labels, eos),
            np.append(ends, ends[-1:] if len(ends) else 0),
        )
    prefix = around.prefix
    if not item.templated and prefix and array[: len(prefix)].tolist() != prefix:
        array = np.concatenate([prefix, array])
        labels = np.concatenate([np.full(len(prefix), IGNORED), labels])
        ends = np.concatenate([np.zeros(len(prefix)), ends])
    return Encoded(array.astype(np.int32), labels.astype(np.int32), ends.astype(np.int64))


def _byte_ends(text: str, ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if text.isascii():
        return ends
    widths = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    sizes = 1 + (widths >= 0x80).astype(np.int64) + (widths >= 0x800) + (widths >= 0x10000)
    return np.concatenate([[0], np.cumsum(sizes)])[ends]


def encode_stream(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, around: Affixes, *, workers: int | None = None
) -> tuple[Ids, Ids]:
    """Joins documents into one stream of tokens, in which every token of the text has a token before it.

    The stream is `E d1 E d2 E ...` with E the end-of-sequence token, or `B d1 E B d2 E ...` where the tokenizer begins
    every text with a token B of its own; B is then never trained on. A document above 4 million characters is encoded
    in parts that end at line breaks.

    Returns:
        Token ids and labels, both of shape (tokens,).
    """
    eos = eos_id(tokenizer)
    begin = [] if around.prefix == [eos] else list(around.prefix)
    ids: list[Ids] = []
    labels: list[Ids] = []

    def add(values: Sequence[int], trained: bool = True) -> None:
        array = np.asarray(values, dtype=np.int32)
        ids.append(array)
        labels.append(array if trained else np.full(len(array), IGNORED, dtype=np.int32))

    if not begin:
        add([eos], trained=False)
    for chunk in _chunks([part for document in documents for part in _parts(document)]):
        with threads(workers):
            batch = tokenizer([part.text for part in chunk], add_special_tokens=False, verbose=False)["input_ids"]
        for part, encoded in zip(chunk, batch, strict=True):
            if part.first and begin:
                add(begin, trained=False)
            add(encoded)
            if part.last and (not encoded or encoded[-1] != eos):
                add([eos])
    return np.concatenate(ids), np.concatenate(labels)


def blocks(length: int, max_length: int) -> Iterator[tuple[int, int]]:
    """Cuts `length` tokens into ranges of at most `max_length` that overlap by one token.

    A causal model predicts every token of a block but the first; with the overlap every token of the whole but the very
    first is predicted exactly once. The last range is as short as what is left (at least two tokens, if there are two).
    """
    start = 0
    while True:
        end = min(start + max_length, length)
        yield start, end
        if end >= length:
            return
        start = end - 1


@dataclass(frozen=True)
class _Part:
    text: str
    first: bool
    last: bool


def _parts(document: str) -> list[_Part]:
    texts: list[str] = []
    start = 0
    while len(document) - start > _CHUNK_CHARACTERS:
        cut = document.rfind("\n", start, start + _CHUNK_CHARACTERS) + 1
        cut = cut if cut > start else start + _CHUNK_CHARACTERS
        texts.append(document[start:cut])
        start = cut
    texts.append(document[start:])
    return [_Part(text, index == 0, index == len(texts) - 1) for index, text in enumerate(texts)]


_Text = TypeVar("_Text", _Part, Rendered)


def _chunks(items: Sequence[_Text]) -> Iterator[list[_Text]]:
    chunk: list[_Text] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += len(item.text)
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


@contextlib.contextmanager
def threads(workers: int | None) -> Iterator[None]:
    """Lets the tokenizer use its own threads, or just one. The environment variable that says so is put back."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers == 1 else "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
