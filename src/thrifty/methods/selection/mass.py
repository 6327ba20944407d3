"""Masked span pre-training that leaves the masked tokens out.

What it does: masks one contiguous span of each text (half of it). In an encoder-decoder the decoder gets the span
alone, at its own positions, and predicts it. In an encoder the masked tokens are left out of the early blocks, which
run on the rest, and come in again for the late ones.

Helps: pre-training on plain text: the decoder, or the early blocks, run on half of the sequence.
Does not help: fine-tuning; texts of a few tokens.
Limits: it makes its own masks in place of the task's, also for validation. In an encoder, 20 % of the span's tokens
carry a word (as in BERT) and are not left out; evaluation runs all blocks on all tokens. The form for encoders is that
of Liao et al., with the span of MASS. T5 has no mask token: name one.
Source: Song et al., "MASS: Masked Sequence to Sequence Pre-training for Language Generation", ICML 2019; Liao et al.,
"Mask More and Mask Later", 2022.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.data.collate import attention_mask, pad, with_sample_ids
from thrifty.method import Method, NotApplicable, Paper, TrainingData, register
from thrifty.methods.selection._tokens import ShortBlocks, keep_best, require_task

IGNORED = -100
_POSITIONS = "decoder_positions"
_MASKED_SHARE = 0.8  # of the span; the others become a random word or stay


@dataclass(kw_only=True)
class SpanCollator:
    """Masks one span in each sample of a batch, as a function of seed, epoch and text only.

    Samples have `input_ids`; other columns but `sample_id` are not used. Returns `input_ids` (B, S), `attention_mask`
    where something is padded, and `labels`: (B, S) with -100 outside the span; for an encoder-decoder (B, T), the span
    itself, with `decoder_input_ids`, the tokens one place before, and `decoder_positions`.
    """

    pad_token_id: int
    mask_token_id: int
    vocab_size: int
    special_token_ids: frozenset[int] = frozenset()
    mask_ratio: float = 0.5
    decoder_start: int | None = None
    """Makes batches for an encoder-decoder: what its decoder gets where the span begins the text."""
    seed: int = 42
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the spans of that epoch (counted from 0)."""
        self.epoch = int(epoch)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows: list[Any] = [self._mask(np.asarray(feature["input_ids"], dtype=np.int64)) for feature in features]
        masked: list[Any] = [row[0] for row in rows]
        batch: dict[str, Any] = {"input_ids": pad(masked, self.pad_token_id)}
        mask = attention_mask(masked, batch["input_ids"].shape[1])
        if mask is not None:
            batch["attention_mask"] = mask
        if self.decoder_start is None:
            batch["labels"] = pad([row[1] for row in rows], IGNORED)
        else:
            spans = [row[2] for row in rows]
            texts: list[Any] = [np.asarray(feature["input_ids"]) for feature in features]
            before: list[Any] = [
                [self.decoder_start if i == 0 else text[i - 1] for i in span]
                for text, span in zip(texts, spans, strict=True)
            ]
            batch["labels"] = pad([text[span] for text, span in zip(texts, spans, strict=True)], IGNORED)
            batch["decoder_input_ids"] = pad(before, self.pad_token_id)
            batch[_POSITIONS] = pad(spans, 0)
        return with_sample_ids(batch, features)

    def _mask(self, ids: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
        """The masked text, its labels, and the places of the span (ascending)."""
        rng = np.random.Generator(np.random.Philox([self.seed, self.epoch, zlib.crc32(ids.tobytes()), len(ids)]))
        words = np.flatnonzero(~np.isin(ids, list(self.special_token_ids)))
        length = max(1, round(self.mask_ratio * len(words))) if len(words) else 0
        start = int(rng.integers(0, len(words) - length + 1)) if length else 0
        span = words[start : start + length]
        kind, other = rng.random(length), rng.integers(0, self.vocab_size, length)
        masked, labels = ids.copy(), np.full(len(ids), IGNORED)
        labels[span] = ids[span]
        masked[span] = np.where(kind < _MASKED_SHARE, self.mask_token_id, np.where(kind < 0.9, other, ids[span]))
        return masked, labels, span


def place_positions(model: nn.Module) -> Any:
    """Lets the decoder of an encoder-decoder take `decoder_positions` (batch, span) as the positions of its input.

    Returns:
        The hooks' handles, each with `remove()`.

    Raises:
        NotApplicable: The decoder counts positions from 0 and cannot be told others.
    """
    import inspect

    decoder: Any = model.get_decoder()  # type: ignore[operator]
    table = getattr(decoder, "embed_positions", None)
    current: dict[str, Tensor | None] = {"positions": None}
    if table is not None and "position_ids" not in inspect.signature(type(table).forward).parameters:
        raise NotApplicable(
            f"mass: the decoder of {type(model).__name__} cannot be told the positions of a span",
            fix="a model such as BART, or T5, whose positions are relative",
        )

    def take(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        current["positions"] = kwargs.pop(_POSITIONS, None)
        return args, kwargs

    def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        positions = current["positions"]
        return None if positions is None else (args, {**kwargs, "position_ids": positions})

    def flatten(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        # BART puts a dimension before the positions that it is told, which it takes for those of all samples.
        return output[0] if current["positions"] is not None and output.dim() == 4 else None

    handles = [model.register_forward_pre_hook(take, with_kwargs=True)]
    if table is not None:
        handles.append(table.register_forward_pre_hook(give, with_kwargs=True))
        handles.append(table.register_forward_hook(flatten))
    return handles


@register(
    "mass",
    title="MASS: spans, masked and left out",
    section="selection",
    sources=[Paper("Song et al.", 2019, "arXiv:1905.02450"), Paper("Liao et al.", 2022, "arXiv:2211.04898")],
    exact=False,
    # How many tokens the early blocks see follows the sample of the micro-batch that has most.
    micro_batch_invariant=False,
    claims=("tokens", "masking"),
    tasks=("masked-lm", "seq2seq-lm"),
    preset={"mask_token_id": 1},
)
@dataclass(kw_only=True)
class Mass(Method):
    """Predicts a masked span that the early blocks, or the decoder, run without the rest of."""

    mask_ratio: float = 0.5
    """Length of the span as a share of the text."""
    mask_token_id: int | None = None
    """The token that stands for a masked one; None: the tokenizer's mask token."""
    late_blocks: int | None = None
    """Encoders: blocks at the end that see the masked tokens; None is a third of them, at least one."""

    blocks: ShortBlocks | None = field(default=None, init=False, repr=False)
    handles: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio <= 1:
            raise ValueError(f"mask_ratio must be above 0 and at most 1, got {self.mask_ratio}")
        if self.late_blocks is not None and self.late_blocks < 1:
            raise ValueError(f"late_blocks must be at least 1, got {self.late_blocks}")

    def _mask_token(self, ctx: Any) -> int:
        token = self.mask_token_id
        if token is None:
            token = getattr(ctx.processing_class, "mask_token_id", None)
        if token is None:
            raise NotApplicable(
                "mass needs a token that stands for a masked one, and the tokenizer has none",
                key="methods.mass.mask_token_id",
                fix="name its id (T5: that of <extra_id_0>)",
            )
        return int(token)

    def prepare_data(self, data: TrainingData, ctx: Any) -> TrainingData:
        tokenizer, config = ctx.processing_class, ctx.model.config
        special = frozenset(int(i) for i in getattr(tokenizer, "all_special_ids", []))
        found = getattr(tokenizer, "pad_token_id", None)
        padding = int(found if found is not None else getattr(config, "pad_token_id", None) or 0)
        start = getattr(config, "decoder_start_token_id", None)
        collator = SpanCollator(
            pad_token_id=padding,
            mask_token_id=self._mask_token(ctx),
            vocab_size=len(tokenizer) if tokenizer is not None else config.vocab_size,
            special_token_ids=special,
            mask_ratio=self.mask_ratio,
            decoder_start=(padding if start is None else int(start)) if config.is_encoder_decoder else None,
            seed=ctx.args.seed,
        )
        return TrainingData(train_dataset=data.train_dataset, eval_dataset=data.eval_dataset, data_collator=collator)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        require_task(model, ctx, self.name, "masked-lm", "seq2seq-lm")
        if getattr(model.config, "is_encoder_decoder", False):
            self.handles += place_positions(model)
        elif self.blocks is None:
            self.blocks = ShortBlocks(model, self._stretch, self.name)
        else:
            self.blocks.attach(model)
        return model

    def _stretch(self, layers: int) -> tuple[int, int]:
        late = max(1, layers // 3) if self.late_blocks is None else self.late_blocks
        return 0, layers - late

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        def short(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if self.blocks is None:
                return compute_loss(model, self._cut(inputs) if ctx.planning else inputs, num_items_in_batch)
            with self.blocks.keeping(self._kept(inputs, ctx)):
                return compute_loss(model, inputs, num_items_in_batch)

        return short

    def _kept(self, inputs: Any, ctx: Any) -> Tensor | None:
        """The places of the tokens that are not masked; where another sample has more, masked ones fill up."""
        ids = inputs["input_ids"]
        length = ids.shape[1]
        if ctx.planning:
            # In quarters, rounded down: a dry run looks at lengths whose quarters are whole.
            left = length - int(_MASKED_SHARE * self.mask_ratio * 4) * length // 4
            return torch.arange(left, device=ids.device).expand(len(ids), -1)
        masked = ids == self._mask_token(ctx)
        scores = -masked.float()
        if "attention_mask" in inputs:
            scores = scores.masked_fill(inputs["attention_mask"] == 0, -2.0)
        left = int((scores == 0).sum(1).max())
        return keep_best(scores, max(left, 1)) if left < length else None

    def _cut(self, inputs: Any) -> Any:
        """In a dry run: the decoder gets the span."""
        span = max(1, round(self.mask_ratio * 4) * inputs["labels"].shape[1] // 4)
        return {**inputs, "labels": inputs["labels"][:, :span].contiguous()}

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        self._remove()
        if self.blocks is not None:
            self.blocks.attach(model)
        else:
            self.handles += place_positions(model)

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        self._remove()
        return model

    def _remove(self) -> None:
        if self.blocks is not None:
            self.blocks.remove()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
