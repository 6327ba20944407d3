"""The head of a classifier."""

from __future__ import annotations

from torch import nn

_NAMES = ("classifier", "score", "classification_head")


def head_of(model: nn.Module) -> str | None:
    """The name of the classification head, which is new in most fine-tuning; None where there is none."""
    return next((name for name in _NAMES if isinstance(getattr(model, name, None), nn.Module)), None)
