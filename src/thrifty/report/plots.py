"""`loss.png`: the loss of a run as a picture for a paper, a slide or a chat."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from thrifty.report.describe import loss_unit
from thrifty.report.files import write_atomic
from thrifty.report.metrics import Row, read_metrics
from thrifty.report.series import not_finite, resumed_steps, series, smooth
from thrifty.report.summary import SUMMARY_FILE, read_summary

LOSS_FILE = "loss.png"

_TRAIN, _VALIDATION, _RATE, _TEXT, _GRID = "#2f6fdb", "#d9480f", "#7048c6", "#33373d", "#e4e6ea"


def write_loss_plot(run_dir: str | os.PathLike[str]) -> Path:
    """Draws `loss.png` from the metrics of a run: train and validation loss, the learning rate below.

    Args:
        run_dir: The run folder.

    Returns:
        The path of the picture.

    Raises:
        InputError: The folder has no metrics file, or it is damaged.
    """
    run_dir = Path(run_dir)
    task = read_summary(run_dir).get("task") if (run_dir / SUMMARY_FILE).exists() else None
    figure = loss_figure(read_metrics(run_dir), title=run_dir.resolve().name, unit=loss_unit(task))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return write_atomic(run_dir / LOSS_FILE, buffer.getvalue())


def loss_figure(rows: list[Row], title: str = "", unit: str = "") -> Any:
    """Returns a `matplotlib` figure of train loss (light, with its trend), validation loss and learning rate.

    The figure is bound to no window system and leaves the caller's `pyplot` state alone.

    Args:
        rows: What `read_metrics` returns; rows whose loss is not finite leave a gap and are counted in a note.
        title: Written above the plot, as it is.
        unit: Unit of the loss, for the label of its axis.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    rate = series(rows, "train", "learning_rate")
    if len(rate.finite):
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1))
        _style(lower)
        lower.plot(rate.steps, rate.values, color=_RATE, linewidth=1.5, **_marker(len(rate.finite)))
        lower.fill_between(rate.steps, rate.values, color=_RATE, alpha=0.08, linewidth=0)
        lower.set_ylabel("learning rate")
        lower.set_ylim(bottom=0)
        lower.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
        lower.yaxis.get_offset_text().set(color=_TEXT, fontsize=8)
        lower.set_xlabel("step")
    else:
        upper = figure.subplots()
        upper.set_xlabel("step")
    _style(upper)
    _draw_loss(upper, rows, unit)
    if title:
        # parse_math off: a `$` in a folder's name is a dollar.
        upper.set_title(title, loc="left", fontsize=12, color=_TEXT, fontweight="bold", pad=10, parse_math=False)
    figure.align_ylabels()
    return figure


def _draw_loss(axes: Any, rows: list[Row], unit: str) -> None:
    train, validation = series(rows, "train", "loss"), series(rows, "eval", "eval_loss").finite
    trend = smooth(train)
    if len(train.finite):
        noisy = len(trend.finite) >= 30
        if noisy:
            axes.plot(train.steps, train.values, color=_TRAIN, alpha=0.28, linewidth=0.9)
        shown = trend if noisy else train
        axes.plot(shown.steps, shown.values, color=_TRAIN, linewidth=2, label="train", **_marker(len(shown.finite)))
    if len(validation):
        size = 5 if len(validation) <= 60 else 2.5
        axes.plot(
            validation.steps,
            validation.values,
            color=_VALIDATION,
            linewidth=1.3,
            marker="o",
            markersize=size,
            markeredgecolor="white",
            markeredgewidth=0.8,
            label="validation",
        )
        axes.annotate(
            f"{validation.values[-1]:.3f}",
            (validation.steps[-1], validation.values[-1]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            fontweight="bold",
            color=_VALIDATION,
        )
    axes.set_ylabel(f"loss ({unit})" if unit else "loss")
    for index, step in enumerate(resumed_steps(rows)):
        axes.axvline(step, color="#9aa0a8", linewidth=0.9, linestyle=(0, (4, 3)), label=None if index else "resumed")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, labelcolor=_TEXT)
    else:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no loss was logged", transform=axes.transAxes, ha="center", color="#868e96")
    bad = not_finite(rows)
    if bad:
        note = f"{len(bad)} logged loss{'es' if len(bad) > 1 else ''} not finite (first at step {bad[0]:,})"
        axes.set_title(note, loc="right", fontsize=9, color="#c92a2a")


def _marker(points: int) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4} if points < 3 else {}


def _style(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bdc4")
    axes.tick_params(colors=_TEXT, labelsize=9, length=3, color="#b8bdc4")
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.label.set(color=_TEXT, fontsize=9.5)
    axes.xaxis.label.set(color=_TEXT, fontsize=9.5)
