"""`text-classification`: one class for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from thrifty.data.collate import ClassificationCollator
from thrifty.data.encode import threads
from thrifty.data.prepare import check_lengths, too_long_error
from thrifty.data.sources import load_sources, record_error
from thrifty.errors import InputError
from thrifty.tasks.base import Processor, Sample, TaskData, check_positions
from thrifty.tasks.labels import adapt_labels, class_losses, label_indices, require_label, settle_names
from thrifty.tasks.metrics import class_metrics, class_predictions
from thrifty.tasks.text import TextTask

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from thrifty.data.options import DataOptions
    from thrifty.data.sources import Sources

_PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"), ("sentence", None))
"""Names that stand for `text` and `text_pair` in well-known data sets."""


class TextClassification(TextTask):
    """Classes of texts: columns `text`, optionally `text_pair`, and `label`. The tokenizer places its own special
    tokens."""

    name = "text-classification"
    auto_name = "AutoModelForSequenceClassification"
    auto_table = "SEQUENCE_CLASSIFICATION"

    def adapt_config(
        self, config: PreTrainedConfig, processor: Processor, label_names: list[str] | None, *, from_scratch: bool
    ) -> bool:
        """Writes the classes into the configuration."""
        if label_names is None:
            return False
        config.problem_type = "single_label_classification"
        return adapt_labels(config, label_names, from_scratch=from_scratch)

    def adapt_model(self, model: PreTrainedModel, processor: Processor) -> None:
        """Tells a decoder the padding token, by which it finds the last token of each text.

        Only now: the embedding of a model that is built with it would not train that token, which may be a shared one.
        """
        if processor is not None and model.config.pad_token_id is None:
            model.config.pad_token_id = processor.pad_token_id

    def prepare(
        self,
        options: DataOptions,
        processor: Processor,
        config: PreTrainedConfig | None = None,
        *,
        sources: Sources | None = None,
    ) -> TaskData:
        """See `Task.prepare`. Metrics: accuracy and f1."""
        check_positions(config, options)
        check_lengths(options)
        sources = sources or load_sources(options)
        (train, notes), labelled = sources.map(lambda part, key: _labelled(part, options, key))
        held = labelled[0] if labelled else None
        names, note = settle_names(train, config, options, key=sources.train_key)
        notes = [*sources.notes, *notes, note]
        dataset = _encode(train, processor, options, names, sources.train_key, notes)
        return TaskData(
            train_dataset=dataset,
            eval_dataset=_encode(held, processor, options, names, sources.validation_key, notes) if held else None,
            data_collator=ClassificationCollator(pad_token_id=processor.pad_token_id),
            compute_metrics=class_metrics if held else None,
            preprocess_logits_for_metrics=class_predictions if held else None,
            label_names=names,
            notes=notes,
        )

    def decoded_sample(self, data: TaskData, processor: Processor, index: int = 0) -> Sample:
        """See `Task.decoded_sample`."""
        row = data.train_dataset[index]
        names = data.label_names or []
        return Sample([(str(processor.decode(row["input_ids"])), False)], label=names[row["labels"]])

    def per_sample_loss(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """See `Task.per_sample_loss`."""
        return class_losses(model, inputs)


def _labelled(part: list[str] | Dataset, options: DataOptions, key: str) -> tuple[Dataset, list[str]]:
    """Finds the columns of text and label."""
    if isinstance(part, list):
        raise InputError(
            "plain text without labels",
            key=key,
            value=getattr(options, key, None),
            fix="give .jsonl or .csv with the columns text and label",
        )
    notes: list[str] = []
    if "text" not in part.column_names:
        for first, second in _PAIRS:
            if first in part.column_names and (second is None or second in part.column_names):
                part = part.rename_column(first, "text")
                if second is not None:
                    part = part.rename_column(second, "text_pair")
                notes.append(f"text: the column {first!r}" + (f", text_pair: {second!r}" if second else ""))
                break
    return require_label(part, options, "text", key), notes


def _encode(
    part: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    names: list[str],
    key: str,
    notes: list[str],
) -> Dataset:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset

    columns = [name for name in ("text", "text_pair") if name in part.column_names]
    texts = [list(part[name]) for name in columns]
    for name, values in zip(columns, texts, strict=True):
        for number, value in enumerate(values, start=1):
            if not isinstance(value, str) or not (value or name == "text_pair"):
                kind = "missing or empty" if not value else type(value).__name__
                raise record_error(key, options, number, ValueError(f"{name} is {kind}, not text"))
    second = texts[1] if len(texts) > 1 else None
    with threads(options.preprocessing_num_workers):
        encoded = tokenizer(texts[0], second, verbose=False)
        longest = max(map(len, encoded["input_ids"]))
        if longest > options.max_length:
            too_long = sum(len(ids) > options.max_length for ids in encoded["input_ids"])
            if options.long_samples != "truncate":
                raise too_long_error(key, options, too_long, longest)
            encoded = tokenizer(texts[0], second, truncation=True, max_length=options.max_length, verbose=False)
            notes.append(
                f"{key}: {too_long} samples cut off at {options.max_length} tokens (the longest had {longest})"
            )
    table = {name: pa.array(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded}
    table["labels"] = pa.array(label_indices(part, names, options, key=key), type=pa.int64())
    table["sample_id"] = pa.array(np.arange(len(part), dtype=np.int64))
    return Dataset(pa.table(table))  # pyright: ignore[reportArgumentType]
