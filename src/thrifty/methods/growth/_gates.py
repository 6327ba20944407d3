"""What the methods share that skip blocks or branches at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def keep_probability(layer: int, layers: int, theta_bar: float) -> float:
    """The keep probability of block `layer` (counted from 1) of `layers`."""
    return 1 - layer / layers * (1 - theta_bar)


class Gate:
    """Stands in front of a block's `forward`: skips it, or runs it with its branches scaled by 1 / p.

    A plain object that refers to the block, so that a deep copy of the block gets a gate of its own.
    """

    def __init__(self, block: nn.Module, branches: list[str]) -> None:
        self.block = block
        self.keep = True
        self.probability = 1.0
        self.skipped = 0
        self._tuple: bool | None = None
        self._handles = [block.get_submodule(name).register_forward_hook(self._scale) for name in branches]
        block.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = type(self.block).forward
        if self.keep or not self.block.training:
            out = run(self.block, *args, **kwargs)
            self._tuple = isinstance(out, tuple)
            return out
        if self._tuple is None:  # never ran yet (after a resume): learn once whether the block returns a tuple
            with torch.no_grad(), torch.random.fork_rng():
                self._tuple = isinstance(run(self.block, *args, **kwargs), tuple)
        self.skipped += 1
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if self._tuple else hidden

    def _scale(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self.block.training or self.probability == 1.0:
            return None
        return output / self.probability

    def remove(self) -> None:
        """Takes the gate away."""
        for handle in self._handles:
            handle.remove()
        del self.block.forward


class BranchMask:
    """Multiplies what a block's branches add to the residual stream, each sample by a factor of its own.

    Like `Gate`, a plain object that refers to the block, and is copied with it.
    """

    def __init__(self, block: Any, branches: list[str]) -> None:
        self.block, self.branches = block, branches
        self.factors: Tensor | None = None
        self._handles = [
            block.get_submodule(name).register_forward_hook(_Branch(self, index)) for index, name in enumerate(branches)
        ]
        block.branch_mask = self

    def remove(self) -> None:
        """Takes the mask away."""
        for handle in self._handles:
            handle.remove()
        del self.block.branch_mask


class _Branch:
    def __init__(self, mask: BranchMask, index: int) -> None:
        self.mask, self.index = mask, index

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if self.mask.factors is None or not self.mask.block.training:
            return None
        factors = self.mask.factors[self.index].to(output)  # (batch,)
        return output * factors.view(-1, *[1] * (output.ndim - 1))
