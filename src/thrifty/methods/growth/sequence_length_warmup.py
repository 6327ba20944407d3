"""Sequence-length warm-up.

What it does: trains on the first tokens of each sample only, more of them from step to step, until the samples are
whole. Or cuts samples into rows of that length, so that every token is trained on and only attention gets shorter.

Helps: pre-training of long contexts: cheaper early steps, and stability with larger batches and learning rates.
Does not help: short samples; tasks whose answer stands at the end of a sample (a micro-batch that would lose all its
targets stays whole).
Limits: pads on the right. A step has fewer tokens at the start, so a budget in tokens takes more steps (not in mode
reshape). Learned positions beyond the short length are trained late. With torch.compile every length compiles once, so
lengths go in multiples.
Source: Li, Zhang and He, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT
Models", NeurIPS 2022; Press et al., "Shortformer", 2021.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty.method import Batch, Method, NotApplicable, Paper, Phase, TrainingData, register
from thrifty.methods.growth._shapes import per_token, truncate

# What a filled-up piece holds beyond its tokens.
FILLERS = {"labels": -100, "shift_labels": -100, "attention_mask": 0}
_LOOKED_AT = 1000
_PHASES = 8  # in how many stretches the planner takes the rise


def length_at(step: int, warmup_steps: int, start: int, full: int, multiple: int = 8) -> int | None:
    """Tokens of a row in a step; None from `warmup_steps` on, where rows are whole.

    >>> [length_at(t, 100, 64, 1024) for t in (0, 1, 50, 99, 100)]
    [64, 72, 544, 1008, None]
    """
    if step >= warmup_steps:
        return None
    exact = start + (full - start) * step / warmup_steps
    return max(multiple, int(exact) // multiple * multiple)


def reshape(batch: Batch, length: int) -> Batch:
    """Cuts each row into rows of `length` tokens; rows without any token go. The last row of each is filled up.

    Args:
        batch: As for `truncate`; entries that are not by token are dropped.
        length: Tokens of the new rows.
    """
    parts = per_token(batch)
    width = batch["input_ids"].shape[1]
    pieces = -(-width // length)
    parts.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    cut = {
        key: nn.functional.pad(value, (0, pieces * length - width), value=FILLERS.get(key, 0)).view(-1, length)
        for key, value in parts.items()
    }
    real = cut["attention_mask"].any(dim=1)
    cut = {key: value[real] for key, value in cut.items()}
    if "sample_id" in batch:
        cut["sample_id"] = batch["sample_id"].repeat_interleave(pieces)[real]
    return cut


def _targets(batch: Batch) -> Tensor | None:
    labels = batch.get("labels")
    return labels if torch.is_tensor(labels) and labels.dim() == 2 else None


@register(
    "sequence-length-warmup",
    title="Sequence-length warm-up",
    section="growth",
    sources=[Paper("Li, Zhang and He", 2022, "arXiv:2108.06084"), Paper("Press et al.", 2021, "arXiv:2012.15832")],
    exact=False,
    tasks=("causal-lm", "masked-lm", "text-classification"),
    claims=("length-schedule",),
    preset={"start": 2, "warmup": 0.7, "multiple_of": 2},
)
@dataclass(kw_only=True)
class SequenceLengthWarmup(Method):
    """Lets the rows of a batch grow to their full length."""

    start: int = 64
    """Tokens of a row in the first step."""
    warmup: float = 0.3
    """Share of the run after which rows are whole."""
    max_length: int | None = None
    """Length that the schedule rises to; None is that of the longest sample (of 1000 looked at)."""
    multiple_of: int = 8
    """Lengths are multiples of this."""
    mode: Literal["truncate", "reshape"] = "truncate"
    """truncate: leave out what is beyond the length; reshape: cut rows into more, shorter ones (causal-lm)."""

    full: int = field(default=0, init=False, repr=False)
    _checked: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        for key in ("start", "multiple_of", "max_length"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be between 0 and 1, got {self.warmup}")

    def prepare_data(self, data: TrainingData, ctx: Any) -> TrainingData:
        if len(data.train_dataset) == 0 or "input_ids" not in data.train_dataset[0]:
            raise NotApplicable(
                "sequence-length-warmup: the samples have no input_ids",
                fix="use progressive-resolution for images, or remove it",
            )
        count = len(data.train_dataset)
        looked_at = range(0, count, max(1, count // _LOOKED_AT))
        self.full = self.max_length or max(len(data.train_dataset[i]["input_ids"]) for i in looked_at)
        if self.warmup and self.start >= self.full:
            raise NotApplicable(
                f"sequence-length-warmup: the samples have {self.full} tokens, so there is nothing to grow",
                key="methods.sequence-length-warmup.start",
                value=self.start,
                fix=f"set it below {self.full}",
            )
        return data

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        causal = any(word in type(model).__name__ for word in ("CausalLM", "LMHead"))
        if self.mode == "reshape" and not causal and not ctx.planning:
            raise NotApplicable(
                f"sequence-length-warmup: pieces of a sample make no samples for {type(model).__name__}",
                key="methods.sequence-length-warmup.mode",
                value=self.mode,
                fix="use mode truncate",
            )
        return model

    def phases(self, model_config: Any, total_steps: int) -> list[Phase]:
        warm = round(self.warmup * total_steps)
        full = self.max_length or getattr(model_config, "max_position_embeddings", None)
        if self.mode == "reshape" or not warm or not isinstance(full, int) or full <= self.start:
            return []
        edges = sorted({round(i * warm / _PHASES) for i in range(_PHASES + 1)})
        rising = []
        for first, after in itertools.pairwise(edges):
            length = length_at((first + after) // 2, warm, self.start, full, self.multiple_of) or full
            rising.append(Phase(steps=after - first, description=f"{length} tokens", length=length / full))
        return [*rising, Phase(steps=total_steps - warm, description="whole rows")]

    def shape_batch(self, batch: Batch, ctx: Any) -> Batch:
        length = length_at(ctx.step, round(self.warmup * ctx.total_steps), self.start, self.full, self.multiple_of)
        if length is None or length >= batch["input_ids"].shape[1] or len(batch["input_ids"]) == 0:
            return batch
        self._check(batch)
        short = reshape(batch, length) if self.mode == "reshape" else truncate(batch, length)
        labels = _targets(short)
        if labels is not None and not bool((labels[:, 1:] != -100).any()):
            return batch
        return short

    def _check(self, batch: Batch) -> None:
        if self._checked:
            return
        self._checked = True
        mask = batch.get("attention_mask")
        if mask is not None and (mask.dim() != 2 or not bool(mask[:, 0].all())):
            raise NotApplicable(
                "sequence-length-warmup: cutting by position needs rows that begin with their first token",
                key="padding_side",
                value="left",
                fix="pad on the right",
            )
        if self.mode == "reshape" and "position_ids" in batch:
            raise NotApplicable(
                "sequence-length-warmup: packed rows cannot be cut at any place",
                key="methods.sequence-length-warmup.mode",
                value=self.mode,
                fix="use mode truncate, or remove packing",
            )
