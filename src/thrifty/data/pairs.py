"""Samples for encoder-decoders: a source and a target text, each between the tokenizer's special tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.data.encode import threads
from thrifty.data.formats import Conversation, converter, detect_format
from thrifty.data.prepare import Prepared, Samples, check_lengths, too_long_error
from thrifty.data.sources import record_error
from thrifty.data.tokenizer import affixes, eos_id
from thrifty.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from thrifty.data.options import DataOptions


def prepare_pairs(
    part: list[str] | Dataset, tokenizer: PreTrainedTokenizerBase, options: DataOptions, *, key: str = "train_file"
) -> Prepared:
    """Turns records into samples of at most `max_length` tokens on either side: `input_ids` is the source, `labels` the
    target. Both end with the end-of-sequence token.

    Records of the format `text` are their own target, and a document (.txt) gives one such sample a line.

    Raises:
        InputError: The format has no two sides, a record is broken or longer than allowed, or there is no text.
    """
    check_lengths(options)
    pairs, notes = _pairs(part, options, key)
    around, eos = affixes(tokenizer), eos_id(tokenizer)
    end = [] if around.suffix and around.suffix[-1] == eos else [eos]
    samples = Samples(bytes=None, notes=notes)
    with threads(options.preprocessing_num_workers):
        sides = [
            tokenizer([pair[side] for pair in pairs], add_special_tokens=False, verbose=False)["input_ids"]
            for side in (0, 1)
        ]
    rows = [[np.asarray([*around.wrap(ids), *end], dtype=np.int32) for ids in side] for side in sides]
    limit = options.max_length
    too_long = [longest for pair in zip(*rows, strict=True) if (longest := max(map(len, pair))) > limit]
    if too_long and options.long_samples != "truncate":
        raise too_long_error(key, options, len(too_long), max(too_long), " (only plain text can be split)")
    for source, target in zip(*rows, strict=True):
        samples.add(*(ids if len(ids) <= limit else np.append(ids[: limit - 1], ids[-1:]) for ids in (source, target)))
    if too_long:
        samples.notes.append(f"{len(too_long)} samples cut off at {limit} tokens (the longest had {max(too_long)})")
    samples.notes.append(f"{len(pairs)} pairs of at most {limit} tokens")
    prepared = samples.prepared()
    prepared.trained_tokens = sum(len(labels) for labels in samples.labels)
    return prepared


def _pairs(part: list[str] | Dataset, options: DataOptions, key: str) -> tuple[list[tuple[str, str]], list[str]]:
    if isinstance(part, list):
        lines = [line for document in part for line in document.splitlines() if line.strip()]
        pairs, format_name = [(line, line) for line in lines], "text"
    else:
        format_name = detect_format(part.column_names, options.dataset_format)
        if format_name in ("messages", "sharegpt", "tokenized"):
            raise InputError(
                f"seq2seq-lm takes a source and a target, but the data is {format_name}",
                key=key,
                value=getattr(options, key, None),
                fix="give the columns source and target (column_mapping), or task: causal-lm",
            )
        convert = converter(format_name, chat=False)
        pairs = []
        for number, record in enumerate(part, start=1):
            try:
                pairs.append(_sides(convert(record)))  # pyright: ignore[reportArgumentType]
            except ValueError as error:
                raise record_error(key, options, number, error) from error
    if not pairs:
        raise InputError("there is no text", key=key, value=getattr(options, key, None), fix="give records with text")
    note = "each text is its own target: train it with a method that damages the source, such as a span masking one"
    return pairs, [note] if format_name == "text" else []


def _sides(example: Any) -> tuple[str, str]:
    if isinstance(example, Conversation):
        raise ValueError("the record is a conversation, not a source and a target")
    source = "".join(piece.text for piece in example if not piece.trained)
    target = "".join(piece.text for piece in example if piece.trained)
    return source or target, target
