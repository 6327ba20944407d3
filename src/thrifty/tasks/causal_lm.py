"""`causal-lm`: predict the next token, on plain text or on the answers of conversations and instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thrifty.data.collate import CausalCollator
from thrifty.data.prepare import prepare_causal
from thrifty.data.sources import load_sources
from thrifty.errors import InputError
from thrifty.tasks.base import Processor, TaskData, check_positions
from thrifty.tasks.metrics import LanguageModelMetrics
from thrifty.tasks.text import TokenTask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from thrifty.data.options import DataOptions
    from thrifty.data.sources import Sources


class CausalLM(TokenTask):
    """Next-token prediction. Every format of `thrifty.data.formats`, .txt files and the embedded corpus."""

    name = "causal-lm"
    auto_name = "AutoModelForCausalLM"
    auto_table = "CAUSAL_LM"
    shift = True

    def prepare(
        self,
        options: DataOptions,
        processor: Processor,
        config: PreTrainedConfig | None = None,
        *,
        sources: Sources | None = None,
    ) -> TaskData:
        """See `Task.prepare`. Metrics: nll, perplexity, accuracy and, on plain text, bits_per_byte."""
        check_positions(config, options)
        sources = sources or load_sources(options)
        train, held = sources.map(lambda part, key: prepare_causal(part, processor, options, key=key))
        notes = [*sources.notes, *train.notes, *(f"validation: {note}" for note in (held.notes if held else []))]
        metrics = LanguageModelMetrics(
            shift=True,
            eval_bytes=held.bytes if held else None,
            eval_tokens=held.trained_tokens if held else None,
        )
        return TaskData(
            train_dataset=train.dataset,
            eval_dataset=held.dataset if held else None,
            data_collator=CausalCollator(pad_token_id=processor.pad_token_id),
            compute_metrics=metrics.compute if held else None,
            preprocess_logits_for_metrics=metrics.reduce if held else None,
            eval_bytes=held.bytes if held else None,
            eval_tokens=held.trained_tokens if held else None,
            train_tokens=train.trained_tokens,
            notes=notes,
        )

    def validate(self, model: PreTrainedModel, data: TaskData, processor: Processor) -> None:
        """Checks besides that the model predicts from the left only."""
        super().validate(model, data, processor)
        if getattr(model.config, "is_encoder_decoder", False):
            raise InputError(
                "an encoder-decoder model is no causal language model",
                key="task",
                value=self.name,
                fix="a decoder such as Llama or GPT-2",
            )
