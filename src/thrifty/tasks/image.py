"""What the tasks on images have in common: the image processor, the pixels, and how a folder or a record names them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.data.images import check_image
from thrifty.errors import InputError
from thrifty.tasks import models
from thrifty.tasks.base import Processor, Sample, Task, TaskData

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedModel

    from thrifty.data.options import DataOptions


class ImageTask(Task):
    """A task whose processor is an image processor."""

    token_unit = "images"

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
        """See `Task.load_processor`."""
        del texts, vocab_size
        return load_image_processor(
            processor_name_or_path, config, task=self.name, trust_remote_code=trust_remote_code, notes=notes
        )

    def validate(self, model: PreTrainedModel, data: TaskData, processor: Processor) -> None:
        """Checks besides that the images have the model's size and channels."""
        super().validate(model, data, processor)
        check_pixels(model.config, data)

    def decoded_sample(self, data: TaskData, processor: Processor, index: int = 0) -> Sample:
        """See `Task.decoded_sample`: the shape and range of the pixels."""
        row = data.train_dataset[index]
        names = data.label_names
        return Sample([(describe_pixels(row["pixel_values"]), False)], label=names[row["labels"]] if names else None)

    def count_tokens(self, batch: Mapping[str, Any]) -> int:
        """Returns the number of images."""
        return int(batch["pixel_values"].shape[0])


def load_image_processor(
    name: str | None, config: Any, *, task: str, trust_remote_code: bool = False, notes: list[str] | None = None
) -> Any:
    """Loads an image processor, or makes one: resized to the model's `image_size`, pixels from -1 to 1, no chance.

    Raises:
        InputError: There is none, or the model's image size is not known.
    """
    if importlib.util.find_spec("PIL") is None:
        raise InputError("images need Pillow, which is not installed", key="task", value=task, fix="pip install pillow")
    from transformers import AutoImageProcessor, ViTImageProcessorPil

    if name is not None:
        models.check_model_path(name)
        try:
            return AutoImageProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
        except Exception as error:  # hub and parser errors of many classes
            raise InputError(
                f"no image processor can be loaded ({str(error).strip().splitlines()[0][:200]})",
                key="model_name_or_path",
                value=name,
                fix="a folder with preprocessor_config.json",
            ) from error
    size, channels = getattr(config, "image_size", None), int(getattr(config, "num_channels", 3))
    if size is None:
        raise InputError("the image size is not known", key="model_config.image_size", fix="e.g. image_size: 28")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    if notes is not None:
        plural = "s" if channels > 1 else ""
        notes.append(f"images: {height} x {width}, {channels} channel{plural}, pixels from -1 to 1")
    return ViTImageProcessorPil(
        size={"height": height, "width": width}, image_mean=[0.5] * channels, image_std=[0.5] * channels
    )


def check_pixels(config: Any, data: TaskData) -> None:
    """Checks that the images come out in the size and with the channels that `config` states.

    Raises:
        InputError: They do not.
    """
    shape = tuple(data.train_dataset[0]["pixel_values"].shape)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", shape[0])
    expected = (channels, *(size if isinstance(size, (list, tuple)) else (size, size)))
    if size is not None and shape != expected:
        raise InputError(
            f"the images come out as {shape} (channels, height, width), the model takes {expected}",
            key="model_config.image_size",
            value=size,
            fix="the model's own preprocessor_config.json",
        )


def describe_pixels(pixels: Any) -> str:
    """Returns an image as a person may read it: shape and range."""
    return f"image {tuple(pixels.shape)}, pixels {float(pixels.min()):.2f} to {float(pixels.max()):.2f}"


def with_images(part: Dataset, options: DataOptions, key: str) -> Dataset:
    """Returns records whose column `image` holds images: paths (relative to the data's own folder) are looked up.

    Raises:
        InputError: The column holds neither, or a path is no image.
    """
    from datasets import Image, Value

    value = getattr(options, key, None)
    feature = part.features["image"]
    if isinstance(feature, Image):
        return part
    if feature != Value("string"):
        raise InputError("the column 'image' holds neither images nor paths", key=key, value=value, fix="give paths")
    folder = Path(str(value)).expanduser().parent
    paths = [folder / str(name) for name in part["image"]]
    for path in paths:
        check_image(path, key=key)
    named: Any = part.remove_columns(["image"]).add_column("image", [str(path) for path in paths])  # pyright: ignore
    return named.cast_column("image", Image())


def transformed(part: Dataset, image_processor: Any, columns: Mapping[str, Any]) -> Dataset:
    """Returns rows with `pixel_values`, `columns` and `sample_id`; the pixels are computed when a row is read.

    The raw image is stored under the name `pixel_values`, so that nothing that drops columns unknown to the model
    drops it.
    """
    import pyarrow as pa
    from datasets import Dataset, Image

    table = part.select_columns(["image"]).rename_column("image", "pixel_values")
    raw = table.with_format("arrow")[:]["pixel_values"]
    ids = np.arange(len(part), dtype=np.int64)
    rows = Dataset(pa.table({"pixel_values": raw, **columns, "sample_id": ids}))  # pyright: ignore[reportArgumentType]
    return rows.cast_column("pixel_values", Image()).with_transform(PixelTransform(image_processor))


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
