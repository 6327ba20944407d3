"""Faults that tests and soaks inject."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class InjectOom(TorchDispatchMode):
    """Raises an out-of-memory error at the n-th operation (1-based) that allocates, forward and backward alike."""

    def __init__(self, at_allocation: int, error: BaseException | None = None, times: int = 1) -> None:
        super().__init__()
        self.at, self.error, self.count, self.left = at_allocation, error, 0, times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views_or_writes = func.is_view or func._schema.is_mutable
        if isinstance(out, torch.Tensor | list | tuple) and not views_or_writes:
            self.count += 1
            if self.left and self.count >= self.at:
                self.left -= 1
                self.at = 1
                raise self.error or torch.OutOfMemoryError("Tried to allocate 20.00 MiB. GPU 0 is full (injected)")
        return out


def exhaust(run: Any, step: int, occurrence: int = 1, part: str = "backward") -> None:
    """Raises an out-of-memory in the `step`-th step, at its `occurrence`-th pass.

    Args:
        run: A trainer.
        step: From 1.
        occurrence: Which of the step's passes, from 1; pieces count.
        part: `forward` (before it), `in-forward`, `backward` (before it), or `after-backward` (gradients were added).
    """
    seen = [0]
    compute_loss, original = run.compute_loss, run.accelerator.backward

    def due() -> bool:
        if run.state.global_step == step - 1 and run.is_in_train:
            seen[0] += 1
        return seen[0] == occurrence and run.state.global_step == step - 1

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (injected)")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if part == "forward" and due():
            fail()
        return compute_loss(*args, **kwargs)

    def backward(loss: Any, **kwargs: Any) -> None:
        struck = not part.endswith("forward") and due()
        if struck and part == "backward":
            fail()
        original(loss, **kwargs)
        if struck:
            fail()

    if part == "in-forward":
        run.model.get_input_embeddings().register_forward_hook(lambda *_: fail() if due() else None)
    run.compute_loss, run.accelerator.backward = forward, backward
