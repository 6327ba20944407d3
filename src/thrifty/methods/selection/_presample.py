"""Drawing more samples than a step trains on, and choosing among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import Batch, NotApplicable
from thrifty.samples import join_samples, split_samples


def draw_rows(next_batch: Callable[[], Batch], rows: int) -> list[Batch]:
    """As many micro-batches as hold at least `rows` samples."""
    batches: list[Batch] = []
    found = 0
    while found < rows:
        batches.append(next_batch())
        found += rows_in(batches[-1])
    return batches


def rows_in(batch: Batch) -> int:
    """The number of samples of a batch. Raises `NotApplicable` where they have no id."""
    if "sample_id" not in batch:
        raise NotApplicable(
            "samples are chosen by their id, and the batches have no sample_id",
            key="data_collator",
            fix="let the collator pass sample_id on, as those of thrifty.data.collate do",
        )
    return len(batch["sample_id"])


def watched(ctx: Any, model: nn.Module, look: Callable[[nn.Module, Batch], Tensor], batches: Sequence[Batch]) -> Tensor:
    """What `look` finds for each sample, on the CPU: in eval mode, under the run's precision, without `sample_id`."""
    was_training = model.training
    model.eval()
    try:
        with ctx.trainer.compute_loss_context_manager():
            found = [look(model, {k: v for k, v in b.items() if k != "sample_id"}).detach().cpu() for b in batches]
    finally:
        model.train(was_training)
    return torch.cat(found)


def joined(
    ctx: Any, batches: Sequence[Batch], places: Sequence[int], size: int, extra: dict[str, Tensor]
) -> list[Batch]:
    """The samples at `places` among those of `batches`, in this order, in micro-batches of `size` on the device.

    Args:
        ctx: The run.
        batches: What was drawn.
        places: Counted over all of them; may repeat.
        size: Samples of a micro-batch.
        extra: Further values of the chosen samples, each of shape (len(places), ...).
    """
    samples = [s for batch in batches for s in split_samples(batch, torch.ones(rows_in(batch), dtype=torch.bool))]
    chosen = [{**samples[place], **{k: v[i] for k, v in extra.items()}} for i, place in enumerate(places)]
    count = math.ceil(len(chosen) / size)
    return [ctx.to_device(join_samples(chosen[i * size : (i + 1) * size])) for i in range(count)]
