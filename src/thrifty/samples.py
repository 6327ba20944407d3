"""Takes batches apart into samples and joins samples to batches, for methods that choose what makes a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thrifty.method import Batch

# What a shorter row is filled with when samples of several batches are joined.
FILLERS = {"labels": -100, "attention_mask": 0}


def split_samples(batch: Batch, keep: Tensor) -> list[Batch]:
    """The picked rows of a batch as single samples (on the CPU): tensors without the batch dimension, and switches."""
    size = len(keep)
    rows = keep.nonzero().flatten().tolist()
    switches = {k: v for k, v in batch.items() if isinstance(v, bool)}
    tensors = {k: v for k, v in batch.items() if torch.is_tensor(v) and v.dim() > 0 and len(v) == size}
    return [switches | {k: v[i].cpu() for k, v in tensors.items()} for i in rows]


def join_samples(samples: Sequence[Batch]) -> Batch:
    """Stacks single samples; shorter rows are filled at the end, where neither attention nor loss looks.

    Samples with `position_ids` (packed rows) get no attention mask, which would let transformers ignore the positions.
    """
    keys = set().union(*samples)
    packed = "position_ids" in keys and "attention_mask" not in keys
    if (
        not packed
        and any("attention_mask" not in s for s in samples)
        and len({len(s["input_ids"]) for s in samples if "input_ids" in s}) > 1
    ):
        keys.add("attention_mask")
    batch: Batch = {"use_cache": False} if packed else {}
    for key in sorted(keys):
        if isinstance(switch := next((s[key] for s in samples if key in s), None), bool):
            batch[key] = switch  # what the collator tells the model: `return_loss`, which asks CLIP for its loss
            continue
        rows = [s[key] if key in s else torch.ones_like(s["input_ids"]) for s in samples]
        if rows[0].dim() == 1:
            longest = max(len(row) for row in rows)
            rows = [nn.functional.pad(row, (0, longest - len(row)), value=FILLERS.get(key, 0)) for row in rows]
        batch[key] = torch.stack(rows)
    return batch
