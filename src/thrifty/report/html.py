"""`report.html`: one self-contained page about a run, to look at and to send to somebody.

No script, style, font or picture comes from elsewhere, and every text of the user is escaped.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from thrifty.report import text
from thrifty.report.charts import Chart, Line
from thrifty.report.describe import environment_entries, loading_code, loss_unit, recipe_parts
from thrifty.report.files import write_atomic
from thrifty.report.links import pieces
from thrifty.report.metrics import METRICS_FILE, Row, read_metrics, rows_of
from thrifty.report.series import Series, not_finite, resumed_steps, series, smooth
from thrifty.report.summary import read_summary

REPORT_FILE = "report.html"

_SETTLED = 0.15  # share of a run after which its loss falls slowly

_FILES = {
    "model.safetensors": "the trained weights",
    "model.safetensors.index.json": "index of the weight shards",
    "adapter_model.safetensors": "the trained adapter (peft)",
    "config.json": "the model's configuration",
    "generation_config.json": "defaults for generation",
    "tokenizer.json": "the tokenizer",
    "run.yaml": "every setting; <code>thrifty train run.yaml</code> repeats the run",
    "metrics.jsonl": "one row per logging step and evaluation",
    "summary.json": "the results, for programs",
    "loss.png": "the loss as a picture",
    "README.md": "the model card",
}


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes `report.html` from `summary.json`, `metrics.jsonl` and `run.yaml` of a run folder.

    Args:
        run_dir: The run folder. `run.yaml` and `metrics.jsonl` may be missing; their parts are then left out.

    Returns:
        The path of the report.

    Raises:
        InputError: `summary.json` is missing, or a file is damaged.
    """
    run_dir = Path(run_dir)
    return write_atomic(run_dir / REPORT_FILE, render_report(run_dir))


def render_report(run_dir: str | os.PathLike[str]) -> str:
    """Returns the page that `write_report` writes."""
    import jinja2

    run_dir = Path(run_dir)
    summary = read_summary(run_dir)
    rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else []
    config = run_dir / "run.yaml"
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("thrifty.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        name=run_dir.resolve().name,
        subtitle=_subtitle(summary),
        date=str(summary.get("date", ""))[:16].replace("T", " "),
        cards=_cards(summary),
        alerts=_alerts(rows),
        loss=_loss_charts(rows, summary.get("task")),
        charts=_small_charts(rows),
        parts=recipe_parts(summary),
        pieces=pieces,
        prompt=summary.get("prompt") or "",
        sample=summary.get("sample_text") or "",
        evaluations=_evaluations(rows),
        config=_yaml_lines(config.read_text(encoding="utf-8")) if config.exists() else [],
        environment=environment_entries(summary),
        folder=str(run_dir),
        files=_files(run_dir),
        loading=loading_code(summary, run_dir.resolve().name),
    )


def _subtitle(summary: dict[str, Any]) -> str:
    parts = [summary.get("model"), summary.get("task"), summary.get("data")]
    parameters, trainable = summary.get("parameters"), summary.get("trainable_parameters")
    if parameters:
        shown = f"{text.count(parameters)} parameters"
        if trainable is not None and trainable != parameters:
            shown += f" ({text.count(trainable)} trained)"
        parts.insert(1, shown)
    return " · ".join(str(part) for part in parts if part)


def _cards(summary: dict[str, Any]) -> list[dict[str, str]]:
    """The headline numbers: the result first, then what it cost."""
    cards: list[dict[str, str]] = []

    def add(key: str, label: str, show: Any, note: str = "", title: str = "") -> None:
        if isinstance(summary.get(key), int | float):
            cards.append({"label": label, "value": show(summary[key]), "note": note, "title": title})

    def digits(value: float) -> str:
        return text.measured(float(value))

    add("eval_loss", "validation loss", digits, title="mean over the validation data")
    add("perplexity", "perplexity", digits, title="exp(validation loss)")
    add("bits_per_byte", "bits per byte", digits, title="does not depend on the tokenizer")
    add("eval_accuracy", "accuracy", lambda value: f"{100 * value:.1f} %")
    tokens = f"{text.count(summary['tokens'])} in all" if summary.get("tokens") else ""
    add("tokens_per_second", "tokens/s", text.count, tokens, "per second, without padding")
    add("mfu", "MFU", lambda value: f"{value:.1%}", title="the model's operations over the device's peak rate")
    add("peak_memory_bytes", "peak memory", text.size)
    steps = f"{summary['steps']:,} steps" if isinstance(summary.get("steps"), int) else ""
    add("wall_seconds", "wall time", text.duration, steps)
    return cards


