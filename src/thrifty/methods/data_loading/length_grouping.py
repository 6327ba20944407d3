"""Micro-batches of similar length.

What it does: divides the samples of a batch, sorted by length, into micro-batches, such that padding and the fixed cost
of a micro-batch together are least; gradients are added up as always. The samples of an optimizer step stay the same,
and so do loss and gradients. Where nothing of a micro-batch is padded, or the model cannot see what follows a token,
attention is computed without a mask.

Helps: samples of unequal length, fine-tuning most of all: most of the padding goes, also in evaluation. A budget of
tokens bounds the memory of a micro-batch whatever the batch holds, so that accumulation need not be chosen by hand.
Does not help: samples of equal length, packed rows, or batches of a few samples. A micro-batch costs the start of its
kernels, which small batches on a fast accelerator feel.
Limits: pads on the right; at least one sample a micro-batch, so that a single sample may exceed the budget. Dropout
draws other numbers than in the undivided batch, as with any other division.
Source: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021, compare sorting with packing; Ott
et al., "fairseq", 2019, batch by tokens; here the batch of a step is kept, and only its division is chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.method import Batch, Method, NotApplicable, Paper, register
from thrifty.remote_code import auto_class_name
from thrifty.safety.normalise import ignores_num_items, targets_of

# What a further micro-batch costs, in tokens: starting kernels, and adding once more to every gradient.
OVERHEAD = {"cpu": 32}
OVERHEAD_ELSEWHERE = 1024


def group_by_length(lengths: Sequence[int], *, overhead: int = 0, max_tokens: int | None = None) -> list[list[int]]:
    """Divides samples into groups whose cost, rows times the longest of them plus `overhead`, is least in sum.

    Args:
        lengths: Tokens of each sample.
        overhead: Fixed cost of a group, in tokens.
        max_tokens: No group of several samples has more tokens than this, padding included.

    Returns:
        The indices of each group; lengths rise from group to group. Every index occurs once.

    >>> group_by_length([9, 2, 3, 10], overhead=1)
    [[1, 2], [0, 3]]
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    ordered = np.asarray(lengths, dtype=np.float64)[order]
    count = len(ordered)
    least = np.zeros(count + 1)
    begins = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        tokens = np.arange(end, 0, -1) * ordered[end - 1]  # of a group from each possible beginning up to here
        costs = least[:end] + tokens
        if max_tokens is not None:
            costs[:-1][tokens[:-1] > max_tokens] = np.inf
        begins[end] = int(np.argmin(costs))
        least[end] = costs[begins[end]] + overhead
    groups: list[list[int]] = []
    end = count
    while end > 0:
        begin = int(begins[end])
        groups.append(order[begin:end].tolist())
        end = begin
    return groups[::-1]


def row_lengths(batch: Mapping[str, Any]) -> list[int] | None:
    """Tokens of each row of a batch that is padded on the right; None where it is padded elsewhere.

    Args:
        batch: `input_ids` of shape (rows, tokens), and `attention_mask` of the same shape where something is padded.
    """
    rows, width = batch["input_ids"].shape[:2]
    mask = batch.get("attention_mask")
    if mask is None:
        return [width] * rows
    kept = mask.sum(dim=1)
    fits = (mask == (torch.arange(width, device=mask.device)[None] < kept[:, None])).all()
    *lengths, right = torch.cat([kept, fits[None].to(kept.dtype)]).tolist()  # one copy to the host
    return [max(1, int(length)) for length in lengths] if right else None


def take_rows(batch: Mapping[str, Any], rows: Sequence[int], width: int, *, mask: bool = True) -> Batch:
    """The chosen rows of a batch, cut to `width` tokens; without `attention_mask` where `mask` is False."""
    count, full = batch["input_ids"].shape[:2]
    index = torch.as_tensor(rows, device=batch["input_ids"].device)
    taken: Batch = {}
    for key, value in batch.items():
        if key == "attention_mask" and not mask:
            continue
        if torch.is_tensor(value) and value.dim() > 0 and value.shape[0] == count:
            value = value[index]
            if value.dim() > 1 and value.shape[1] == full:
                value = value[:, :width].contiguous()
        elif isinstance(value, list | tuple) and len(value) == count:
            value = type(value)(value[row] for row in rows)
        taken[key] = value
    return taken


