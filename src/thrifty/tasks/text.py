"""What the tasks on text have in common: the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from thrifty.data.encode import IGNORED
from thrifty.data.tokenizer import ensure_pad_token, train_tokenizer
from thrifty.errors import InputError
from thrifty.tasks import models
from thrifty.tasks.base import Processor, Sample, Task, TaskData, check_vocabulary, first_logits, forward_inputs
from thrifty.tasks.metrics import mean_losses

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_VOCAB_SIZE = 2048
"""Entries of a tokenizer that is trained on the spot, where no size is given."""


class TextTask(Task):
    """A task whose processor is a tokenizer."""

    def load_processor(
        self,
        processor_name_or_path: str | None,
        *,
        config: PreTrainedConfig | None = None,
        texts: Callable[[], list[str]] | None = None,
        vocab_size: int | None = None,
        trust_remote_code: bool = False,
        notes: list[str] | None = None,
    ) -> Processor:
        """See `Task.load_processor`. A tokenizer without padding token is given one, and a note says which."""
        return load_text_tokenizer(
            processor_name_or_path, texts, vocab_size, trust_remote_code=trust_remote_code, notes=notes
        )

    def config_overrides(self, processor: Processor) -> dict[str, Any]:
        """The vocabulary and the special token ids of a model from scratch are the tokenizer's."""
        if processor is None:
            return {}
        # An embedding is told its padding row and then never trains it, which must not happen to the end of a text.
        shared = processor.pad_token_id in (processor.eos_token_id, processor.bos_token_id, processor.unk_token_id)
        return {
            "vocab_size": len(processor),
            "pad_token_id": None if shared else processor.pad_token_id,
            "bos_token_id": processor.bos_token_id,
            "eos_token_id": processor.eos_token_id,
        }

    def validate(self, model: PreTrainedModel, data: TaskData, processor: Processor) -> None:
        """Checks the vocabulary besides what every task checks."""
        super().validate(model, data, processor)
        check_vocabulary(model, processor)


def load_text_tokenizer(
    name: str | None,
    texts: Callable[[], list[str]] | None,
    vocab_size: int | None,
    *,
    trust_remote_code: bool,
    notes: list[str] | None,
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer, or trains one on `texts()`; one without padding token is given one, and a note says which.

    Raises:
        InputError: There is none to load, and no text to train one on.
    """
    notes = [] if notes is None else notes
    if name is not None:
        tokenizer = models.load_tokenizer(name, trust_remote_code=trust_remote_code)
    elif texts is not None:
        tokenizer = train_tokenizer(texts(), vocab_size or DEFAULT_VOCAB_SIZE)
        notes.append(f"tokenizer: byte-level BPE trained on the training text, {len(tokenizer)} entries")
    else:
        raise InputError("there is no tokenizer", key="tokenizer_name_or_path", fix="name one")
    picked = ensure_pad_token(tokenizer)
    if picked:
        notes.append(picked)
    return tokenizer


class TokenTask(TextTask):
    """A language model: one label a token."""

    shift: bool
    """Whether position i predicts token i + 1."""

    def per_sample_loss(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """See `Task.per_sample_loss`: the mean over the labels that are not -100."""
        logits = first_logits(model(**forward_inputs(inputs)).logits)
        return mean_losses(logits, inputs["labels"].to(logits.device), shift=self.shift)

    def decoded_sample(self, data: TaskData, processor: Processor, index: int = 0) -> Sample:
        """See `Task.decoded_sample`: the sample as the collator gives it, trained stretches apart."""
        feature = data.train_dataset[index]
        batch = data.data_collator([feature])
        return _decode(batch["input_ids"][0].tolist(), batch["labels"][0].tolist(), processor)


def _decode(ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> Sample:
    parts: list[tuple[str, bool]] = []
    start = 0
    for end in range(1, len(ids) + 1):
        trained = labels[start] != IGNORED
        if end == len(ids) or (labels[end] != IGNORED) != trained:
            parts.append((str(tokenizer.decode(ids[start:end])), trained))
            start = end
    return Sample(parts)
