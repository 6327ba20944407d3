"""Out of memory in the optimizer's step: tried again where nothing had changed yet.

The first step creates the optimizer's state, and every step needs room for intermediate results. Splitting a
micro-batch frees none of that. What helps is to give cached memory back and to try again, which is right only while no
weight and no state has been written: torch counts the writes to every tensor, so that can be told without a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from thrifty.safety.oom import is_oom, release_memory


class UpdateGuard:
    """Runs the optimizer's steps.

    Args:
        optimizer: The bare optimizer, without accelerate's wrapper.
        report: Gets one line where a second attempt went well.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, report: Callable[[str], None] = print) -> None:
        self.optimizer, self._report = optimizer, report
        # Kernels of other libraries write without torch counting it.
        self.counts_writes = type(optimizer).__module__.startswith(("torch.optim", "thrifty."))

    def run(self, step: Callable[[], Any]) -> str | None:
        """Runs one step.

        Returns:
            None where it is done; else the failure's first line, with weights or state partly written.
        """
        known = len(self.optimizer.state)
        writes = self._writes(known)
        failure = _attempt(step)
        if failure is None:
            return None
        if not self.counts_writes or self._writes(known) != writes:
            return failure
        for parameter in list(self.optimizer.state)[known:]:
            del self.optimizer.state[parameter]  # half-made state
        release_memory()
        again = _attempt(step)
        if again is None:
            self._report("out of memory in the optimizer step before it had changed anything: it was run again")
        return again

    def _writes(self, known: int) -> int:
        """Writes so far to all weights and to the state of the first `known` parameters that have one."""
        total = 0
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                total += parameter._version
        for state in itertools.islice(self.optimizer.state.values(), known):
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    total += value._version
        return total


def _attempt(step: Callable[[], Any]) -> str | None:
    try:
        step()
    except Exception as error:
        if not is_oom(error):
            raise
        failure = str(error).strip() or type(error).__name__
    else:
        return None
    return failure.splitlines()[0]
