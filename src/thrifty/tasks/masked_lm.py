"""`masked-lm`: predict masked tokens from both sides, on plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thrifty.data.collate import MaskingCollator
from thrifty.data.masked import prepare_masked
from thrifty.data.sources import load_sources
from thrifty.errors import InputError
from thrifty.tasks.base import Processor, TaskData, check_positions
from thrifty.tasks.metrics import LanguageModelMetrics
from thrifty.tasks.text import TokenTask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from thrifty.data.options import DataOptions
    from thrifty.data.sources import Sources


class MaskedLM(TokenTask):
    """Masked-token prediction, on the format `text`, .txt files and the embedded corpus.

    The collator has `set_epoch(epoch)`; whoever trains calls it at the start of each epoch for new masks.
    """

    name = "masked-lm"
    auto_name = "AutoModelForMaskedLM"
    auto_table = "MASKED_LM"
    shift = False

    def prepare(
        self,
        options: DataOptions,
        processor: Processor,
        config: PreTrainedConfig | None = None,
        *,
        sources: Sources | None = None,
    ) -> TaskData:
        """See `Task.prepare`. Metrics over masked tokens: nll, perplexity and accuracy."""
        check_positions(config, options)
        if processor.mask_token_id is None:
            raise InputError(
                "the tokenizer has no mask token",
                key="tokenizer_name_or_path",
                value=processor.name_or_path,
                fix="a tokenizer of a masked language model, or task: causal-lm",
            )
        if not 0 < options.mlm_probability < 1:
            raise InputError("not a share", key="mlm_probability", value=options.mlm_probability, fix="0 < share < 1")
        sources = sources or load_sources(options)
        train, held = sources.map(lambda part, key: prepare_masked(part, processor, options, key=key))
        metrics = LanguageModelMetrics(shift=False)
        return TaskData(
            train_dataset=train.dataset,
            eval_dataset=held.dataset if held else None,
            data_collator=MaskingCollator(
                pad_token_id=processor.pad_token_id,
                mask_token_id=processor.mask_token_id,
                vocab_size=len(processor),
                special_token_ids=frozenset(int(i) for i in np.asarray(processor.all_special_ids)),
                mlm_probability=options.mlm_probability,
                seed=options.seed,
            ),
            compute_metrics=metrics.compute if held else None,
            preprocess_logits_for_metrics=metrics.reduce if held else None,
            notes=[*sources.notes, *train.notes, *(f"validation: {note}" for note in (held.notes if held else []))],
        )
