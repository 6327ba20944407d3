"""Metrics rows as series to draw: gaps where a value is missing, a smoothed trend, and thinning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from thrifty.report.metrics import Row, rows_of

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Series:
    """Values over steps.

    Attributes:
        steps: [points] the step of each point, ascending.
        values: [points] the value, NaN where it was missing or not finite.
    """

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    def since(self, step: float) -> Series:
        """The points from `step` on."""
        keep = self.steps >= step
        return Series(self.steps[keep], self.values[keep])

    @property
    def finite(self) -> Series:
        """The points whose value is finite."""
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])


def series(rows: list[Row], kind: str, key: str) -> Series:
    """Returns the values under `key` of the rows of one kind. A row without the key is left out."""
    found = [(row["step"], _number(row[key])) for row in rows_of(rows, kind) if key in row]
    array = np.array(found, dtype=np.float64).reshape(-1, 2)
    return Series(array[:, 0], array[:, 1])


def not_finite(rows: list[Row], key: str = "loss") -> list[int]:
    """Returns the steps of the `train` rows whose value under `key` is NaN or infinite."""
    return [
        row["step"] for row in rows_of(rows, "train") if isinstance(row.get(key), float) and not np.isfinite(row[key])
    ]


def resumed_steps(rows: list[Row]) -> list[int]:
    """Returns the steps at which the run was resumed."""
    return sorted({row["step"] for row in rows if row["kind"] == "event" and row.get("event") == "resume"})


def smooth(data: Series) -> Series:
    """Returns the trend: a weighted straight-line fit around each point; gaps stay gaps and count for nothing.

    A moving average would lag behind a falling loss and bend at both ends; a local line does neither. The window is a
    twelfth of the run, and narrower near the start, where a loss falls fastest.
    """
    whole, data = data, data.finite
    count = len(data)
    if count < 5:
        return whole
    widest = max(3, count // 25)
    trend = np.empty(count)
    for i in range(count):
        half = min(widest, max(1, int(0.35 * i)))
        window = slice(max(0, i - half), i + half + 1)
        x, y = data.steps[window] - data.steps[i], data.values[window]
        weights = (1 - (np.abs(x) / (np.abs(x).max() * 1.01)) ** 3) ** 3
        total, mean_x = weights.sum(), np.average(x, weights=weights)
        mean_y = np.average(y, weights=weights)
        spread = (weights * (x - mean_x) ** 2).sum() / total
        slope = (weights * (x - mean_x) * (y - mean_y)).sum() / total / spread if spread > 0 else 0.0
        trend[i] = mean_y - slope * mean_x
    values = np.full(len(whole), np.nan)
    values[np.isfinite(whole.values)] = trend
    return Series(whole.steps, values)


def thin(data: Series, most: int = 400) -> Series:
    """Returns about `most` points or fewer that keep the look: both extremes of each stretch, and the ends."""
    if len(data) <= most:
        return data
    keep = {0, len(data) - 1}
    for stretch in np.array_split(np.arange(len(data)), most // 2):
        values = data.values[stretch]
        if np.isnan(values).any():
            keep.add(int(stretch[np.isnan(values)][0]))  # so that a gap stays a gap
        if np.isfinite(values).any():
            keep.update((int(stretch[np.nanargmin(values)]), int(stretch[np.nanargmax(values)])))
    index = np.array(sorted(keep))
    return Series(data.steps[index], data.values[index])


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Returns round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = int(np.ceil(low / step - 1e-9))
    last = int(np.floor(high / step + 1e-9))
    return [float(i * step) for i in range(first, last + 1)]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float("nan")
    return float(value) if np.isfinite(value) else float("nan")
