"""Metrics that never need all logits at once: each sample is reduced to a few numbers while its logits are at hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.data.encode import IGNORED
from thrifty.tasks.base import first_logits

if TYPE_CHECKING:
    import torch


def token_losses(logits: torch.Tensor, labels: torch.Tensor, *, shift: bool) -> torch.Tensor:
    """Returns per-sample sums, float32 of shape (B, 3): negative log-likelihood in nats, tokens, tokens predicted
    right.

    Args:
        logits: Shape (B, S, V).
        labels: Shape (B, S); -100 is not counted.
        shift: Whether position i predicts label i + 1 (causal) or label i.
    """
    import torch

    rows: list[torch.Tensor] = []
    for scores, targets in _aligned(logits, labels, shift=shift):
        kept = targets != IGNORED
        correct = (scores.argmax(-1) == targets) & kept
        rows.append(torch.stack([_nll(scores, targets), kept.sum().float(), correct.sum().float()]))
    return torch.stack(rows)


def mean_losses(logits: torch.Tensor, labels: torch.Tensor, *, shift: bool) -> torch.Tensor:
    """Returns the mean loss of each sample over its counted tokens, shape (B,); 0 for a sample without any."""
    import torch

    pairs = _aligned(logits, labels, shift=shift)
    return torch.stack([_nll(scores, targets) / (targets != IGNORED).sum().clamp(min=1) for scores, targets in pairs])


def _aligned(logits: torch.Tensor, labels: torch.Tensor, *, shift: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (S, V) and (S,) sample by sample, so that no float32 copy of a whole batch's logits is made.

    Logits of a learnt prompt, which stand before those of the sample, have no labels.
    """
    logits = logits[:, logits.shape[1] - labels.shape[1] :]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return zip(logits, labels, strict=True)


def _nll(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    return functional.cross_entropy(scores.float(), targets, ignore_index=IGNORED, reduction="sum")


class LanguageModelMetrics:
    """`compute_metrics` and `preprocess_logits_for_metrics` of a language model."""

    def __init__(self, *, shift: bool, eval_bytes: int | None = None, eval_tokens: int | None = None) -> None:
        self.shift, self.eval_bytes, self.eval_tokens = shift, eval_bytes, eval_tokens

    def reduce(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        """Returns what `token_losses` does, for the Trainer to gather: shape (B, 3)."""
        return token_losses(first_logits(logits), labels, shift=self.shift)

    def compute(self, prediction: Any) -> dict[str, float]:
        """Returns `nll` (nats a token, each token counting the same), `perplexity`, `accuracy` and `bits_per_byte`."""
        nll, tokens, correct = np.asarray(prediction.predictions, dtype=np.float64).reshape(-1, 3).sum(axis=0)
        if tokens == 0:
            return {"nll": math.nan}
        mean = nll / tokens
        metrics = {
            "nll": float(mean),
            "perplexity": math.exp(mean) if mean < 700 else math.inf,
            "accuracy": float(correct / tokens),
        }
        if self.eval_bytes and self.eval_tokens:
            # By the bytes a token of the whole validation text, so that a part of it may be evaluated.
            metrics["bits_per_byte"] = bits_per_byte(float(mean) * self.eval_tokens, self.eval_bytes)
        return metrics


def bits_per_byte(nll: float, size: int) -> float:
    """Returns bits per byte: comparable between models whatever their vocabulary.

    Args:
        nll: Negative log-likelihood of the whole text in nats.
        size: UTF-8 bytes of that text.

    >>> round(bits_per_byte(math.log(2) * 8, 4), 6)
    2.0
    """
    return nll / math.log(2) / size


def reconstruction_metrics(prediction: Any) -> dict[str, float]:
    """Returns nothing beside the loss, which is the measure of a reconstruction."""
    del prediction
    return {}


def pair_embeddings(logits: Any, labels: Any) -> torch.Tensor:
    """Returns text and image embedding of each pair, normalised, shape (B, 2, D), of all that a CLIP model gives."""
    import torch

    del labels
    return torch.stack([part.float() for part in logits[2:4]], dim=1)


def retrieval_metrics(prediction: Any) -> dict[str, float]:
    """Returns `image_to_text` and `text_to_image`: how often the own partner is the nearest of the whole set.

    Equal captions are equally near, and count as found.
    """
    pairs = np.asarray(prediction.predictions, dtype=np.float32)
    nearness = pairs[:, 0] @ pairs[:, 1].T
    own = np.diag(nearness) + 1e-6
    return {
        "text_to_image": float(np.mean(own >= nearness.max(axis=1))),
        "image_to_text": float(np.mean(own >= nearness.max(axis=0))),
    }


def class_predictions(logits: Any, labels: Any) -> torch.Tensor:
    """Returns the predicted class of each sample, shape (B,)."""
    del labels
    return first_logits(logits).argmax(-1)


def class_metrics(prediction: Any) -> dict[str, float]:
    """Returns `accuracy` and `f1` (the mean over the classes that occur) of gathered class predictions."""
    predicted = np.asarray(prediction.predictions).reshape(-1)
    labels = np.asarray(prediction.label_ids).reshape(-1)
    scores: list[float] = []
    for value in np.union1d(predicted, labels):
        right = np.sum((predicted == value) & (labels == value))
        scores.append(float(2 * right / (np.sum(predicted == value) + np.sum(labels == value))))
    return {"accuracy": float(np.mean(predicted == labels)), "f1": float(np.mean(scores))}
