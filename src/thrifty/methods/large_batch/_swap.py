"""What the averaging methods share: other weights for a while, and then the model's own again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn


@contextlib.contextmanager
def swapped(model: nn.Module, write: Callable[[nn.Module], None]) -> Iterator[None]:
    """Lets `write` put other trained weights into the model; afterwards it holds its own again, bit for bit."""
    own = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    write(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in own:
                    p.copy_(own[name])
