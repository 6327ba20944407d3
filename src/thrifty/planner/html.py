"""The plan as one self-contained HTML page: memory over a step by category, and memory against time."""

from __future__ import annotations

from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.planner.trace import CATEGORIES

if TYPE_CHECKING:
    from thrifty.planner.memory import Timeline
    from thrifty.planner.plan import Configuration, Estimate, Plan

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#9c6b4e")
_POINTS = 700


def write_html(plan: Plan, path: str | Path) -> None:
    """Writes the page of a plan."""
    Path(path).write_text(page(plan), encoding="utf-8")


def page(plan: Plan) -> str:
    """The page of a plan as text. It refers to nothing outside itself."""
    from jinja2 import Environment

    source = resources.files("thrifty.planner").joinpath("template.html").read_text(encoding="utf-8")
    timeline = ""
    if plan.chosen is not None and plan.compiled is not None:
        accumulation, optimizer = plan.chosen.accumulation, plan.compiled.optimizer
        found = plan.compiled.step.timeline(
            plan.chosen.micro_batch, plan.workload.seq_len, accumulation=accumulation, optimizer=optimizer
        )
        timeline = timeline_svg(found, plan.device.memory_bytes)
    return (
        Environment(autoescape=True)
        .from_string(source)
        .render(
            plan=plan,
            chosen=plan.chosen,
            timeline=timeline,
            pareto=pareto_svg(plan.pareto, plan.device.memory_bytes, plan.chosen),
            rows=[_row(c) for c in plan.pareto],
            legend=list(zip(CATEGORIES, COLOURS, strict=True)),
            gib=lambda n: f"{n / 2**30:.2f} GiB",
        )
    )


def plan_fragment(plan: Plan) -> str:
    """What a notebook shows."""
    items = "".join(f"<li>{escape(line)}</li>" for line in plan.explanation)
    table = estimate_fragment(plan.chosen) if plan.chosen is not None else ""
    return f"<div>{table}<ul>{items}</ul>{pareto_svg(plan.pareto, plan.device.memory_bytes, plan.chosen)}</div>"


def estimate_fragment(estimate: Estimate) -> str:
    """What a notebook shows for one configuration."""
    rows = {
        "model": estimate.model,
        "device": f"{estimate.devices} x {estimate.device}",
        "micro-batch x accumulation": f"{estimate.micro_batch} x {estimate.accumulation}",
        "methods": ", ".join(str(m) for m in estimate.methods) or "none",
        "allocated": _gib(estimate.peak_allocated_bytes),
        "reserved": _gib(estimate.peak_reserved_bytes),
        "device total": f"{_gib(estimate.device_total_bytes)} of {_gib(estimate.memory_limit_bytes)}",
        "fits": "yes" if estimate.fits else "no",
        "peak at": estimate.peak_phase,
        "step": f"{estimate.step_seconds:.3g} s, {estimate.tokens_per_second:,.0f} tokens/s",
    }
    rows |= {f"  {name}": _gib(value) for name, value in estimate.breakdown.items()}
    body = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in rows.items())
    return f"<table>{body}</table>"


def timeline_svg(timeline: Timeline, limit: int, width: int = 960, height: int = 340) -> str:
    """Stacked areas of memory by category over the events of one step, with the limit as a line."""
    events = timeline.bytes.shape[1]
    cuts = np.linspace(0, events, min(events, _POINTS) + 1).astype(int)
    # Of each stretch the moment with the highest total, so that no peak is lost in drawing.
    totals = timeline.bytes.sum(0)
    picked = np.array([a + int(totals[a:b].argmax()) for a, b in pairwise(cuts) if b > a])
    layers = np.cumsum(np.concatenate([np.zeros((1, len(picked))), timeline.bytes[:, picked]]), axis=0)
    top = max(float(layers[-1].max()), 1.0) * 1.05
    shows_limit = limit <= 2 * top
    top = max(top, limit * 1.05) if shows_limit else top
    plot = _Axes(width, height, (0, len(picked) - 1 or 1), (0, top / 2**30), "events of one step", "GiB")
    x = [plot.x(i) for i in range(len(picked))]
    parts = []
    for index, name in enumerate(timeline.categories):
        lower, upper = layers[index] / 2**30, layers[index + 1] / 2**30
        points = [f"{a:.1f},{plot.y(v):.1f}" for a, v in zip(x, upper, strict=True)]
        points += [f"{a:.1f},{plot.y(v):.1f}" for a, v in zip(reversed(x), lower[::-1], strict=True)]
        parts.append(
            f'<polygon points="{" ".join(points)}" fill="{COLOURS[index]}"><title>{escape(name)}</title></polygon>'
        )
    parts += _phase_marks(timeline, picked, plot)
    if shows_limit:
        parts.append(plot.line(limit / 2**30, "limit"))
    return plot.svg(parts)


