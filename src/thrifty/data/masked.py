"""Samples for masked language models: text between the tokenizer's special tokens, masked later by the collator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.data.encode import threads
from thrifty.data.formats import detect_format
from thrifty.data.prepare import Prepared, Samples, check_lengths
from thrifty.data.sources import record_error
from thrifty.data.tokenizer import affixes
from thrifty.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from thrifty.data.options import DataOptions


def prepare_masked(
    part: list[str] | Dataset, tokenizer: PreTrainedTokenizerBase, options: DataOptions, *, key: str = "train_file"
) -> Prepared:
    """Turns documents or records of the format `text` into samples of at most `max_length` tokens, special ones
    included.

    Documents are cut into full blocks one after another; the last one of each document is shorter. Records give one
    sample each; a longer one is split, cut or refused as `long_samples` says. `labels` equal `input_ids` here.

    Raises:
        InputError: The format is another one, a record is broken or longer than allowed, or there is no text.
    """
    check_lengths(options)
    around = affixes(tokenizer)
    room = options.max_length - len(around.prefix) - len(around.suffix)
    if room < 1:
        raise InputError(
            "no room for text between the special tokens", key="max_length", value=options.max_length, fix="e.g. 128"
        )
    streams = isinstance(part, list)
    texts = part if isinstance(part, list) else _texts(part, options, key)
    with threads(options.preprocessing_num_workers):
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    samples = Samples(bytes=None)
    too_long, longest = 0, 0
    for ids in encoded:
        length = len(ids)
        longest = max(longest, length)
        if length > room and not streams:
            too_long += 1
            if options.long_samples == "truncate":
                ids, length = ids[:room], room
        for start in range(0, length, room):
            wrapped = np.asarray(around.wrap(ids[start : start + room]), dtype=np.int32)
            samples.add(wrapped, wrapped)
    if too_long and options.long_samples == "error":
        whole = longest + len(around.prefix) + len(around.suffix)
        raise InputError(
            f"{too_long} samples are longer than max_length={options.max_length}, the longest has {whole} tokens",
            key=key,
            value=getattr(options, key, None),
            fix=f"max_length: {whole}, or long_samples: split",
        )
    if too_long:
        samples.notes.append(f"{too_long} samples longer than {options.max_length} tokens: {options.long_samples}")
    if not samples.ids:
        raise InputError("there is no text", key=key, value=getattr(options, key, None), fix="give records with text")
    samples.notes.append(f"{len(samples.ids)} samples of at most {options.max_length} tokens")
    return samples.prepared()


def _texts(part: Dataset, options: DataOptions, key: str) -> list[str]:
    format_name = detect_format(part.column_names, options.dataset_format)
    if format_name != "text":
        raise InputError(
            f"masked-lm takes plain text, but the data is {format_name}",
            key=key,
            value=getattr(options, key, None),
            fix="text_column: NAME, or task: causal-lm",
        )
    texts: list[Any] = list(part["text"])
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            kind = "missing" if text is None else type(text).__name__
            raise record_error(key, options, number, ValueError(f"text is {kind}, not text"))
    return texts
