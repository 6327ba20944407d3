"""The tables of a bench as text: the same cells for the terminal, Markdown and HTML, made from a result alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from thrifty.report import text

Result = Mapping[str, Any]
DASH = "–"
MEANINGS = {
    "additive": "each row adds one technique to the row above it",
    "ablation": "each technique alone, against the baseline",
}


def header(result: Result, table: str) -> list[str]:
    """Column titles."""
    planned = ["predicted peak"] if _planned(result) else []
    before = ["against the row before"] if table == "additive" else []
    return [
        "row", "peak memory", *planned, *before, "tokens/s", "against the baseline", "step",
        "loss at equal tokens", "loss at equal seconds", "time to the baseline's loss",
    ]  # fmt: skip


def body(result: Result, table: str) -> list[list[str]]:
    """Cells, row by row. A row that cannot run has its name and the reason only."""
    rows = []
    for row in result["rows"]:
        if row["table"] != table:
            continue
        if row["reason"] is not None or row["arm"] is None:
            rows.append([row["label"], f"cannot run here: {row['reason']}"])
            continue
        arm = result["arms"][row["arm"]]
        planned = [predicted(arm)] if _planned(result) else []
        before = [_before(row)] if table == "additive" else []
        rows.append(
            [
                label(row, arm), memory(arm), *planned, *before, number(arm.get("tokens_per_second"), text.count),
                speed(arm), number(arm.get("step_seconds"), milliseconds), loss(arm, "tokens"), loss(arm, "seconds"),
                time_to_loss(arm),
            ]
        )  # fmt: skip
    return rows


def memory(arm: Mapping[str, Any]) -> str:
    """Peak memory, with its change against the baseline."""
    if arm.get("peak_bytes") is None:
        return DASH
    change = arm.get("peak_change")
    return text.size(arm["peak_bytes"]) + (f" ({percent(change)})" if change else "")


def label(row: Mapping[str, Any], arm: Mapping[str, Any]) -> str:
    """What the line adds; a technique that only does as if on this machine is marked."""
    new = row["label"].removeprefix("+ ").partition(" (")[0]
    return row["label"] + (" (emulated)" if new in (arm.get("emulated") or {}) else "")


def _planned(result: Result) -> bool:
    """Whether the planner's peaks stand beside the measured ones; older files lack them."""
    return any(arm.get("predicted_bytes") for arm in result["arms"].values())


def predicted(arm: Mapping[str, Any]) -> str:
    """What the planner said, with how far the measured peak is from it."""
    if arm.get("predicted_bytes") is None:
        return DASH
    return f"{text.size(arm['predicted_bytes'])} ({percent(arm['prediction_error'])})"


def speed(arm: Mapping[str, Any]) -> str:
    """Ratio of the rates with its interval, and the verdict."""
    if arm.get("speed") is None:
        return DASH
    return f"{ratio(arm['speed'])} {arm['verdict']}"


def loss(arm: Mapping[str, Any], budget: str) -> str:
    """Median of the seeds, with the difference to the baseline."""
    found = arm.get(f"loss_at_equal_{budget}")
    if found is None:
        return DASH
    shown = f"{found['median']:.3f}"
    if found.get("difference") is None:
        return shown
    change = found["difference"]
    return f"{shown} ({signed(change['median'])}, {span(change, signed)}){_word(change)}"


def time_to_loss(arm: Mapping[str, Any]) -> str:
    """Share of the baseline's time, or that the loss was not reached."""
    found = arm.get("time_to_baseline_loss")
    if found is None:
        return DASH
    missed = found["not_reached"]
    if found["seconds"] is None:
        return "not reached"
    shown = text.duration(found["seconds"])
    if found["ratio"] is not None and not math.isclose(found["ratio"]["median"], 1.0, abs_tol=1e-9):
        shown += f" (×{found['ratio']['median']:.2f})"
    return shown + (f", not reached by {missed} of {missed + found['ratio']['count']}" if missed else "")


def _before(row: Mapping[str, Any]) -> str:
    found = row.get("against_previous")
    if found is None:
        return DASH
    parts = [f"memory {percent(found['peak'])}"] if found["peak"] is not None else []
    if found["speed"] is not None:
        parts.append(f"tokens/s {percent(found['speed']['median'] - 1)}")
    return ", ".join(parts) or DASH


def _word(change: Mapping[str, Any]) -> str:
    if change["low"] <= 0 <= change["high"]:
        return " no difference"
    return " better" if change["high"] < 0 else " worse"


def number(value: Any, show: Any) -> str:
    """A value, or a dash."""
    return DASH if value is None else show(float(value))