def _phase_marks(timeline: Timeline, picked: np.ndarray, plot: _Axes) -> list[str]:
    """A thin line and a name where forward, backward and update begin."""
    marks, last = [], ""
    for at, event in enumerate(picked.tolist()):
        direction = timeline.phases[event].split(":")[0]
        direction = "backward" if direction == "recompute" else direction
        if direction != last and direction != "start":
            where = plot.x(at)
            marks.append(f'<line x1="{where:.1f}" x2="{where:.1f}" y1="{plot.top}" y2="{plot.bottom}" class="mark"/>')
            marks.append(f'<text x="{where + 4:.1f}" y="{plot.top + 12}">{escape(direction)}</text>')
        last = direction
    return marks


def pareto_svg(
    front: list[Configuration], limit: int, chosen: Estimate | None, width: int = 960, height: int = 320
) -> str:
    """Memory against time of the configurations that no other beats, with the limit as a line."""
    if not front:
        return ""
    memory = [c.device_total_bytes / 2**30 for c in front]
    seconds = [c.step_seconds for c in front]
    across = (0, min(max(memory), 3 * limit / 2**30) * 1.08)
    plot = _Axes(
        width, height, across, (min(seconds) * 0.9, max(seconds) * 1.08), "GiB on the device", "seconds a step"
    )
    parts = []
    where = plot.x(limit / 2**30)
    if limit / 2**30 <= across[1]:
        parts.append(f'<line x1="{where:.1f}" x2="{where:.1f}" y1="{plot.top}" y2="{plot.bottom}" class="limit"/>')
        parts.append(f'<text x="{where + 4:.1f}" y="{plot.top + 12}">limit</text>')
    shown = [(m, s, c) for m, s, c in zip(memory, seconds, front, strict=True) if m <= across[1]]
    line = " ".join(f"{plot.x(m):.1f},{plot.y(s):.1f}" for m, s, _ in shown)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#bbb"/>')
    for m, s, c in shown:
        same = chosen is not None and (c.micro_batch, c.methods, c.sharding) == (
            chosen.micro_batch,
            chosen.methods,
            chosen.sharding,
        )
        fill, radius = (COLOURS[2], 7) if same else (COLOURS[0], 4)
        title = escape(
            f"{c.micro_batch} x {c.accumulation}, {', '.join(map(str, c.methods)) or 'no methods'}: "
            f"{m:.1f} GiB, {s:.3g} s"
        )
        parts.append(
            f'<circle cx="{plot.x(m):.1f}" cy="{plot.y(s):.1f}" r="{radius}" fill="{fill}">'
            f"<title>{title}</title></circle>"
        )
    return plot.svg(parts)


class _Axes:
    """Scales, ticks and frame of a chart."""

    def __init__(
        self, width: int, height: int, x: tuple[float, float], y: tuple[float, float], x_label: str, y_label: str
    ) -> None:
        self.width, self.height, self.x_range, self.y_range = width, height, x, y
        self.x_label, self.y_label = x_label, y_label
        self.left, self.right, self.top, self.bottom = 64, width - 12, 10, height - 40

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low or 1) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low or 1) * (self.bottom - self.top)

    def line(self, value: float, label: str) -> str:
        height = self.y(value)
        return (
            f'<line x1="{self.left}" x2="{self.right}" y1="{height:.1f}" y2="{height:.1f}" class="limit"/>'
            f'<text x="{self.right - 40}" y="{height - 4:.1f}">{escape(label)}</text>'
        )

    def svg(self, parts: list[str]) -> str:
        ticks = []
        for value in np.linspace(*self.y_range, 5).tolist():
            ticks.append(f'<text x="{self.left - 6}" y="{self.y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
            ticks.append(
                f'<line x1="{self.left}" x2="{self.right}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}" '
                'class="grid"/>'
            )
        if self.x_label.startswith("GiB"):
            ticks += [
                f'<text x="{self.x(v):.1f}" y="{self.bottom + 16}" text-anchor="middle">{v:.3g}</text>'
                for v in np.linspace(*self.x_range, 6).tolist()
            ]
        middle = (self.left + self.right) / 2
        labels = [
            f'<text x="{middle}" y="{self.height - 6}" text-anchor="middle">{escape(self.x_label)}</text>',
            f'<text transform="translate(14 {(self.top + self.bottom) / 2}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>",
        ]
        content = "".join([*ticks, *parts, *labels])
        box = f'viewBox="0 0 {self.width} {self.height}"'
        return f'<svg {box} xmlns="http://www.w3.org/2000/svg" role="img">{_STYLE}{content}</svg>'


_STYLE = (
    "<style>svg text{font:12px system-ui,sans-serif;fill:#444}.grid{stroke:#e8e8e8}"
    ".limit{stroke:#c00;stroke-dasharray:5 4}"
    ".mark{stroke:#666;stroke-dasharray:2 3}</style>"
)


def _row(configuration: Configuration) -> dict[str, Any]:
    data = configuration.to_dict()
    return data | {"methods": ", ".join(str(m) for m in configuration.methods) or "none"}


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