def _alerts(rows: list[Row]) -> list[tuple[str, str]]:
    alerts = []
    bad = not_finite(rows)
    if bad:
        what = "The logged loss was" if len(bad) == 1 else f"{len(bad)} logged losses were"
        alerts.append(("warning", f"{what} not finite (first at step {bad[0]:,}). The curve has gaps there."))
    resumed = resumed_steps(rows)
    if resumed:
        steps = ", ".join(f"{step:,}" for step in resumed[:8]) + (", …" if len(resumed) > 8 else "")
        alerts.append(("note", f"This run was resumed at step {steps}; dashed lines show where."))
    return alerts


def _loss_charts(rows: list[Row], task: object) -> list[dict[str, Any]]:
    """The loss over the whole run and, where the first steps dwarf the rest, once more without them."""
    train, validation = series(rows, "train", "loss"), series(rows, "eval", "eval_loss").finite
    trend = smooth(train)
    noisy = len(trend.finite) >= 30

    def chart(first_step: float) -> dict[str, Any]:
        lines = [
            Line("train", train.since(first_step), "train", "faint" if noisy else "line"),
            *([Line("train, smoothed", trend.since(first_step), "train", hover=False)] if noisy else []),
            Line("validation", validation.since(first_step), "validation", "points"),
        ]
        return _entry(rows, "Loss", lines, unit=loss_unit(task), from_zero=False, width=1060, height=360)

    charts = [chart(0)]
    if noisy:
        later = trend.since(_SETTLED * trend.steps[-1]).finite
        if len(later) and np.ptp(trend.finite.values) > 3 * np.ptp(later.values):
            charts.append(chart(_SETTLED * trend.steps[-1]))
    return [entry for entry in charts if entry["svg"]]


def _small_charts(rows: list[Row]) -> list[dict[str, Any]]:
    memory = series(rows, "train", "memory_bytes")
    unit, scale = ("GiB", 2**30) if len(memory.finite) and memory.finite.values.max() >= 2**30 else ("MiB", 2**20)
    rate = Line("learning rate", series(rows, "train", "learning_rate"), "rate")
    speed = Line("tokens/s", series(rows, "train", "tokens_per_second"), "speed")
    used = Line("in use", Series(memory.steps, memory.values / scale), "memory")
    entries = [
        _entry(rows, "Learning rate", [rate], show=text.scientific, tick=text.scientific),
        _entry(rows, "Throughput", [speed], unit="tokens/s", show=text.count, tick=text.count),
        _entry(rows, "Memory", [used], unit=unit, show=lambda value: f"{value:,.1f} {unit}"),
    ]
    return [entry for entry in entries if entry["svg"]]


def _entry(rows: list[Row], title: str, lines: list[Line], **options: Any) -> dict[str, Any]:
    import markupsafe

    chart = Chart(title=title, lines=lines, marks=resumed_steps(rows), notes=_notes(rows), **options)
    legend = [line for line in lines if len(line.data.finite)] if len(lines) > 1 else []
    # The SVG escapes its own texts.
    return {"title": title, "unit": chart.unit, "svg": markupsafe.Markup(chart.svg()), "legend": legend}


def _notes(rows: list[Row]) -> dict[int, str]:
    notes = {}
    for row in rows_of(rows, "train"):
        parts = []
        if isinstance(row.get("tokens"), int | float):
            parts.append(f"{text.count(row['tokens'])} tokens")
        if isinstance(row.get("wall_seconds"), int | float):
            parts.append(text.duration(row["wall_seconds"]))
        notes[row["step"]] = " · ".join(parts)
    return notes


def _evaluations(rows: list[Row]) -> dict[str, Any]:
    evals = rows_of(rows, "eval")
    hidden = ("runtime", "_per_second", "model_preparation_time")
    keys = list(dict.fromkeys(k for row in evals for k in row if k.startswith("eval_") and not k.endswith(hidden)))
    return {
        "header": ["step", *(key.removeprefix("eval_").replace("_", " ") for key in keys)],
        "rows": [[f"{row['step']:,}", *(text.measured(row.get(key)) for key in keys)] for row in evals],
    }


def _yaml_lines(content: str) -> list[tuple[str, str]]:
    """Splits each line into its key with the colon (may be empty) and the rest, to colour the keys."""
    lines = []
    for line in content.rstrip("\n").split("\n"):
        match = re.match(r"\s*(?:- )?[\w.\-]+:(?=\s|$)", line)
        end = match.end() if match else 0
        lines.append((line[:end], line[end:]))
    return lines


def _files(run_dir: Path) -> list[dict[str, str]]:
    import markupsafe

    files = []
    for name, role in _FILES.items():
        path = run_dir / name
        if path.is_file():
            files.append({"name": name, "role": markupsafe.Markup(role), "size": text.size(path.stat().st_size)})
    for path in sorted(run_dir.glob("checkpoint-*"), key=lambda p: (len(p.name), p.name)):
        if path.is_dir():
            size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
            files.append({"name": f"{path.name}/", "role": "a point to resume from", "size": text.size(size)})
    return files
