"""`image-classification`: one class for an image."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.data.collate import ImageCollator
from thrifty.data.images import check_image
from thrifty.data.sources import load_sources
from thrifty.errors import InputError
from thrifty.tasks import models
from thrifty.tasks.base import Processor, Sample, Task, TaskData, first_logits, forward_inputs
from thrifty.tasks.labels import adapt_labels, class_names, label_indices, names_of, require_label
from thrifty.tasks.metrics import class_metrics, class_predictions

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedModel

    from thrifty.data.options import DataOptions
    from thrifty.data.sources import Sources


class ImageClassification(Task):
    """Classes of images: a folder with one sub-folder a class, or records with `image` (a path or an image) and
    `label`."""

    name = "image-classification"
    token_unit = "images"

    def auto_class(self) -> Any:
        """Returns `AutoModelForImageClassification`."""
        from transformers import AutoModelForImageClassification

        return AutoModelForImageClassification

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
        """Loads an image processor, or makes one: resized to the model's `image_size`, pixels from -1 to 1, no chance.

        Raises:
            InputError: There is none, or the model's image size is not known.
        """
        del texts, vocab_size
        if importlib.util.find_spec("PIL") is None:
            raise InputError(
                "images need Pillow, which is not installed", key="task", value=self.name, fix="pip install pillow"
            )
        from transformers import AutoImageProcessor, ViTImageProcessorPil

        if processor_name_or_path is not None:
            models.check_model_path(processor_name_or_path)
            try:
                return AutoImageProcessor.from_pretrained(processor_name_or_path, trust_remote_code=trust_remote_code)
            except Exception as error:  # hub and parser errors of many classes
                raise InputError(
                    f"no image processor can be loaded ({str(error).strip().splitlines()[0][:200]})",
                    key="model_name_or_path",
                    value=processor_name_or_path,
                    fix="a folder with preprocessor_config.json",
                ) from error
        size, channels = getattr(config, "image_size", None), int(getattr(config, "num_channels", 3))
        if size is None:
            raise InputError("the image size is not known", key="model_config.image_size", fix="e.g. image_size: 28")
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        if notes is not None:
            notes.append(
                f"images: {height} x {width}, {channels} channel{'s' if channels > 1 else ''}, pixels from -1 to 1"
            )
        return ViTImageProcessorPil(
            size={"height": height, "width": width}, image_mean=[0.5] * channels, image_std=[0.5] * channels
        )

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
        train = _labelled(sources.train, options, sources.train_key)
        names = class_names(train, options, key=sources.train_key)
        known = names_of(config)
        if known and set(names) <= set(known):
            names = known  # the order of a head that was trained before
        held = None
        if sources.validation is not None:
            held = _labelled(sources.validation, options, sources.validation_key)
        notes = [*sources.notes, f"{len(names)} classes: {', '.join(names[:10])}{' ...' if len(names) > 10 else ''}"]
        return TaskData(
            train_dataset=_transformed(train, processor, options, names, sources.train_key),
            eval_dataset=_transformed(held, processor, options, names, sources.validation_key) if held else None,
            data_collator=ImageCollator(),
            compute_metrics=class_metrics if held else None,
            preprocess_logits_for_metrics=class_predictions if held else None,
            label_names=names,
            notes=notes,
        )

    def validate(self, model: PreTrainedModel, data: TaskData, processor: Processor) -> None:
        """Checks besides that the images have the model's size and channels."""
        super().validate(model, data, processor)
        shape = tuple(data.train_dataset[0]["pixel_values"].shape)
        size, channels = getattr(model.config, "image_size", None), getattr(model.config, "num_channels", shape[0])
        expected = (channels, *(size if isinstance(size, (list, tuple)) else (size, size)))
        if size is not None and shape != expected:
            raise InputError(
                f"the images come out as {shape} (channels, height, width), the model takes {expected}",
                key="model_config.image_size",
                value=size,
                fix="the model's own preprocessor_config.json",
            )

    def decoded_sample(self, data: TaskData, processor: Processor, index: int = 0) -> Sample:
        """See `Task.decoded_sample`: the shape and range of the pixels."""
        row = data.train_dataset[index]
        pixels = row["pixel_values"]
        text = f"image {tuple(pixels.shape)}, pixels {float(pixels.min()):.2f} to {float(pixels.max()):.2f}"
        return Sample([(text, False)], label=(data.label_names or [])[row["labels"]])

    def per_sample_loss(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """See `Task.per_sample_loss`."""
        from torch.nn import functional

        logits = first_logits(model(**forward_inputs(inputs)).logits)
        return functional.cross_entropy(logits.float(), inputs["labels"].to(logits.device), reduction="none")

    def count_tokens(self, batch: Mapping[str, Any]) -> int:
        """Returns the number of images."""
        return int(batch["pixel_values"].shape[0])


def _labelled(part: list[str] | Dataset, options: DataOptions, key: str) -> Dataset:
    """Finds the columns of image and label, and turns paths (relative to the data's own folder) into images."""
    from datasets import Image, Value

    value = getattr(options, key, None)
    if isinstance(part, list):
        raise InputError("no images", key=key, value=value, fix="give a folder with one sub-folder of images a class")
    part = require_label(part, options, "image", key)
    feature = part.features["image"]
    if isinstance(feature, Image):
        return part
    if feature != Value("string"):
        raise InputError("the column 'image' holds neither images nor paths", key=key, value=value, fix="give paths")
    folder = Path(str(value)).expanduser().parent
    paths = [folder / str(name) for name in part["image"]]
    for path in paths:
        check_image(path, key=key)
    return (
        part.remove_columns(["image"]).add_column("image", [str(path) for path in paths]).cast_column("image", Image())
    )  # pyright: ignore


def _transformed(part: Dataset, processor: Processor, options: DataOptions, names: list[str], key: str) -> Dataset:
    """Returns rows with `pixel_values`, `labels` and `sample_id`; the pixels are computed when a row is read.

    The raw image is stored under the name `pixel_values`, so that nothing that drops columns unknown to the model
    drops it.
    """
    from datasets import Dataset, Features, Image, Value

    labels = label_indices(part, names, options, key=key)
    table = part.select_columns(["image"]).rename_column("image", "pixel_values")
    features = Features({"pixel_values": Image(), "labels": Value("int64"), "sample_id": Value("int64")})
    raw = table.with_format("arrow")[:]["pixel_values"]
    columns = {"pixel_values": raw, "labels": labels, "sample_id": np.arange(len(part), dtype=np.int64)}
    import pyarrow as pa

    dataset = Dataset(pa.table(columns)).cast(features)  # pyright: ignore[reportArgumentType]
    return dataset.with_transform(PixelTransform(processor))


class PixelTransform:
    """Turns the raw images of a batch of rows into `pixel_values`, float32 of shape (C, H, W) each."""

    def __init__(self, processor: Processor) -> None:
        self.processor = processor
        mean = getattr(processor, "image_mean", None)
        self.mode = "L" if mean is not None and len(mean) == 1 else "RGB"

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        images: Sequence[Any] | None = rows.get("pixel_values")
        if images is None:
            return rows
        ready = [np.asarray(image.convert(self.mode)) for image in images]
        if self.mode == "L":
            ready = [image[:, :, None] for image in ready]
        pixels = self.processor(ready, input_data_format="channels_last", return_tensors="pt")["pixel_values"]
        return {**rows, "pixel_values": list(pixels)}