def milliseconds(seconds: float) -> str:
    """A step's time."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def percent(change: float) -> str:
    """A change with its sign."""
    return f"{100 * change:+.1f} %".replace("-", "−")


def signed(value: float) -> str:
    """A difference of losses."""
    return f"{value:+.3f}".replace("-", "−")


def ratio(found: Mapping[str, Any]) -> str:
    """A ratio with its interval."""
    return f"×{found['median']:.2f} ({span(found, lambda v: f'{v:.2f}' if v < 100 else 'over 100')})"


def span(found: Mapping[str, Any], show: Any) -> str:
    """The interval, or that a single value has none."""
    if not (math.isfinite(float(found["low"])) and math.isfinite(float(found["high"]))):
        return "one value"
    return f"{show(found['low'])} to {show(found['high'])}"


def notes(result: Result) -> list[str]:
    """What has to be said beside the tables: noise, start-up, what was left out, what was measured otherwise."""
    lines = []
    settings, noise = result["settings"], result["noise"]
    if noise is not None:
        lines.append(
            f"Noise of this machine, from {noise['count']} pairs of runs of the baseline: {ratio(noise)} "
            f"at {settings['speed_confidence']:.0%}."
        )
    lines.append(
        f"Faster or slower: only where the {settings['speed_confidence']:.0%} interval of the paired ratios excludes "
        f"1. Losses: {settings['loss_confidence']:.0%} intervals of the paired differences. Tokens are those trained "
        "on, padding not counted."
    )
    if result["plan"] is not None:
        lines.append(f"Measured: {result['plan']['text']}.")
    if not result["complete"]:
        lines.append("Interrupted: the same command goes on where it was.")
    starts = [
        f"{name} {text.duration(arm['warm_up_extra_seconds'])}"
        for name, arm in result["arms"].items()
        if arm.get("warm_up_extra_seconds", 0.0) >= 0.5
    ]
    if starts:
        lines.append(
            f"Not counted, in the first {settings['warm_up_steps']} steps (compilation, allocation): "
            + "; ".join(starts)
        )
    prepared = [
        f"{name} {text.duration(arm['prepare_seconds'])}"
        for name, arm in result["arms"].items()
        if arm.get("prepare_seconds", 0.0) >= 1.0
    ]
    if prepared:
        lines.append("Counted in the times to a loss, preparation before the first step: " + "; ".join(prepared))
    partial = [name for name, arm in result["arms"].items() if arm.get("whole_schedule") is False]
    if partial:
        lines.append(f"Speed of the first steps of a long run only: {', '.join(partial)}.")
    arms = result["arms"].values()
    emulated = {name: why for arm in arms for name, why in (arm.get("emulated") or {}).items()}
    lines += [f"Emulated on this machine: {name}: {why}." for name, why in emulated.items()]
    if _planned(result):
        lines.append("Predicted peak: the planner's, in brackets how far the measured one is from it.")
    unknown = {name: why for name, arm in result["arms"].items() if (why := arm.get("not_predicted"))}
    lines += [f"Not predicted: {name}: {why}." for name, why in unknown.items()]
    if result["left_out"]:
        lines.append(f"Not measured: {', '.join(result['left_out'])}; `--methods` chooses.")
    return lines


def machine_line(result: Result) -> str:
    """Hardware, versions and date in one line."""
    machine, versions = result["machine"], result["versions"]
    device = ", ".join(entry["name"] for entry in machine["accelerators"]) or machine["processor"]
    names = ("thrifty", "torch", "transformers")
    shown = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    count = machine["threads"]
    threads = f", {count} thread{'s' if count != 1 else ''}" if not machine["accelerators"] else ""
    return f"{device}{threads}; {shown}; {result['date'][:10]}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a row that is too short has its last cell spread by empty ones."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in [*row, *[""] * (len(head) - len(row))]]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def markdown(result: Result) -> str:
    """Both tables with their notes."""
    lines = [f"**{result['label'].capitalize()}** on {machine_line(result)}.", ""]
    for table, meaning in MEANINGS.items():
        rows = body(result, table)
        if rows:
            lines += [f"{table.capitalize()} table: {meaning}.", "", *markdown_table(header(result, table), rows), ""]
    return "\n".join([*lines, *(f"- {line}" for line in notes(result))]) + "\n"


def plain(result: Result) -> str:
    """The tables for a terminal: one block a row would be too long, so the columns that matter most."""
    lines = []
    for table, meaning in MEANINGS.items():
        rows = [row for row in result["rows"] if row["table"] == table]
        if not rows:
            continue
        lines.append(f"{table} table: {meaning}")
        shown = [_short(result, row) for row in rows]
        head = ["", "peak", "tokens/s", "speed", "equal tokens", "equal seconds", "to loss"]
        full = [cells for cells in shown if len(cells) == len(head)]
        widths = [max(len(cells[i]) for cells in [head, *full]) for i in range(len(head))]
        name_width = max(widths[0], *(len(cells[0]) for cells in shown))
        for cells in [head, *shown]:
            rest = [cells[1]] if len(cells) == 2 else [f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True)]
            lines.append("  " + "  ".join([f"{cells[0]:<{name_width}}", *rest]).rstrip())
        lines.append("")
    return "\n".join([*lines, *notes(result), f"{result['label']}: {machine_line(result)}"])


def _short(result: Result, row: Mapping[str, Any]) -> list[str]:
    if row["reason"] is not None or row["arm"] is None:
        return [row["label"], f"cannot run here: {row['reason']}"]
    arm = result["arms"][row["arm"]]

    def losses(budget: str) -> str:
        found = arm.get(f"loss_at_equal_{budget}")
        if found is None:
            return DASH
        change = found.get("difference")
        return f"{found['median']:.3f}" + (f" ({signed(change['median'])}{_mark(change)})" if change else "")

    return [
        label(row, arm), memory(arm), number(arm.get("tokens_per_second"), text.count), speed(arm),
        losses("tokens"), losses("seconds"), time_to_loss(arm),
    ]  # fmt: skip


def _mark(change: Mapping[str, Any]) -> str:
    word = _word(change)
    return "" if word == " no difference" else f",{word}"
