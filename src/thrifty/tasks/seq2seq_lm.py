"""`seq2seq-lm`: write a text from another one (T5, BART)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from thrifty.data.collate import Seq2SeqCollator
from thrifty.data.pairs import prepare_pairs
from thrifty.data.sources import load_sources
from thrifty.errors import InputError
from thrifty.tasks.base import Processor, Sample, TaskData, check_positions, first_logits
from thrifty.tasks.metrics import LanguageModelMetrics, mean_losses
from thrifty.tasks.text import TextTask

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from thrifty.data.options import DataOptions
    from thrifty.data.sources import Sources


class Seq2SeqLM(TextTask):
    """Pairs of texts: `source` and `target`, `prompt` and `completion`, or Alpaca's columns. Plain `text` is its own
    target, for methods that damage the source."""

    name = "seq2seq-lm"
    auto_name = "AutoModelForSeq2SeqLM"
    auto_table = "SEQ_TO_SEQ_CAUSAL_LM"
    shift = False

    def config_overrides(self, processor: Processor) -> dict[str, Any]:
        """The decoder of a model from scratch starts with the padding token, as T5's does."""
        start = {} if processor is None else {"decoder_start_token_id": processor.pad_token_id}
        return {**super().config_overrides(processor), **start}

    def adapt_model(self, model: PreTrainedModel, processor: Processor) -> None:
        """Tells the model the padding token, which stands in for labels that do not count.

        Only now: an embedding that is built with it would not train that token, which may be a shared one.
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
        """See `Task.prepare`. Metrics over the target's tokens: nll, perplexity and accuracy."""
        check_positions(config, options)
        sources = sources or load_sources(options)
        train, held = sources.map(lambda part, key: prepare_pairs(part, processor, options, key=key))
        metrics = LanguageModelMetrics(shift=False)
        return TaskData(
            train_dataset=train.dataset,
            eval_dataset=held.dataset if held else None,
            data_collator=Seq2SeqCollator(pad_token_id=processor.pad_token_id),
            compute_metrics=metrics.compute if held else None,
            preprocess_logits_for_metrics=metrics.reduce if held else None,
            train_tokens=train.trained_tokens,
            notes=[*sources.notes, *train.notes, *(f"validation: {note}" for note in (held.notes if held else []))],
        )

    def validate(self, model: PreTrainedModel, data: TaskData, processor: Processor) -> None:
        """Checks besides that the model has a decoder of its own."""
        super().validate(model, data, processor)
        if not getattr(model.config, "is_encoder_decoder", False):
            raise InputError(
                f"{type(model).__name__} has no encoder and decoder",
                key="task",
                value=self.name,
                fix="an encoder-decoder such as T5 or BART",
            )

    def decoded_sample(self, data: TaskData, processor: Processor, index: int = 0) -> Sample:
        """See `Task.decoded_sample`: the source, and the target as what is trained on."""
        row = data.train_dataset[index]
        return Sample(
            [(f"{processor.decode(row['input_ids'])} -> ", False), (str(processor.decode(row["labels"])), True)]
        )

    def per_sample_loss(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """See `Task.per_sample_loss`: the mean over the target's tokens. The decoder's input is made of them."""
        logits = first_logits(model(**{k: v for k, v in inputs.items() if k != "sample_id"}).logits)
        return mean_losses(logits, inputs["labels"].to(logits.device), shift=False)
