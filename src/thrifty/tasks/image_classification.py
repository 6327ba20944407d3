"""`image-classification`: one class for an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from thrifty.data.collate import ImageCollator
from thrifty.data.sources import load_sources
from thrifty.errors import InputError
from thrifty.tasks.base import Processor, TaskData
from thrifty.tasks.image import ImageTask, transformed, with_images
from thrifty.tasks.labels import adapt_labels, class_losses, label_indices, require_label, settle_names
from thrifty.tasks.metrics import class_metrics, class_predictions

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PreTrainedConfig

    from thrifty.data.options import DataOptions
    from thrifty.data.sources import Sources


class ImageClassification(ImageTask):
    """Classes of images: a folder with one sub-folder a class, or records with `image` (a path or an image) and
    `label`."""

    name = "image-classification"
    auto_name = "AutoModelForImageClassification"
    auto_table = "IMAGE_CLASSIFICATION"

    def adapt_config(
        self, config: PreTrainedConfig, processor: Processor, label_names: list[str] | None, *, from_scratch: bool
    ) -> bool:
        """Writes the classes into the configuration."""
        return False if label_names is None else adapt_labels(config, label_names, from_scratch=from_scratch)

    def prepare(
        self,
        options: DataOptions,
        processor: Processor,
        config: PreTrainedConfig | None = None,
        *,
        sources: Sources | None = None,
    ) -> TaskData:
        """See `Task.prepare`. Images are opened and transformed when they are drawn. Metrics: accuracy and f1."""
        sources = sources or load_sources(options)
        train, held = sources.map(lambda part, key: _labelled(part, options, key))
        names, note = settle_names(train, config, options, key=sources.train_key)

        def ready(part: Dataset, key: str) -> Dataset:
            return transformed(part, processor, {"labels": label_indices(part, names, options, key=key)})

        return TaskData(
            train_dataset=ready(train, sources.train_key),
            eval_dataset=ready(held, sources.validation_key) if held else None,
            data_collator=ImageCollator(),
            compute_metrics=class_metrics if held else None,
            preprocess_logits_for_metrics=class_predictions if held else None,
            label_names=names,
            notes=[*sources.notes, note],
        )

    def per_sample_loss(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """See `Task.per_sample_loss`."""
        return class_losses(model, inputs)


def _labelled(part: list[str] | Dataset, options: DataOptions, key: str) -> Dataset:
    """Finds the columns of image and label."""
    if isinstance(part, list):
        value = getattr(options, key, None)
        raise InputError("no images", key=key, value=value, fix="give a folder with one sub-folder of images a class")
    return with_images(require_label(part, options, "image", key), options, key)
