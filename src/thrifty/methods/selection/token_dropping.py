"""Token dropping.

What it does: lets the middle blocks of a masked language model run on the more important half of the tokens only:
those whose vocabulary entries have had the larger losses so far. The dropped ones wait and see the last block again.

Helps: pre-training of BERT-like encoders on long sequences: about a quarter less work in the paper.
Does not help: fine-tuning on short texts; decoders, whose every position is predicted.
Limits: masked-lm on encoders of four blocks or more, in the paper twelve. The table of losses starts with equal values,
so that the first steps keep each text's beginning. Evaluation runs on all tokens.
Source: Hou et al., "Token Dropping for Efficient BERT Pretraining", ACL 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from thrifty.method import Method, Paper, register
from thrifty.methods.selection._tokens import ShortBlocks, keep_best, require_task

IGNORED = -100


class TokenImportance:
    """A running loss for each vocabulary entry.

    Args:
        vocab_size: Entries.
        beta: What a step leaves of the old value.
        initial: The value of entries without a loss so far.
        always: Entries that are always kept (special tokens and the mask).
    """

    def __init__(self, vocab_size: int, beta: float = 0.995, initial: float = 10.0, always: Iterable[int] = ()) -> None:
        self.beta = beta
        self.always = torch.tensor(sorted(set(always)), dtype=torch.long)
        # float32 at least: with beta 0.995 a change is lost in bfloat16's 8 bits.
        self.table = torch.full((vocab_size,), initial, dtype=torch.float32)
        self.sums: Tensor | None = None
        self.counts: Tensor | None = None

    def add(self, losses: Tensor, ids: Tensor) -> None:
        """Notes the losses (n,) of predicting the tokens `ids` (n,), until `close_step`."""
        wide = torch.float32 if losses.device.type == "mps" else torch.float64
        if self.sums is None or self.counts is None:
            self.sums = torch.zeros(len(self.table), dtype=wide, device=losses.device)
            self.counts = torch.zeros_like(self.sums)
        self.sums.index_add_(0, ids, losses.detach().to(wide))
        self.counts.index_add_(0, ids, torch.ones_like(losses, dtype=wide))

    def close_step(self) -> None:
        """Moves the table by the mean loss of each entry that the step has predicted, on all processes alike."""
        if self.sums is None or self.counts is None:
            return
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.sums)
            dist.all_reduce(self.counts)
        self.table = self.table.to(self.sums.device)
        mean = (self.sums / self.counts.clamp(min=1)).float()
        self.table = torch.where(self.counts > 0, self.beta * self.table + (1 - self.beta) * mean, self.table)
        self.sums = self.counts = None

    def keep(self, input_ids: Tensor, attention_mask: Tensor | None, kept: int) -> Tensor:
        """Indices (batch, kept) of the tokens to go on with; padding comes last, the always kept ones first."""
        self.table, self.always = self.table.to(input_ids.device), self.always.to(input_ids.device)
        scores = self.table[input_ids]
        scores = scores.masked_fill(torch.isin(input_ids, self.always), torch.inf)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask == 0, -torch.inf)
        return keep_best(scores, kept)


def short_stretch(layers: int) -> tuple[int, int]:
    """The blocks that run short: after the first layers / 2 - 1, up to the last one.

    >>> short_stretch(12)
    (5, 11)
    """
    return max(layers // 2 - 1, 0), layers - 1


@register(
    "token-dropping",
    title="Token dropping",
    section="selection",
    sources=[Paper("Hou et al.", 2022, "arXiv:2203.13240")],
    exact=False,
    # The number of tokens that stay follows the longest text of the micro-batch.
    micro_batch_invariant=False,
    claims=("tokens",),
    conflicts_with={
        "chunked-cross-entropy": "it never makes the logits, from which the running loss of each token is read",
    },
    tasks=("masked-lm",),
    preset={"beta": 0.5},
)
@dataclass(kw_only=True)
class TokenDropping(Method):
    """Runs the middle blocks on the important tokens."""

    keep_ratio: float = 0.5
    """Share of the tokens that the middle blocks see."""
    beta: float = 0.995
    """What a step leaves of an entry's running loss."""
    always_keep: tuple[int, ...] | None = None
    """Token ids that are never dropped; None: the tokenizer's special tokens but for padding."""

    blocks: ShortBlocks | None = field(default=None, init=False, repr=False)
    importance: TokenImportance | None = field(default=None, init=False, repr=False)
    logits: Tensor | None = field(default=None, init=False, repr=False)
    handles: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.keep_ratio <= 1:
            raise ValueError(f"keep_ratio must be above 0 and at most 1, got {self.keep_ratio}")
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must be at least 0 and below 1, got {self.beta}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        require_task(model, ctx, self.name, "masked-lm")
        config: Any = model.config
        if self.blocks is None:
            self.blocks = ShortBlocks(model, short_stretch, self.name)
        else:
            self.blocks.attach(model)
        self.handles.append(model.register_forward_hook(self._note_logits))
        if self.importance is None and not ctx.planning:
            self.importance = self._new_importance(config.vocab_size, ctx)
        return model

    def _new_importance(self, vocab_size: int, ctx: Any) -> TokenImportance:
        tokenizer = ctx.processing_class
        always = self.always_keep
        if always is None:
            special = getattr(tokenizer, "all_special_ids", [])
            always = tuple(i for i in special if i != getattr(tokenizer, "pad_token_id", None))
        return TokenImportance(vocab_size, self.beta, always=always)

    def _note_logits(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if model.training:
            self.logits = output.logits.detach() if hasattr(output, "logits") else None

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        def short(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            ids, labels = inputs["input_ids"], inputs["labels"]
            assert self.blocks is not None
            # In a dry run the table would mix with tensors that have no data; what is kept does not change the cost.
            importance = self._new_importance(model.config.vocab_size, ctx) if ctx.planning else self.importance  # type: ignore[union-attr, arg-type]  # fmt: skip
            assert importance is not None
            kept = math.ceil(ids.shape[1] * self.keep_ratio)
            index = importance.keep(ids, inputs.get("attention_mask"), kept) if kept < ids.shape[1] else None
            with self.blocks.keeping(index):
                loss = compute_loss(model, inputs, num_items_in_batch)
            if not ctx.planning and self.logits is not None:
                self._learn(labels, importance)
            return loss

        return short

    def _learn(self, labels: Tensor, importance: TokenImportance) -> None:
        logits, self.logits = self.logits, None
        assert logits is not None
        predicted = labels != IGNORED
        targets = labels[predicted]
        importance.add(functional.cross_entropy(logits[predicted].float(), targets, reduction="none"), targets)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        assert self.importance is not None
        self.importance.sums = self.importance.counts = None  # what a trial before the first step has left

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        assert self.importance is not None
        self.importance.close_step()

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        assert self.blocks is not None
        self._remove()
        self.blocks.attach(model)
        self.handles.append(model.register_forward_hook(self._note_logits))

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        self._remove()
        return model

    def _remove(self) -> None:
        assert self.blocks is not None
        self.blocks.remove()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.importance.table.cpu()} if self.importance is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.importance is not None
        self.importance.table = state["table"].clone()
        self.importance.sums = self.importance.counts = None
