"""What the bench may claim from noisy timings: paired ratios with an interval, and the verdict.

The rounds are the sample. In each round every row runs once in a process of its own, and the baseline twice. Of each
round one number a row is kept: the logarithm of its value over the geometric mean of that round's two baselines.

- *Paired by round*, because most of the noise of a shared machine (other tenants, clock rates, temperature) changes
  slowly: it hits all rows of a round alike and cancels in the ratio.
- *Logarithms*, because noise multiplies (a busy machine makes a step 20 % slower, not 5 ms), so that the ratio of a row
  to the baseline and that of the baseline to the row have mirrored intervals.
- *Student's t*, not a bootstrap: with three to nine rounds a bootstrap resamples so few values that its intervals are
  too short and cover far less than they say. The t interval is exact for normal noise and pays for few rounds with
  width.
- *One process is one value*, however many steps it timed: two processes that run the same code differ for good by their
  memory layout, so that steps of one process are no independent measurements of a row. Processes forked from one server
  share most of that layout, so that each round has a server of its own.
- *99 % for speed*, because a table makes many claims at once: at 95 % an A/A pair would be called different once in
  twenty, at 99 % a table of eight rows is right in nine of ten. Losses come from only three seeds, of which a 99 %
  interval would say nothing, and have 95 %.

The difference of the two baselines of each round is the machine's own noise, and is reported with every table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

SPEED_CONFIDENCE = 0.99
LOSS_CONFIDENCE = 0.95
SAME_LOSS = 1e-4
"""Share of a loss by which kernels that round otherwise may differ."""
TRIMMED = 0.1
"""Share of the steps left out at each end of a process's mean: one stall must not decide a round."""

Verdict = Literal["faster", "slower", "no difference", "not measured"]


@dataclass(frozen=True)
class Interval:
    """A middle value with the interval in which the true one lies.

    Attributes:
        median: Of the rounds or seeds.
        low, high: Ends of the interval; infinite where a single value says nothing about the spread.
        count: How many rounds or seeds.
        confidence: For example 0.99.
    """

    median: float
    low: float
    high: float
    count: int
    confidence: float

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside of the interval."""
        return value < self.low or value > self.high

    def to_dict(self) -> dict[str, float | int]:
        """Plain data for a result file."""
        return {
            "median": self.median, "low": self.low, "high": self.high, "count": self.count,
            "confidence": self.confidence,
        }  # fmt: skip


def typical(seconds: Sequence[float]) -> float:
    """The mean of the step times of one process, the slowest and the fastest tenth left out.

    A median would hide a technique that makes every fourth step expensive; a plain mean follows a single stall.
    """
    ordered = np.sort(np.asarray(seconds, dtype=float))
    cut = int(TRIMMED * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def interval(values: Sequence[float], confidence: float) -> Interval:
    """The median of `values` and the t interval of their mean.

    Raises:
        ValueError: There are no values.
    """
    from scipy import stats

    if not values:
        raise ValueError("an interval needs at least one value")
    array = np.asarray(values, dtype=float)
    middle, count = float(np.median(array)), len(array)
    if count == 1:
        return Interval(middle, -math.inf, math.inf, 1, confidence)
    spread = float(array.std(ddof=1)) / math.sqrt(count)
    half = float(stats.t.ppf(0.5 + confidence / 2, count - 1)) * spread
    mean = float(array.mean())
    return Interval(middle, min(mean - half, middle), max(mean + half, middle), count, confidence)


def ratio(values: Sequence[float], baselines: Sequence[float], confidence: float = SPEED_CONFIDENCE) -> Interval:
    """The ratio of paired positive values, on the scale of logarithms.

    Args:
        values: One value a round.
        baselines: The baseline of the same rounds, in the same order.
        confidence: Of the interval.
    """
    logs = [math.log(value / base) for value, base in zip(values, baselines, strict=True)]
    found = interval(logs, confidence)
    ends = [math.exp(end) if end < 700 else math.inf for end in (found.low, found.high)]
    return Interval(math.exp(found.median), ends[0], ends[1], found.count, confidence)


def difference(values: Sequence[float], baselines: Sequence[float], confidence: float = LOSS_CONFIDENCE) -> Interval:
    """The difference of paired values, such as final losses of the same seeds."""
    return interval([value - base for value, base in zip(values, baselines, strict=True)], confidence)


def verdict(step_time: Interval | None) -> Verdict:
    """What may be said of a row from the ratio of its step time (or time a token) to the baseline's."""
    if step_time is None or step_time.count < 2:
        return "not measured"
    if not step_time.excludes(1.0):
        return "no difference"
    return "faster" if step_time.high < 1 else "slower"


def reached(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """When a curve of (seconds, validation loss) first comes down to `loss`, by straight lines between evaluations.

    A loss that is above it by rounding alone (`SAME_LOSS`) has come down to it.

    Returns:
        Seconds, or None where the curve never gets there.
    """
    before: tuple[float, float] | None = None
    for seconds, value in curve:
        if value <= loss + SAME_LOSS * abs(loss):
            if before is None or before[1] <= value or value >= loss:
                return seconds
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + max(0.0, share) * (seconds - before[0])
        before = (seconds, value)
    return None
