"""Charts of the bench's pages as inline SVG: bars with intervals, and curves over any axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from thrifty.report import text
from thrifty.report.series import nice_ticks

COLOURS = 8
"""The style sheet knows `c0` to `c7`."""
_CHARACTER = 6.6


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        label: Name at its left.
        value: Length.
        low, high: Interval drawn as a whisker, or None.
        shown: Text at its right.
        style: CSS class.
    """

    label: str
    value: float
    shown: str
    low: float | None = None
    high: float | None = None
    style: str = "c0"


def bar_chart(title: str, bars: Sequence[Bar], *, mark: float | None = None, width: int = 520) -> str:
    """Horizontal bars from zero.

    Args:
        title: For screen readers.
        bars: From top to bottom.
        mark: A value at which a line is drawn, such as the baseline's.
        width: In SVG units.
    """
    if not bars:
        return ""
    left = 14 + _CHARACTER * min(30, max(len(bar.label) for bar in bars))
    right = width - 14 - _CHARACTER * max(len(bar.shown) for bar in bars)
    ends = [bar.value for bar in bars] + [bar.high for bar in bars if bar.high is not None and math.isfinite(bar.high)]
    longest = max(bar.value for bar in bars)
    top = min(max([*ends, mark or 0.0]), 1.6 * max(longest, mark or 0.0)) or 1.0

    def x(value: float) -> float:
        return left + min(value, top) / top * (right - left)

    height = 26 * len(bars) + 10
    parts = []
    for index, bar in enumerate(bars):
        y = 8 + 26 * index
        label = bar.label if len(bar.label) <= 30 else bar.label[:14] + "…" + bar.label[-15:]
        parts.append(
            f'<text x="{left - 8:.1f}" y="{y + 13}" text-anchor="end">{escape(label)}</text>'
            f'<rect class="{bar.style}" x="{left:.1f}" y="{y}" width="{max(0.5, x(bar.value) - left):.1f}" height="18" '
            f'rx="3"><title>{escape(bar.label)}: {escape(bar.shown)}</title></rect>'
        )
        end = x(bar.value)
        if bar.low is not None and bar.high is not None and math.isfinite(bar.high):
            low, end = x(bar.low), max(end, x(bar.high))
            parts.append(
                f'<path class="whisker" d="M{low:.1f} {y + 9}H{x(bar.high):.1f}M{low:.1f} {y + 5}v8'
                f'M{x(bar.high):.1f} {y + 5}v8"/>'
            )
        parts.append(f'<text class="value" x="{end + 7:.1f}" y="{y + 13}">{escape(bar.shown)}</text>')
    if mark is not None:
        parts.append(f'<line class="mark" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="2" y2="{height - 4}"/>')
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


@dataclass(frozen=True)
class Curve:
    """One line.

    Attributes:
        name: For the legend and the pointer.
        points: (x, y), x ascending; what is not finite leaves a gap.
        style: CSS class.
        dots: Whether each point is drawn.
    """

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    dots: bool = True


def curve_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_name: str,
    show_x: Callable[[float], str] = text.number,
    width: int = 1060,
    height: int = 380,
) -> str:
    """Lines over a common axis, or an empty text where there is no point."""
    finite = [(x, y) for curve in curves for x, y in curve.points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return ""
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    x_low, x_high = (0.0 if min(xs) < 0.2 * max(xs) else min(xs)), max(xs)
    x_high = x_high if x_high > x_low else x_low + 1
    room = 0.06 * (max(ys) - min(ys)) or 0.1 * abs(max(ys)) or 1.0
    y_low, y_high = min(ys) - room, max(ys) + room
    ticks = nice_ticks(y_low, y_high, 6)
    labels = [text.number(tick) for tick in ticks]
    left, right, bottom = 16 + _CHARACTER * max(map(len, labels)), width - 18, height - 42

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = left + (point[0] - x_low) / (x_high - x_low) * (right - left)
        return x, bottom - (point[1] - y_low) / (y_high - y_low) * (bottom - 12)

    parts = ['<g class="axis">']
    for tick, label in zip(ticks, labels, strict=True):
        y = place((x_low, tick))[1]
        parts.append(f'<line x1="{left:.1f}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    for tick in nice_ticks(x_low, x_high, 8):
        x = place((tick, y_low))[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(show_x(tick))}</text>')
    middle = (left + right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{bottom + 37}" text-anchor="middle">{escape(x_name)}</text></g>')
    for curve in curves:
        parts.append(_line(curve, place, show_x))
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _line(curve: Curve, place: Callable[[tuple[float, float]], tuple[float, float]], show_x: Callable[..., str]) -> str:
    path, dots, pen = "", [], "M"
    for x, y in curve.points:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        u, v = place((x, y))
        path, pen = path + f"{pen}{u:.1f} {v:.1f}", "L"
        if curve.dots:
            hint = f"{escape(curve.name)}: {text.measured(float(y))} at {escape(show_x(x))}"
            dots.append(
                f'<circle class="{curve.style}" cx="{u:.1f}" cy="{v:.1f}" r="3.2"><title>{hint}</title></circle>'
            )
    name = escape(curve.name)
    return f'<g><title>{name}</title><path class="{curve.style} line" d="{path}"/>{"".join(dots)}</g>'