def divide(
    batch: Batch, *, overhead: int = 0, max_tokens: int | None = None, sees_ahead: bool = True
) -> list[tuple[list[int], Batch]]:
    """Divides a collated batch into micro-batches of similar length, for one's own loop.

    Args:
        batch: As for `row_lengths`, with other tensors of shape (rows, ...) or (rows, tokens, ...).
        overhead: See `group_by_length`, also for the next.
        max_tokens: The same.
        sees_ahead: Whether a token may attend to later ones, so that padding must be masked out.

    Returns:
        For each micro-batch the rows that it has of the batch, and itself.

    Raises:
        NotApplicable: The batch is not padded on the right.
    """
    lengths = row_lengths(batch)
    if lengths is None:
        raise NotApplicable(
            "length-grouping: the mask of a batch has zeros before its tokens",
            key="padding_side", value="left", fix="pad on the right, or remove length-grouping from the methods",
        )  # fmt: skip
    found = []
    for rows in group_by_length(lengths, overhead=overhead, max_tokens=max_tokens):
        chosen = [lengths[row] for row in rows]
        padded = min(chosen) < max(chosen)
        found.append((rows, take_rows(batch, rows, max(chosen), mask=padded and sees_ahead)))
    return found


@register(
    "length-grouping",
    title="Micro-batches of similar length",
    section="data_loading",
    sources=[Paper("Krell et al.", 2021, "arXiv:2107.02027"), Paper("Ott et al.", 2019, "arXiv:1904.01038")],
    exact=True,
    tasks=("causal-lm", "masked-lm", "text-classification"),
    preset={"overhead": 0},
    conflicts_with={
        "optimizer-in-backward": "it updates weights in the backward pass of the first micro-batch, and there are more",
        "packing": "packed rows have no padding left",
    },
    # Its micro-batches are what everything around a step should see.
    runs_before=tuple(
        f"section:{name}"
        for name in (
            "attention",
            "checkpointing",
            "compilation",
            "growth",
            "large_batch",
            "loss",
            "moe",
            "offload",
            "optimizers",
            "peft",
            "precision",
            "selection",
            "sparsity",
        )
    ),
    bench_order=3,
)
@dataclass(kw_only=True)
class LengthGrouping(Method):
    """Divides each batch by length."""

    max_tokens: int | None = None
    """Tokens of a micro-batch at most, padding included; None sets no bound."""
    overhead: int | None = None
    """What a further micro-batch must save, in tokens; None is 32 on a CPU and 1024 elsewhere."""

    padded: int = field(default=0, init=False, repr=False)
    computed: int = field(default=0, init=False, repr=False)
    pieces: int = field(default=0, init=False, repr=False)
    batches: int = field(default=0, init=False, repr=False)
    sees_ahead: bool | None = field(default=None, init=False, repr=False)
    _share: Any = field(default=1.0, init=False, repr=False)
    _listens: bool | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.overhead is not None and self.overhead < 0:
            raise ValueError(f"overhead must not be negative, got {self.overhead}")

    def attach(self, accelerator: Any, ctx: Any) -> None:
        trainer = ctx.trainer
        plain = trainer.prediction_step

        def predict(model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            found = self._divide(inputs, model, ctx)
            if len(found) == 1:
                return plain(model, found[0][1], prediction_loss_only, ignore_keys)
            shares = _shares([part for _, part in found], trainer)
            results = [plain(model, part, prediction_loss_only, ignore_keys) for _, part in found]
            losses = [share * loss for share, (loss, _, _) in zip(shares, results, strict=True) if loss is not None]
            rows = [rows for rows, _ in found]
            # The labels are those of the whole batch; only logits have to be brought together.
            logits = _restore([logits for _, logits, _ in results], rows)
            labels = _restore([labels for _, _, labels in results], rows)
            return torch.stack(losses).sum() if losses else None, logits, labels

        trainer.prediction_step = predict

    def wrap_training_step(self, step: Callable[..., Tensor], ctx: Any) -> Callable[..., Tensor]:
        def divided(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            if ctx.planning or "input_ids" not in inputs or inputs["input_ids"].dim() < 2:
                return step(model, inputs, num_items_in_batch)
            parts = [part for _, part in self._divide(inputs, model, ctx)]
            self.batches += 1
            self.pieces += len(parts)
            self.padded += inputs["input_ids"].numel()
            self.computed += sum(part["input_ids"].numel() for part in parts)
            if len(parts) == 1:
                return step(model, parts[0], num_items_in_batch)
            shares = [1.0] * len(parts) if self._adds_up(model, parts[0], num_items_in_batch, ctx) else None
            losses = []
            for number, share in enumerate(shares or _shares(parts, ctx.trainer)):
                self._share = share
                with _exchanging(model, ctx.trainer, last=number == len(parts) - 1):
                    losses.append(step(model, parts[number], num_items_in_batch))
            self._share = 1.0
            return torch.stack(losses).sum()

        return divided

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        def shared(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = compute_loss(model, inputs, num_items_in_batch)
            return loss if isinstance(self._share, float) and self._share == 1.0 else loss * self._share

        return shared

    def on_replace(self, model: nn.Module, parameter_map: Mapping[str, str | None], ctx: Any) -> None:
        self._listens = None

    def facts(self) -> dict[str, Any]:
        if not self.batches:
            return {}
        return {
            "micro-batches a batch": f"{self.pieces / self.batches:.1f}",
            "tokens computed": f"{self.computed / self.padded:.0%} of the undivided batch",
        }

    def _divide(self, inputs: Any, model: nn.Module, ctx: Any) -> list[tuple[list[int], Batch]]:
        if "input_ids" not in inputs or inputs["input_ids"].dim() < 2 or len(inputs["input_ids"]) < 1:
            return [([0], inputs)]
        inputs = {key: ctx.to_device(value) for key, value in inputs.items()}
        if self.sees_ahead is None and inputs.get("attention_mask") is not None:
            self.sees_ahead = sees_ahead(_hf_unwrapped(model), inputs)
        overhead = OVERHEAD.get(ctx.device_kind, OVERHEAD_ELSEWHERE) if self.overhead is None else self.overhead
        return divide(inputs, overhead=overhead, max_tokens=self.max_tokens, sees_ahead=self.sees_ahead is not False)

    def _adds_up(self, model: nn.Module, part: Batch, items: Any, ctx: Any) -> bool:
        """Whether the losses of the micro-batches, as the trainer computes them, sum up to that of the batch."""
        trainer = ctx.trainer
        if trainer.compute_loss_func is not None:
            return True
        if items is None or not trainer.model_accepts_loss_kwargs:
            return False
        if self._listens is None:
            given = {key: value for key, value in part.items() if key != "sample_id"}
            with trainer.compute_loss_context_manager():
                self._listens = bool(trainer._normalises or not ignores_num_items(model, given))
        return self._listens


def sees_ahead(model: nn.Module, batch: Mapping[str, Any]) -> bool | None:
    """Whether the logits at a token depend on what follows it, so that padding must be masked out.

    Args:
        model: Its modes and the random state are left as they were.
        batch: Padded on the right.

    Returns:
        None where nothing of the batch is padded, so that it cannot be told.
    """
    adapted: Any = model
    bare = adapted.get_base_model() if hasattr(model, "get_base_model") else adapted
    # The auxiliary loss of a router counts by the mask.
    balances = getattr(getattr(bare, "config", None), "router_aux_loss_coef", 0)
    if balances or auto_class_name(bare) != "AutoModelForCausalLM":
        return True
    lengths = row_lengths(batch)
    if lengths is None or min(lengths) == batch["input_ids"].shape[1]:
        return None
    row = int(np.argmin(lengths))
    ids = batch["input_ids"][row : row + 1, : lengths[row] + 8]
    others = ids.clone()
    others[:, lengths[row] :] = torch.where(ids[:, lengths[row] :] == 3, 4, 3)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            first, second = (model(input_ids=given, use_cache=False).logits.float() for given in (ids, others))
    finally:
        for module, mode in modes:
            module.training = mode
    first, second = first[:, : lengths[row]], second[:, : lengths[row]]
    return bool((first - second).abs().max() > 1e-4 * first.std())


def _hf_unwrapped(model: Any) -> Any:
    from thrifty import _hf

    return _hf.unwrap_container(model)


def _shares(parts: Sequence[Batch], trainer: Any) -> list[Any]:
    """What each part counts in the mean loss of all: its share of the targets, or of the rows where there are none."""
    counts: list[Any] = [targets_of(part, trainer._loss_shifts_labels) for part in parts]
    if any(count is None for count in counts):
        counts = [len(part["input_ids"]) for part in parts]
        return [count / sum(counts) for count in counts]
    total = torch.stack(counts).sum().clamp(min=1)
    return [count / total for count in counts]


@contextlib.contextmanager
def _exchanging(model: nn.Module, trainer: Any, *, last: bool) -> Iterator[None]:
    """Lets only the last part exchange gradients with other processes and end the step, as the trainer's own loop."""
    if last:
        yield
        return
    state = trainer.accelerator.gradient_state
    was = state.sync_gradients
    state._set_sync_gradients(False)
    try:
        with trainer.accelerator.no_sync(model=model):
            yield
    finally:
        state._set_sync_gradients(was)


def _restore(parts: Sequence[Any], rows: Sequence[Sequence[int]]) -> Any:
    """Brings logits or labels of the parts into the order of the batch: tensors, tuples of them, or None."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, tuple | list):
        return type(first)(_restore(group, rows) for group in zip(*parts, strict=True))
    width = max((part.shape[1] for part in parts if part.dim() > 1), default=0)
    whole = sum(len(group) for group in rows)
    shape = (whole, width, *first.shape[2:]) if first.dim() > 1 else (whole,)
    out = first.new_full(shape, -100 if not first.is_floating_point() else 0)
    for part, group in zip(parts, rows, strict=True):
        index = torch.as_tensor(group, device=part.device)
        if part.dim() > 1:
            out[index, : part.shape[1]] = part
        else:
            out[index] = part
    return out
