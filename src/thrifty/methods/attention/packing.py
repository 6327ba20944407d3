"""Packing without padding.

What it does: puts several samples into one row, longest first into the row where they fit best, and restarts the
positions at each sample so that attention never crosses from one to another. No padding is computed.

Helps: samples of unequal length: tokens per second grow by the share of padding that disappears.
Does not help: data that fills its rows already (a long text cut into blocks). A batch of packed rows holds more
samples than before, so the learning rate may want retuning.
Limits: causal language models that take `position_ids`; checked on real samples before training: packed logits must
equal unpacked ones, else the method refuses.
Source: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021; Zeng et al., ByteTransformer,
2022.
Library: transformers' SDPA, flash and flex masks from position_ids.
"""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from thrifty.method import Batch, Method, NotApplicable, Paper, TrainingData, register

IGNORED = -100


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assigns items to rows: longest first, each into the fullest row that still holds it.

    Args:
        lengths: Tokens of each sample, at most `capacity`.
        capacity: Tokens of a row.

    Returns:
        For each row the indices of its samples. Every index occurs once; no row exceeds the capacity.

    >>> best_fit_decreasing([3, 5, 2, 4], 7)
    [[1, 2], [3, 0]]
    """
    # Rows wait in buckets by the room they have left, so that the search is over at most `capacity` values.
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"sample {index} has {length} tokens, a row holds {capacity}")
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del rooms[place], by_room[room]
        rows[row].append(index)
        left = room - length
        if left not in by_room:
            bisect.insort(rooms, left)
            by_room[left] = []
        by_room[left].append(row)
    return rows


class PackedDataset(Dataset[Batch]):
    """Rows of several samples: `input_ids`, `labels`, `position_ids` as 1-D tensors, and the samples' ids.

    Args:
        dataset: Map-style samples with `input_ids` and, optionally, `labels` and `sample_id`.
        rows: The samples of each row.
    """

    def __init__(self, dataset: Any, rows: list[list[int]]) -> None:
        self.dataset = dataset
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return pack([self.dataset[i] for i in self.rows[index]], sample_id=index)


def pack(samples: Sequence[Batch], *, sample_id: int = 0) -> Batch:
    """Joins samples into one row. The first label of each is ignored: nothing before it may predict it."""
    ids, labels, positions = [], [], []
    for sample in samples:
        tokens = torch.as_tensor(sample["input_ids"])
        targets = torch.as_tensor(sample.get("labels", sample["input_ids"])).clone()
        targets[:1] = IGNORED
        ids.append(tokens)
        labels.append(targets)
        positions.append(torch.arange(len(tokens)))
    return {
        "input_ids": torch.cat(ids),
        "labels": torch.cat(labels),
        "position_ids": torch.cat(positions),
        "sample_id": sample_id,
    }


def collate_packed(rows: Sequence[Batch]) -> Batch:
    """Stacks packed rows. A shorter row ends in a sample of its own whose labels are ignored.

    There is no attention mask and no cache on purpose: with either, transformers would let the samples see each other.
    """
    longest = max(len(row["input_ids"]) for row in rows)
    batch: Batch = {"use_cache": False}
    for key, filler in (("input_ids", 0), ("labels", IGNORED)):
        batch[key] = torch.stack(
            [nn.functional.pad(row[key], (0, longest - len(row[key])), value=filler) for row in rows]
        )
    batch["position_ids"] = torch.stack(
        [torch.cat([row["position_ids"], torch.arange(longest - len(row["position_ids"]))]) for row in rows]
    )
    if "sample_id" in rows[0]:
        batch["sample_id"] = torch.tensor([int(row["sample_id"]) for row in rows])
    return batch


@torch.no_grad()
def largest_leak(model: nn.Module, samples: Sequence[Batch], device: torch.device, *, rows: int = 2) -> float:
    """The largest difference between packed logits and those of the samples on their own, in their standard deviations.

    Args:
        model: A causal language model.
        samples: Two or more; packed into the first row, and the first of them alone into the others.
        device: Where the model is.
        rows: Rows of the batch. Some attention kernels keep samples apart in a batch of one row only.
    """
    was_training = model.training
    model.eval()
    batch = collate_packed([pack(samples), *[pack(samples[:1])] * (rows - 1)])
    inputs = {key: batch[key].to(device) for key in ("input_ids", "position_ids")}
    together = model(**inputs, use_cache=False).logits[0]
    start, worst = 0, 0.0
    for sample in samples:
        ids = torch.as_tensor(sample["input_ids"])[None].to(device)
        alone = model(input_ids=ids, use_cache=False).logits[0]
        worst = max(worst, (together[start : start + len(alone)] - alone).abs().max().item())
        start += len(alone)
    model.train(was_training)
    return worst / max(together.float().std().item(), 1e-12)


@register(
    "packing",
    title="Packing without padding",
    section="attention",
    sources=[Paper("Krell et al.", 2021, "arXiv:2107.02027"), Paper("Zeng et al.", 2022, "arXiv:2210.03052")],
    exact=False,
    tasks=("causal-lm",),
    claims=("batching",),
    library="transformers",
    choices={"free": [{}]},
    bench_order=1,
    # It checks the model for leaks as the user gave it, before surgery makes its logits trivial.
    runs_before=("section:growth", "section:initialization", "section:sparsity", "section:peft"),
)
@dataclass(kw_only=True)
class Packing(Method):
    """Joins samples into full rows."""

    max_length: int | None = None
    """Tokens of a row; None takes the longest sample."""

    rows: int = field(default=0, init=False, repr=False)

    def prepare_data(self, data: TrainingData, ctx: Any) -> TrainingData:
        if len(data.train_dataset) == 0 or "input_ids" not in data.train_dataset[0]:
            raise NotApplicable(
                "packing: the samples have no input_ids, and only sequences of tokens can be packed",
                fix="remove packing from the methods",
            )
        lengths = _lengths(data.train_dataset)
        capacity = self.max_length or max(lengths)
        if max(lengths) > capacity:
            raise NotApplicable(
                f"packing: the longest sample has {max(lengths)} tokens",
                key="methods.packing.max_length",
                value=self.max_length,
                fix=f"set it to at least {max(lengths)}, or shorten the samples with max_length",
            )
        rows = best_fit_decreasing(lengths, capacity)
        self.rows = len(rows)
        train = PackedDataset(data.train_dataset, rows)
        evaluation = data.eval_dataset
        if evaluation is not None and not isinstance(evaluation, dict):
            evaluation = PackedDataset(evaluation, [[index] for index in range(len(evaluation))])
        elif evaluation is not None:
            evaluation = {k: PackedDataset(d, [[i] for i in range(len(d))]) for k, d in evaluation.items()}
        return TrainingData(train_dataset=train, eval_dataset=evaluation, data_collator=collate_packed)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise NotApplicable(
                f"packing: {type(model).__name__} takes no position_ids, so samples could not be kept apart",
                fix="remove packing from the methods",
            )
        if ctx.planning or ctx.data is None:
            return model
        model.to(ctx.device)
        dataset = ctx.data.train_dataset.dataset
        samples = [dataset[i] for i in range(min(3, len(dataset)))]
        leak = largest_leak(model, samples, ctx.device, rows=min(2, ctx.args.train_batch_size))
        if leak > (1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1):
            raise NotApplicable(
                f"packing: packed logits differ from unpacked ones by {leak:.3g} of their standard deviation: "
                f"{type(model).__name__} lets samples in a row see each other",
                fix="use attn_implementation 'sdpa' or 'flex_attention', or flash attention with "
                "per_device_train_batch_size 1, or remove packing",
            )
        return model


def _lengths(dataset: Any) -> list[int]:
    if hasattr(dataset, "with_format") and hasattr(dataset, "data"):
        # An Arrow table knows the lengths of its lists without reading them into Python.
        column = dataset.with_format("arrow")[:]["input_ids"]
        import pyarrow.compute

        return pyarrow.compute.list_value_length(column).to_pylist()  # pyright: ignore[reportAttributeAccessIssue]
    return [len(dataset[index]["input_ids"]) for index in range(len(dataset))]
