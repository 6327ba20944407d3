"""Line charts as inline SVG: sharp at any zoom, coloured by the page's style sheet, readable without scripts.

The page's script adds the value under the pointer from the `data-hover` attribute; without it the chart still stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from thrifty.report import text
from thrifty.report.series import Series, nice_ticks, thin

_TOP, _BOTTOM, _RIGHT = 14, 40, 20
_CHARACTER = 6.3  # width of a digit in the axis font, in SVG units


@dataclass(frozen=True)
class Line:
    """One series of a chart.

    Attributes:
        name: For the legend and the hover box.
        data: The values in the chart's unit.
        style: CSS class that colours it (`train`, `validation`, `rate`, `speed`, `memory`).
        shape: `line`, `faint` (a light line behind a trend), or `points` (a line with dots).
        hover: Whether the hover box shows its values.
    """

    name: str
    data: Series
    style: str
    shape: str = "line"
    hover: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart over training steps.

    Attributes:
        title: What is drawn, for people and screen readers.
        lines: The series; those without points are left out.
        unit: Unit of the vertical axis, shown over it.
        show: Turns a value into the text of the hover box.
        tick: Turns a value into the text of an axis label.
        from_zero: Whether the vertical axis starts at zero.
        marks: Steps at which the run was resumed, drawn as dashed lines.
        notes: Text of the hover box for a step (tokens and time), by step.
        width, height: Size in CSS pixels at full width.
    """

    title: str
    lines: Sequence[Line]
    unit: str = ""
    show: Callable[[float], str] = text.measured
    tick: Callable[[float], str] = text.number
    from_zero: bool = True
    marks: Sequence[int] = ()
    notes: dict[int, str] = field(default_factory=dict)
    width: int = 330
    height: int = 196

    def svg(self) -> str:
        """Returns the `<svg>` element, or an empty string where no series has a finite value."""
        lines = [line for line in self.lines if len(line.data.finite)]
        if not lines:
            return ""
        frame = _Frame(self, lines)
        parts = [*frame.grid(), *frame.resume_marks(), '<g class="lines">']
        for line in lines:
            parts += frame.draw(line)
        hover = escape(json.dumps(frame.hover(), separators=(",", ":")), quote=True)
        parts += ["</g>", f'<g class="hover" data-top="{_TOP}" data-bottom="{frame.bottom:.0f}"></g>']
        return (
            f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" tabindex="0" '
            f'aria-label="{escape(self.title)} over training steps" data-hover="{hover}">{"".join(parts)}</svg>'
        )


class _Frame:
    """Maps steps and values of one chart to SVG coordinates."""

    def __init__(self, chart: Chart, lines: Sequence[Line]) -> None:
        self.chart, self.lines = chart, [Line(x.name, thin(x.data), x.style, x.shape, x.hover) for x in lines]
        steps = np.concatenate([line.data.steps for line in self.lines])
        values = np.concatenate([line.data.finite.values for line in self.lines])
        self.x_low, self.x_high = float(steps.min()), float(steps.max())
        if self.x_high == self.x_low:
            self.x_low, self.x_high = self.x_low - 1, self.x_high + 1
        elif self.x_low < 0.1 * self.x_high:
            self.x_low = 0.0
        low, high = float(values.min()), float(values.max())
        if chart.from_zero and low >= 0:
            low = 0.0
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        self.y_low, self.y_high = (low if chart.from_zero and low == 0 else low - room), high + room
        self.y_ticks = nice_ticks(self.y_low, self.y_high, 7 if chart.height > 250 else 4)
        self.labels = [chart.tick(value) for value in self.y_ticks]
        self.left = 14 + _CHARACTER * max(map(len, self.labels))
        self.right, self.bottom = chart.width - _RIGHT, chart.height - _BOTTOM

    def x(self, step: float) -> float:
        return self.left + (step - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - _TOP)

    def grid(self) -> list[str]:
        parts = ['<g class="axis">']
        for value, label in zip(self.y_ticks, self.labels, strict=True):
            y = self.y(value)
            parts.append(f'<line x1="{self.left:.1f}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{self.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        ticks = [t for t in nice_ticks(self.x_low, self.x_high, max(3, self.chart.width // 130)) if t == int(t)]
        for value in ticks:
            label = f"{value:,.0f}" if self.x_high < 100_000 else text.count(value)
            x = self.x(value)
            x = min(x, self.chart.width - _CHARACTER * len(label) / 2)  # not cut at the right edge
            parts.append(f'<text x="{x:.1f}" y="{self.bottom + 18:.1f}" text-anchor="middle">{label}</text>')
        middle = (self.left + self.right) / 2
        parts.append(f'<text class="name" x="{middle:.0f}" y="{self.bottom + 36:.0f}" text-anchor="middle">step</text>')
        parts.append("</g>")
        return parts

    def resume_marks(self) -> list[str]:
        parts = []
        for step in self.chart.marks:
            if self.x_low <= step <= self.x_high:
                x = self.x(step)
                parts.append(
                    f'<line class="resume" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{self.bottom}">'
                    f"<title>resumed at step {step:,}</title></line>"
                )
        return parts

    def draw(self, line: Line) -> list[str]:
        stretches: list[list[tuple[float, float]]] = [[]]
        for step, value in zip(line.data.steps, line.data.values, strict=True):
            if np.isfinite(value):
                stretches[-1].append((self.x(step), self.y(value)))
            elif stretches[-1]:
                stretches.append([])
        path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) for points in stretches if points)
        # A point between two gaps has no line to be seen by.
        dots = [p for points in stretches if len(points) == 1 or line.shape == "points" for p in points]
        radius = 3.4 if len(dots) <= 60 else 2
        return [
            f'<path class="{line.style} {line.shape}" d="{path}"/>',
            *(f'<circle class="{line.style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in dots),
        ]

    def hover(self) -> dict[str, object]:
        """Positions and texts for each step that any series shows."""
        shown = [line for line in self.lines if line.hover]
        steps = sorted({int(step) for line in shown for step in line.data.finite.steps})
        columns = []
        for line in shown:
            values = dict(zip(line.data.steps.astype(int).tolist(), line.data.values.tolist(), strict=True))
            found = [values.get(step, float("nan")) for step in steps]
            columns.append(
                {
                    "name": line.name,
                    "style": line.style,
                    "y": [round(self.y(v), 1) if v == v else None for v in found],
                    "text": [self.chart.show(v) if v == v else None for v in found],
                }
            )
        return {
            "x": [round(self.x(step), 1) for step in steps],
            "title": [f"step {step:,}" for step in steps],
            "note": [self.chart.notes.get(step, "") for step in steps],
            "lines": columns,
        }
