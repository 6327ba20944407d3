"""The loss of an optimizer step is one mean over all its targets, also for models that do not know how.

`transformers.Trainer` tells the model the number of targets of the whole step (`num_items_in_batch`) and, since most
models accept the argument, does not divide the loss itself. Some of them (BERT's masked LM, classifiers) accept the
argument and ignore it: then every micro-batch contributes its own mean, and the gradient of N micro-batches is about N
times too large. So the model is asked once, with two numbers, whether it listens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from thrifty.safety.oom import CannotSplit, rng_snapshot, rows_of, split_batch

IGNORED = -100


def targets_of(inputs: Mapping[str, Any], shifts_labels: bool) -> torch.Tensor | None:
    """The number of targets of a collated batch, as the trainer counts them; None without labels."""
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return None
    if shifts_labels and "shift_labels" not in inputs:
        labels = labels[..., 1:]
    return labels.ne(IGNORED).sum()


@torch.no_grad()
def ignores_num_items(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Does the model accept `num_items_in_batch` without dividing its loss by it?

    Args:
        model: Its modes and the random state are left as they were.
        inputs: A collated batch on the model's device, with labels; the sample with the most targets is enough.
    """
    inputs = _fullest_row(inputs)
    restore = rng_snapshot()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        losses = [float(model(**inputs, num_items_in_batch=torch.tensor(count)).loss) for count in (7, 14)]
    finally:
        for module, mode in modes:
            module.training = mode
        restore()
    return losses[0] != 0 and abs(losses[1] / losses[0] - 0.5) > 0.1


def _fullest_row(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        rows = rows_of(inputs)
    except CannotSplit:
        return inputs
    labels = inputs.get("labels")
    if rows == 1 or not isinstance(labels, torch.Tensor):
        return inputs
    most = int(labels.reshape(rows, -1).ne(IGNORED).sum(1).argmax())
    return split_batch(inputs, rows)[most]
