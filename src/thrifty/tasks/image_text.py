"""`image-text`: match images and captions (CLIP)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from thrifty.data.collate import PairCollator
from thrifty.data.encode import threads
from thrifty.data.prepare import check_lengths, too_long_error
from thrifty.data.sources import load_sources, record_error
from thrifty.data.tokenizer import affixes, eos_id
from thrifty.errors import InputError
from thrifty.tasks import models
from thrifty.tasks.base import Processor, Sample, Task, TaskData, check_vocabulary, forward_inputs
from thrifty.tasks.image import check_pixels, describe_pixels, load_image_processor, transformed, with_images
from thrifty.tasks.metrics import pair_embeddings, retrieval_metrics
from thrifty.tasks.text import load_text_tokenizer

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedModel

    from thrifty.data.options import DataOptions
    from thrifty.data.sources import Sources

_CAPTIONS = ("caption", "text")


class ImageText(Task):
    """Contrastive learning: records with `image` (a path or an image) and `caption` (or `text`)."""

    name = "image-text"
    auto_name = "AutoModelForZeroShotImageClassification"
    auto_table = "ZERO_SHOT_IMAGE_CLASSIFICATION"
    token_unit = "pairs"
    loss_without_labels = True

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
        """See `Task.load_processor`: image processor and tokenizer in one."""
        from transformers import CLIPProcessor

        notes = [] if notes is None else notes
        if processor_name_or_path is not None:
            from transformers import AutoProcessor

            models.check_model_path(processor_name_or_path)
            try:
                return AutoProcessor.from_pretrained(processor_name_or_path, trust_remote_code=trust_remote_code)
            except Exception as error:  # hub and parser errors of many classes
                raise InputError(
                    f"no processor can be loaded ({str(error).strip().splitlines()[0][:200]})",
                    key="model_name_or_path",
                    value=processor_name_or_path,
                    fix="a folder with processor_config.json and tokenizer.json",
                ) from error
        vision = getattr(config, "vision_config", None)
        tokenizer = load_text_tokenizer(None, texts, vocab_size, trust_remote_code=False, notes=notes)
        images = load_image_processor(None, vision, task=self.name, notes=notes)
        return CLIPProcessor(image_processor=images, tokenizer=tokenizer)

    def build_model(
        self,
        model_name_or_path: str | None,
        model_config: models.ModelConfig,
        *,
        processor: Processor = None,
        **how: Any,
    ) -> PreTrainedModel:
        """See `Task.build_model`: the text tower of a model from scratch has the tokenizer's vocabulary."""
        if isinstance(model_config, Mapping) and processor is not None:
            tokenizer = processor.tokenizer
            own = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
            own |= {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
            model_config = {**model_config, "text_config": {**own, **model_config.get("text_config", {})}}
        return super().build_model(model_name_or_path, model_config, processor=processor, **how)

    def prepare(
        self,
        options: DataOptions,
        processor: Processor,
        config: PreTrainedConfig | None = None,
        *,
        sources: Sources | None = None,
    ) -> TaskData:
        """See `Task.prepare`. Metrics: retrieval accuracy in both directions over the whole validation data."""
        check_lengths(options)
        sources = sources or load_sources(options)
        limit = models.positions(getattr(config, "text_config", None) or config) if config is not None else None
        longest = min(options.max_length, limit or options.max_length)
        notes = list(sources.notes)
        train, held = sources.map(lambda part, key: _encode(part, processor, options, longest, key, notes))
        return TaskData(
            train_dataset=train,
            eval_dataset=held,
            data_collator=PairCollator(pad_token_id=processor.tokenizer.pad_token_id),
            compute_metrics=retrieval_metrics if held else None,
            preprocess_logits_for_metrics=pair_embeddings if held else None,
            notes=notes,
        )

    def validate(self, model: PreTrainedModel, data: TaskData, processor: Processor) -> None:
        """Checks besides that tokens and pixels fit the two towers."""
        super().validate(model, data, processor)
        check_vocabulary(getattr(model, "text_model", model), processor.tokenizer)
        check_pixels(getattr(model.config, "vision_config", model.config), data)

    def decoded_sample(self, data: TaskData, processor: Processor, index: int = 0) -> Sample:
        """See `Task.decoded_sample`: the image's shape and the caption."""
        row = data.train_dataset[index]
        caption = processor.tokenizer.decode(row["input_ids"])
        return Sample([(f"{describe_pixels(row['pixel_values'])}: {caption}", False)])

    def per_sample_loss(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """See `Task.per_sample_loss`: the mean of both directions' cross-entropy within the batch."""
        import torch
        from torch.nn import functional

        logits = model(**{**forward_inputs(inputs), "return_loss": False}).logits_per_text.float()
        own = torch.arange(len(logits), device=logits.device)
        return sum(functional.cross_entropy(part, own, reduction="none") for part in (logits, logits.T)) / 2  # pyright: ignore

    def count_tokens(self, batch: Mapping[str, Any]) -> int:
        """Returns the number of pairs."""
        return int(batch["pixel_values"].shape[0])


def _encode(
    part: list[str] | Dataset, processor: Processor, options: DataOptions, limit: int, key: str, notes: list[str]
) -> Dataset:
    """Returns rows with `input_ids`, `pixel_values` and `sample_id`; every caption ends with the end token."""
    import numpy as np

    column = None if isinstance(part, list) else next((n for n in _CAPTIONS if n in part.column_names), None)
    if isinstance(part, list) or column is None or "image" not in part.column_names:
        raise InputError(
            "no pairs of image and caption",
            key=key,
            value=getattr(options, key, None),
            fix="give .jsonl or .csv with the columns image (a path) and caption (column_mapping: {theirs: ours})",
        )
    captions: list[Any] = list(part[column])
    for number, caption in enumerate(captions, start=1):
        if not isinstance(caption, str) or not caption:
            raise record_error(key, options, number, ValueError(f"{column} is missing, empty or not text"))
    tokenizer = processor.tokenizer
    around, eos = affixes(tokenizer), eos_id(tokenizer)
    end = [] if around.suffix else [eos]
    with threads(options.preprocessing_num_workers):
        encoded = tokenizer(captions, add_special_tokens=False, verbose=False)["input_ids"]
    rows = [[*around.wrap(ids), *end] for ids in encoded]
    too_long = [len(row) for row in rows if len(row) > limit]
    if too_long and options.long_samples != "truncate":
        why = "" if limit == options.max_length else f" (the model has positions for {limit})"
        raise too_long_error(key, options, len(too_long), max(too_long), why)
    if too_long:
        # The embedding of a text is read at its end token, so that one must stay.
        tail = len(around.suffix) + len(end)
        rows = [row if len(row) <= limit else [*row[: limit - tail], *row[len(row) - tail :]] for row in rows]
        notes.append(f"{key}: {len(too_long)} captions cut off at {limit} tokens (the longest had {max(too_long)})")
    images = with_images(part, options, key)
    import pyarrow as pa

    ids = pa.array([np.asarray(row, dtype=np.int32) for row in rows])
    return transformed(images, processor.image_processor, {"input_ids": ids})
