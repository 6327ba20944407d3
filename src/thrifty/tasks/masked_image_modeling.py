"""`masked-image-modeling`: fill in the patches that were taken out of an image (masked auto-encoders)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.data.collate import NoiseCollator
from thrifty.data.sources import load_sources
from thrifty.errors import InputError
from thrifty.tasks.base import Processor, TaskData, forward_inputs
from thrifty.tasks.image import ImageTask, transformed, with_images
from thrifty.tasks.metrics import reconstruction_metrics

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedModel

    from thrifty.data.options import DataOptions
    from thrifty.data.sources import Sources


class MaskedImageModeling(ImageTask):
    """Reconstruction of masked patches with ViTMAE: a folder of images (labels are not used), or records with `image`.

    Which patches are masked is decided by `noise` in the batch, a function of seed, epoch and image; the collator has
    `set_epoch(epoch)`.
    """

    name = "masked-image-modeling"
    auto_name = "AutoModelForPreTraining"
    auto_table = "PRETRAINING"
    loss_without_labels = True

    def does(self, classes: set[str]) -> bool:
        """See `Task.does`; the table of pre-training classes also holds those of text."""
        return "ViTMAEForPreTraining" in classes

    def adapt_model(self, model: PreTrainedModel, processor: Processor) -> None:
        """Fills position tables that are still zero."""
        fill_position_tables(model)

    def prepare(
        self,
        options: DataOptions,
        processor: Processor,
        config: PreTrainedConfig | None = None,
        *,
        sources: Sources | None = None,
    ) -> TaskData:
        """See `Task.prepare`. Images are opened and transformed when they are drawn. Metric: the loss alone."""
        sources = sources or load_sources(options)
        train, held = sources.map(lambda part, key: transformed(_images(part, options, key), processor, {}))
        return TaskData(
            train_dataset=train,
            eval_dataset=held,
            data_collator=NoiseCollator(patches=patch_count(config), seed=options.seed),
            compute_metrics=reconstruction_metrics if held else None,
            # Reconstructions would fill the memory with a copy of all images.
            preprocess_logits_for_metrics=_nothing if held else None,
            notes=list(sources.notes),
        )

    def validate(self, model: PreTrainedModel, data: TaskData, processor: Processor) -> None:
        """Checks besides that the model is a masked auto-encoder."""
        if not self.does({base.__name__ for base in type(model).__mro__}):
            raise InputError(
                f"{type(model).__name__} is no masked auto-encoder of images",
                key="task",
                value=self.name,
                fix="a model of the type vit_mae",
            )
        super().validate(model, data, processor)

    def per_sample_loss(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """See `Task.per_sample_loss`: the mean squared error of each image over its masked patches.

        Without `noise` in the batch all images are masked alike, and always so: losses then compare.
        """
        import torch

        bare: Any = getattr(model, "module", model)
        inner: Any = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
        given = forward_inputs(inputs)
        if "noise" not in given:
            row = torch.rand(patch_count(inner.config), generator=torch.Generator().manual_seed(0))
            given["noise"] = row.to(inputs["pixel_values"].device).expand(len(inputs["pixel_values"]), -1)
        out = model(**given)
        target = inner.patchify(inputs["pixel_values"])
        if inner.config.norm_pix_loss:
            mean, variance = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
            target = (target - mean) / (variance + 1e-6).sqrt()
        errors = (out.logits.float() - target).square().mean(dim=-1)
        return (errors * out.mask).sum(dim=1) / out.mask.sum(dim=1)


def patch_count(config: Any) -> int:
    """Returns the number of patches of an image."""

    def pair(value: Any) -> tuple[int, int]:
        return (int(value[0]), int(value[1])) if isinstance(value, (list, tuple)) else (int(value), int(value))

    (height, width), (down, across) = pair(config.image_size), pair(config.patch_size)
    return (height // down) * (width // across)


def fill_position_tables(model: Any) -> bool:
    """Gives a ViTMAE whose frozen position tables are zero the sine and cosine ones they should hold, in place.

    transformers leaves both tables of a model from scratch at zero: the encoder's is skipped because its neighbour was
    initialised before, the decoder's is zeroed after it was filled. They never train, so that the model could not tell
    one patch from another.

    Returns:
        Whether a table was filled.
    """
    import torch

    filled = False
    embeddings, decoder = model.vit.embeddings, model.decoder
    for owner, name in ((embeddings, "position_embeddings"), (decoder, "decoder_pos_embed")):
        table = getattr(owner, name)
        if table.is_meta or isinstance(table, torch._subclasses.FakeTensor) or bool(table.any()):
            continue
        side = round((table.shape[1] - 1) ** 0.5)
        values = torch.zeros(table.shape[1:])
        values[1:] = torch.from_numpy(sine_cosine_table(side, table.shape[2])).float()
        with torch.no_grad():
            table.copy_(values[None])
        filled = True
    return filled


def sine_cosine_table(side: int, width: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the position table of MAE for `side` x `side` patches in rows, shape (side * side, width).

    The first half of the channels encodes the column and the second the row, each as sines then cosines, which is the
    order in the published weights.
    """
    rate = 1.0 / 10000 ** (np.arange(width // 4) / (width / 4))
    rows, columns = (grid.reshape(-1) for grid in np.meshgrid(np.arange(side), np.arange(side), indexing="ij"))
    parts = [function(np.outer(axis, rate)) for axis in (columns, rows) for function in (np.sin, np.cos)]
    return np.concatenate(parts, axis=1)


def _images(part: list[str] | Dataset, options: DataOptions, key: str) -> Dataset:
    if isinstance(part, list) or "image" not in part.column_names:
        raise InputError(
            "no images",
            key=key,
            value=getattr(options, key, None),
            fix="give a folder of images, or records with the column image (column_mapping: {NAME: image})",
        )
    return with_images(part, options, key)


def _nothing(logits: Any, labels: Any) -> Any:
    del labels
    first = logits[0] if isinstance(logits, (tuple, list)) else logits
    return first.new_zeros(first.shape[0])
