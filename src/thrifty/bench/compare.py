"""`thrifty compare`: finished (or running) runs side by side, as a table and as curves over one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thrifty.bench.charts import COLOURS, Curve
from thrifty.bench.html import curves_entry, render
from thrifty.config import yaml_text
from thrifty.errors import InputError
from thrifty.report import text
from thrifty.report.metrics import METRICS_FILE, Row, read_metrics, rows_of
from thrifty.report.series import Series, series, smooth
from thrifty.report.summary import SUMMARY_FILE, read_summary

_SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("eval_loss", "validation loss", text.measured),
    ("perplexity", "perplexity", text.measured),
    ("bits_per_byte", "bits per byte", text.measured),
    ("eval_accuracy", "accuracy", lambda value: f"{100 * value:.1f} %"),
    ("tokens_per_second", "tokens/s", text.count),
    ("peak_memory_bytes", "peak memory", text.size),
    ("wall_seconds", "wall time", text.duration),
    ("steps", "steps", lambda value: f"{value:,}"),
    ("tokens", "tokens", text.count),
    ("parameters", "parameters", text.count),
    ("trainable_parameters", "trained parameters", text.count),
)
_OWN_TO_EACH_RUN = ("output_dir", "overwrite", "resume")


def load(folders: Sequence[str]) -> list[dict[str, Any]]:
    """Reads runs: name, summary (empty while a run lasts), metrics and settings.

    Raises:
        InputError: There are fewer than two, or a folder holds no run.
    """
    if len(folders) < 2:
        raise InputError("comparing needs at least two runs", key="RUNS", fix="name the folders of two or more runs")
    runs = []
    for folder in folders:
        path = Path(folder).expanduser()
        if not (path / METRICS_FILE).is_file():
            what = "there is no such folder" if not path.is_dir() else f"holds no run (no {METRICS_FILE})"
            raise InputError(what, key="RUNS", value=str(folder), fix="the folder that `thrifty train` wrote")
        runs.append(
            {
                "name": path.resolve().name,
                "folder": str(folder),
                "summary": read_summary(path) if (path / SUMMARY_FILE).is_file() else {},
                "metrics": read_metrics(path),
                "settings": yaml_text.read_mapping(path / "run.yaml") if (path / "run.yaml").is_file() else {},
            }
        )
    names = [run["name"] for run in runs]
    for run in runs:
        if names.count(run["name"]) > 1:
            run["name"] = run["folder"]
    return runs


def table(runs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: results, cost, and every setting in which the runs differ."""
    rows = []
    for key, label, show in _SHOWN:
        values = [run["summary"].get(key) for run in runs]
        if any(isinstance(value, int | float) for value in values):
            rows.append([label, *(show(v) if isinstance(v, int | float) else "–" for v in values)])
    keys = dict.fromkeys(key for run in runs for key in run["settings"])
    for key in keys:
        values = [run["settings"].get(key) for run in runs]
        if key not in _OWN_TO_EACH_RUN and any(value != values[0] for value in values):
            rows.append([key, *("–" if value is None else _setting(value) for value in values)])
    return ["", *(run["name"] for run in runs)], rows


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_setting(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_setting(item)}" for key, item in value.items()) or "none"
    return text.number(value) if isinstance(value, int | float) else str(value)


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The page: the curves over steps and over seconds, throughput, and the table."""
    head, rows = table(runs)
    names = [(run["name"], f"c{index % COLOURS}") for index, run in enumerate(runs)]
    at_seconds = [_against(run["metrics"], "wall_seconds") for run in runs]
    charts = [
        curves_entry(
            "Validation loss against seconds", "of training, evaluation and saving included",
            [
                Curve(run["name"], [(at(s), v) for s, v in _points(_series(run, "eval", "eval_loss"))], style)
                for run, at, (_, style) in zip(runs, at_seconds, names, strict=True)
            ],
            names, x_name="seconds",
        ),
        curves_entry(
            "Validation loss against steps", "",
            [
                Curve(run["name"], _points(_series(run, "eval", "eval_loss")), style)
                for run, (_, style) in zip(runs, names, strict=True)
            ],
            names, x_name="step",
        ),
        curves_entry(
            "Training loss against steps", "smoothed",
            [
                Curve(run["name"], _points(smooth(_series(run, "train", "loss"))), style, dots=False)
                for run, (_, style) in zip(runs, names, strict=True)
            ],
            names, x_name="step",
        ),
        curves_entry(
            "Tokens per second", "without padding",
            [
                Curve(run["name"], _points(_series(run, "train", "tokens_per_second")), style, dots=False)
                for run, (_, style) in zip(runs, names, strict=True)
            ],
            names, x_name="step", height=240,
        ),
    ]  # fmt: skip
    return render(
        title=" · ".join(run["name"] for run in runs),
        kind="compare",
        subtitle=f"{len(runs)} runs side by side",
        curves=charts,
        tables=[{"title": "Side by side", "note": "and the settings that differ", "head": head, "rows": rows}],
    )


def plain(head: Sequence[str], rows: Sequence[Sequence[str]], most: int = 40) -> str:
    """The table for a terminal."""
    cut = [[cell if len(cell) <= most else cell[: most - 1] + "…" for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cut) for i in range(len(head))]
    lines = []
    for row in cut:
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return "\n".join(lines)


def _series(run: Mapping[str, Any], kind: str, key: str) -> Series:
    return series(run["metrics"], kind, key)


def _points(data: Series) -> list[tuple[float, float]]:
    return [(float(step), float(value)) for step, value in zip(data.steps, data.values, strict=True)]


def _against(rows: list[Row], key: str) -> Callable[[float], float]:
    """Turns a step into the value that the training rows have there, by straight lines between them."""
    import numpy as np

    found = [(0.0, 0.0)] + [(float(r["step"]), float(r[key])) for r in rows_of(rows, "train") if r.get(key) is not None]
    steps, values = zip(*found, strict=True)
    return lambda step: float(np.interp(step, steps, values))
