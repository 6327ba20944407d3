"""Collators: lists of samples to padded batches.

Padding is on the right and known by position, so the padding token may be any token, the end-of-sequence token
included. `attention_mask` is left out where nothing is padded: attention can then use its causal kernel. A collator's
output for a sample depends on that sample alone (but for the padding), so N micro-batches hold what one batch of N
holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.data.encode import IGNORED

if TYPE_CHECKING:
    import torch

Features = Sequence[Mapping[str, Any]]
Batch = dict[str, Any]


def pad(rows: Sequence[Sequence[int]], value: int, multiple: int | None = None) -> torch.Tensor:
    """Returns rows of integers as an int64 tensor of shape (rows, longest), filled up with `value` on the right."""
    import torch

    longest = max(len(row) for row in rows)
    if multiple:
        longest = -(-longest // multiple) * multiple
    out = torch.full((len(rows), longest), value, dtype=torch.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.as_tensor(np.asarray(row, dtype=np.int64))
    return out


def attention_mask(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor | None:
    """Returns the int64 mask of shape (rows, width) with 1 at tokens, or None where every row is `width` long."""
    import torch

    lengths = torch.tensor([len(row) for row in rows])
    if bool((lengths == width).all()):
        return None
    return (torch.arange(width)[None, :] < lengths[:, None]).long()


@dataclass
class CausalCollator:
    """Batches for causal language models.

    Returns `input_ids` (B, S), `labels` (B, S) with -100 at padding, `attention_mask` (B, S) where something is
    padded, and `sample_id` (B,) where the samples have one.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, features: Features) -> Batch:
        ids = [feature["input_ids"] for feature in features]
        batch: Batch = {"input_ids": pad(ids, self.pad_token_id, self.pad_to_multiple_of)}
        mask = attention_mask(ids, batch["input_ids"].shape[1])
        if mask is not None:
            batch["attention_mask"] = mask
        labels = [feature.get("labels", feature["input_ids"]) for feature in features]
        batch["labels"] = pad(labels, IGNORED, self.pad_to_multiple_of)
        return with_sample_ids(batch, features)


@dataclass
class MaskingCollator:
    """Batches for masked language models: 80 % of the chosen tokens become the mask token, 10 % a random one, 10 %
    stay.

    What is masked is a function of (`seed`, epoch, sample), and of nothing else: it does not depend on the batch size,
    the number of loader workers or a resume. Call `set_epoch` at the start of each epoch for new masks. At least one
    token a sample is chosen.
    """

    pad_token_id: int
    mask_token_id: int
    vocab_size: int
    special_token_ids: frozenset[int]
    mlm_probability: float = 0.15
    seed: int = 42
    pad_to_multiple_of: int | None = None
    epoch: int = field(default=0)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the masks of that epoch (counted from 0)."""
        self.epoch = int(epoch)

    def __call__(self, features: Features) -> Batch:
        masked: list[Any] = []
        labels: list[Any] = []
        for feature in features:
            ids, targets = self._mask(np.asarray(feature["input_ids"], dtype=np.int64))
            masked.append(ids)
            labels.append(targets)
        batch: Batch = {"input_ids": pad(masked, self.pad_token_id, self.pad_to_multiple_of)}
        mask = attention_mask(masked, batch["input_ids"].shape[1])
        if mask is not None:
            batch["attention_mask"] = mask
        batch["labels"] = pad(labels, IGNORED, self.pad_to_multiple_of)
        return with_sample_ids(batch, features)

    def _mask(self, ids: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        # Keyed by the tokens and not by `sample_id`, which a plain transformers.Trainer drops.
        rng = np.random.Generator(np.random.Philox([self.seed, self.epoch, zlib.crc32(ids.tobytes()), len(ids)]))
        allowed = ~np.isin(ids, list(self.special_token_ids))
        chosen = allowed & (rng.random(len(ids)) < self.mlm_probability)
        if not chosen.any() and allowed.any():
            chosen[rng.choice(np.flatnonzero(allowed))] = True
        kind = rng.random(len(ids))
        random_ids = rng.integers(0, self.vocab_size, len(ids))
        labels = np.where(chosen, ids, IGNORED)
        masked = np.where(chosen & (kind < 0.8), self.mask_token_id, ids)
        masked = np.where(chosen & (kind >= 0.9), random_ids, masked)
        return masked, labels


@dataclass
class ClassificationCollator:
    """Batches for classifiers of text: `input_ids` (B, S), `labels` (B,), and what else the tokenizer's model takes."""

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, features: Features) -> Batch:
        import torch

        ids = [feature["input_ids"] for feature in features]
        batch: Batch = {"input_ids": pad(ids, self.pad_token_id, self.pad_to_multiple_of)}
        mask = attention_mask(ids, batch["input_ids"].shape[1])
        if mask is not None:
            batch["attention_mask"] = mask
        if "token_type_ids" in features[0]:
            batch["token_type_ids"] = pad([f["token_type_ids"] for f in features], 0, self.pad_to_multiple_of)
        if "labels" in features[0]:
            batch["labels"] = torch.tensor([int(feature["labels"]) for feature in features])
        return with_sample_ids(batch, features)


