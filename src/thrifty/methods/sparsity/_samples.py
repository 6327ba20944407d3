"""Batches that methods score weights with before training, weighted so that their size does not matter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from thrifty.method import Batch
from thrifty.remote_code import auto_class_name

WeightedBatch = tuple[Batch, float]


def weighted_batches(model: nn.Module, batches: list[Batch]) -> list[WeightedBatch]:
    """Gives each batch the share of the labels that it holds: the weighted sum of the mean losses is the mean of all.

    Raises:
        ValueError: There are no labels at all.
    """
    counts = [_labels(model, batch) for batch in batches]
    if not sum(counts):
        raise ValueError("none of the batches has a label to learn from")
    return [(batch, count / sum(counts)) for batch, count in zip(batches, counts, strict=True) if count]


def sample_batches(model: nn.Module, samples: int, ctx: Any) -> list[WeightedBatch]:
    """The same real training samples whatever the batch size of the run, in batches of that size."""
    size = ctx.args.train_batch_size
    batches = ctx.batches(-(-samples // size), model)
    rest = samples % size
    if rest and len(batches) == -(-samples // size):
        batches[-1] = {
            key: value[:rest] if torch.is_tensor(value) and value.ndim and len(value) == size else value
            for key, value in batches[-1].items()
        }
    return weighted_batches(model, batches)


def _labels(model: nn.Module, batch: Batch) -> int:
    labels = batch.get("labels")
    if labels is None or labels.ndim < 2:
        return len(next(value for value in batch.values() if torch.is_tensor(value)))
    if auto_class_name(model) == "AutoModelForCausalLM":
        labels = labels[..., 1:]  # the model predicts each token from those before it
    return int((labels != -100).sum())


@contextlib.contextmanager
def scoring(model: nn.Module) -> Iterator[None]:
    """Inside, the model has no dropout and keeps no cache, and its attention can be differentiated twice."""
    training, config = model.training, getattr(model, "config", None)
    cache = getattr(config, "use_cache", None)
    model.eval()
    if cache is not None:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        model.train(training)
        if cache is not None:
            config.use_cache = cache  # type: ignore[union-attr]
