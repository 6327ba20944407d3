"""Numbers that are not numbers: seen before the optimizer step, named, and answered by a policy.

One value a step goes to the host: loss and gradient norm together, in one copy. `transformers.Trainer` asks twice a
*micro-batch* when `logging_nan_inf_filter` is on (its default, which also logs 0.0 for a NaN loss); with that filter
off and this guard on there are fewer synchronisations than before.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from thrifty.errors import InputError, ThriftyError

Policy = Literal["skip", "rewind", "stop"]
Action = Literal["go", "skip", "rewind", "stop"]


class NonFinite(ThriftyError):
    """Training met a loss or gradient that is not finite, and the policy says to stop."""


@dataclass(frozen=True)
class Verdict:
    """What to do with the step at hand; `message` is one line, or None where all is well."""

    action: Action
    message: str | None = None


def read_together(loss: torch.Tensor | float | None, grad_norm: torch.Tensor | float | None) -> tuple[float, float]:
    """Brings loss and gradient norm to the host in one copy. A missing one reads as 0.0.

    Args:
        loss: The step's summed, detached loss (0-d), or None.
        grad_norm: The total norm that gradient clipping computed (0-d; a DTensor is made whole), or None.
    """
    values = [0.0 if v is None else v for v in (loss, grad_norm)]
    values = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in values]  # pyright: ignore[reportAttributeAccessIssue]
    on_device = [v for v in values if isinstance(v, torch.Tensor)]
    if len(on_device) == 2:
        first, second = torch.stack([v.detach().float().reshape(()) for v in on_device]).tolist()
        return first, second
    return float(values[0]), float(values[1])


class FiniteGuard:
    """Decides about each step before the optimizer moves the weights.

    Args:
        policy: `skip` drops the step's gradients; `rewind` asks for the last good checkpoint, leaving out the batch;
            `stop` ends.
        max_in_a_row: Bad steps in a row (or rewinds in all, under `rewind`) after which any policy stops.
        loss_scaling: Under fp16 with a gradient scaler infinite gradients are how the scale is found: the scaler skips
            those steps itself, and only a loss that is not finite, or `max_scaler_skips` in a row, is a fault.
        max_scaler_skips: See `loss_scaling`. A scale of 2^16 reaches 1 after 16.
    """

    def __init__(
        self,
        policy: Policy = "skip",
        *,
        max_in_a_row: int = 3,
        loss_scaling: bool = False,
        max_scaler_skips: int = 30,
    ) -> None:
        if policy not in ("skip", "rewind", "stop"):
            raise InputError("unknown policy", key="on_non_finite", value=policy, fix="use skip, rewind or stop")
        if max_in_a_row < 1:
            raise InputError("must be at least 1", key="max_non_finite_in_a_row", value=max_in_a_row, fix="use 3")
        self.policy: Policy = policy
        self.max_in_a_row, self.loss_scaling, self.max_scaler_skips = max_in_a_row, loss_scaling, max_scaler_skips
        self.in_a_row = self.scaler_skips = self.rewinds = self.total = 0

    def check(
        self,
        loss: float,
        grad_norm: float,
        step: int,
        sample_ids: Sequence[Any] | None = None,
        last_good: Path | str | None = None,
    ) -> Verdict:
        """Returns what to do with this step.

        Args:
            loss: The step's loss, the same on every process; where it differs between them pass 0.0, for a NaN loss
                makes the exchanged gradients NaN everywhere.
            grad_norm: The total gradient norm before clipping.
            step: The optimizer step about to be taken, from 1.
            sample_ids: The samples of the step, to be named in the message.
            last_good: The newest complete checkpoint, to be named in the message.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = self.scaler_skips = 0
            return Verdict("go")
        if self.loss_scaling and math.isfinite(loss) and self.scaler_skips < self.max_scaler_skips:
            self.scaler_skips += 1
            return Verdict("go")
        self.in_a_row += 1
        self.total += 1
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {grad_norm} (loss {loss:.4g})"
        text = f"step {step}: {what}, samples {shortened(sample_ids)}, last good checkpoint: {last_good or 'none yet'}"
        if self.policy == "stop":
            return Verdict("stop", f"{text}; stopped before the optimizer step, the weights are still finite")
        if self.policy == "rewind" and last_good is not None and self.rewinds < self.max_in_a_row:
            self.rewinds += 1
            return Verdict(
                "rewind", f"{text}; going back to it and leaving out this batch ({self.rewinds} of {self.max_in_a_row})"
            )
        if self.policy == "rewind" and last_good is not None:
            return Verdict("stop", f"{text}; stopped: already went back {self.rewinds} times")
        if self.in_a_row > self.max_in_a_row:
            return Verdict(
                "stop", f"{text}; stopped: {self.in_a_row} steps in a row (lower learning_rate, or look at the data)"
            )
        return Verdict(
            "skip", f"{text}; step skipped, weights unchanged ({self.in_a_row} of {self.max_in_a_row} in a row)"
        )

    def state_dict(self) -> dict[str, int]:
        """Counters, so that a resumed run stops where the unbroken one would have."""
        return {name: getattr(self, name) for name in ("in_a_row", "scaler_skips", "rewinds", "total")}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores the counters."""
        for name in ("in_a_row", "scaler_skips", "rewinds", "total"):
            setattr(self, name, int(state[name]))


class SpikeDetector:
    """Reports a loss far above the recent ones.

    The threshold is the median of the last `window` losses plus `width` robust standard deviations (1.4826 x the median
    absolute deviation, and at least `floor` of the median, for a loss that hardly moves). Median and deviation are deaf
    to the spikes themselves; a loss that stays high becomes the new normal after half a window.
    """

    def __init__(self, *, window: int = 64, width: float = 10.0, floor: float = 0.02, warm_up: int = 16) -> None:
        self.width, self.floor, self.warm_up = width, floor, warm_up
        self.losses: deque[float] = deque(maxlen=window)

    def check(self, loss: float, step: int, sample_ids: Sequence[Any] | None = None) -> str | None:
        """Takes one step's loss; returns a line where it is a spike. A loss that is not finite is `FiniteGuard`'s
        business."""
        if not math.isfinite(loss):
            return None
        line = None
        if len(self.losses) >= self.warm_up:
            middle = statistics.median(self.losses)
            spread = 1.4826 * statistics.median([abs(x - middle) for x in self.losses])
            limit = middle + self.width * max(spread, self.floor * abs(middle))
            if loss > limit:
                line = (
                    f"step {step}: loss {loss:.4g} is a spike (median of the last {len(self.losses)} steps "
                    f"{middle:.4g}, threshold {limit:.4g}), samples {shortened(sample_ids)}"
                )
        self.losses.append(loss)
        return line

    def state_dict(self) -> dict[str, list[float]]:
        """The window of losses."""
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restores the window of losses."""
        self.losses = deque(state["losses"], maxlen=self.losses.maxlen)


def shortened(sample_ids: Sequence[Any] | None, limit: int = 8) -> str:
    """Returns ids for a message.

    >>> shortened([3, 1, 4])
    '3 1 4'
    >>> shortened(range(20), limit=3)
    '0 1 2 ... (20)'
    """
    if sample_ids is None:
        return "unknown"
    shown = " ".join(str(i) for i in list(sample_ids)[:limit])
    return shown if len(sample_ids) <= limit else f"{shown} ... ({len(sample_ids)})"