@dataclass
class ImageCollator:
    """Batches for classifiers of images: `pixel_values` (B, C, H, W) float32 and `labels` (B,)."""

    def __call__(self, features: Features) -> Batch:
        import torch

        batch: Batch = {"pixel_values": torch.stack([torch.as_tensor(feature["pixel_values"]) for feature in features])}
        if "labels" in features[0]:
            batch["labels"] = torch.tensor([int(feature["labels"]) for feature in features])
        return with_sample_ids(batch, features)


@dataclass
class Seq2SeqCollator:
    """Batches for encoder-decoders: `input_ids` (B, S), `labels` (B, T) with -100 at padding, and `attention_mask`
    (B, S) where a source is padded."""

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, features: Features) -> Batch:
        ids = [feature["input_ids"] for feature in features]
        batch: Batch = {"input_ids": pad(ids, self.pad_token_id, self.pad_to_multiple_of)}
        mask = attention_mask(ids, batch["input_ids"].shape[1])
        if mask is not None:
            batch["attention_mask"] = mask
        batch["labels"] = pad([feature["labels"] for feature in features], IGNORED, self.pad_to_multiple_of)
        return with_sample_ids(batch, features)


@dataclass
class NoiseCollator(ImageCollator):
    """Batches for masked auto-encoders: `pixel_values` (B, C, H, W) and `noise` (B, patches), whose smallest entries
    stay visible.

    The noise is a function of (`seed`, epoch, image) and of nothing else, so that neither batch size nor a resume
    changes what is masked. Call `set_epoch` at the start of each epoch for new masks.
    """

    patches: int
    seed: int = 42
    epoch: int = field(default=0)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the masks of that epoch (counted from 0)."""
        self.epoch = int(epoch)

    def __call__(self, features: Features) -> Batch:
        import torch

        batch = super().__call__(features)
        rows = [self._noise(image) for image in batch["pixel_values"].numpy()]
        batch["noise"] = torch.from_numpy(np.stack(rows)).float()
        return batch

    def _noise(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        rng = np.random.Generator(np.random.Philox([self.seed, self.epoch, zlib.crc32(image.tobytes()), image.size]))
        return rng.random(self.patches)


@dataclass
class PairCollator:
    """Batches of images and captions: `pixel_values` (B, C, H, W), `input_ids` and `attention_mask` (B, S), and
    `return_loss`, which asks CLIP for its loss."""

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, features: Features) -> Batch:
        ids = [feature["input_ids"] for feature in features]
        batch: Batch = {**ImageCollator()(features), "input_ids": pad(ids, self.pad_token_id, self.pad_to_multiple_of)}
        mask = attention_mask(ids, batch["input_ids"].shape[1])
        if mask is not None:
            batch["attention_mask"] = mask
        return {**batch, "return_loss": True}


def with_sample_ids(batch: Batch, features: Features) -> Batch:
    """Adds `sample_id`, int64 of shape (B,), where the samples have one."""
    import torch

    if "sample_id" in features[0]:
        batch["sample_id"] = torch.tensor([int(feature["sample_id"]) for feature in features], dtype=torch.int64)
    return batch
