"""Pages made of the result files that are no bench: the planner's predictions and the soak tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30


def pages() -> dict[Path, str]:
    """Every page with its text; a page without its files is not made."""
    made = {}
    for name, sections in {"planner": PLANNER, "soak": SOAK}.items():
        parts = []
        for stem, section in sections.items():
            path = RESULTS / f"{stem}.json"
            if path.exists():
                source = f"From `benchmarks/results/{path.name}`."
                parts += [*section(json.loads(path.read_text("utf-8"))), "", source, ""]
        if parts:
            made[ROOT / "docs/results" / f"{name}.md"] = "\n".join([f"# {TITLES[name]}", "", START, *parts, END, ""])
    return made


START, END = "<!-- generated: measured -->", "<!-- /generated -->"
TITLES = {"planner": "The planner, predicted and measured", "soak": "What was broken on purpose"}


def published(result: dict[str, Any]) -> list[str]:
    """Each published row, predicted and measured by others, and why the worst is off."""
    memory, plain, speed = (result[key] for key in ("memory", "memory_unadjusted", "throughput"))
    lines = [
        "## Published measurements", "",
        "What others measured on GPUs, beside what is predicted here from device facts alone. Three sources ran "
        "software that differs in ways that are documented; the docstring of `benchmarks/published.py` names them and "
        "where they are documented. *as today* is the error without them.", "",
        f"- {memory['rows']} rows of peak memory: median error {percent(memory['median'])}, worst "
        f"{percent(memory['worst'])}; as today: median {percent(plain['median'])}, worst {percent(plain['worst'])}.",
        f"- {speed['rows']} rows of throughput: median error {percent(speed['median'])}, worst "
        f"{percent(speed['worst'])}.", "",
        "| row | published | predicted | error | as today | throughput | predicted | error |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in result["rows"]:
        if "skipped" in row:
            lines.append(f"| {row['id']} | {row['published']:.2f} {unit(row)} | | {row['skipped']} | | | | |")
            continue
        speed_cells = ["", "", ""]
        if "throughput_error" in row:
            speed_cells = [f"{row['published_throughput']:,.1f}", f"{row['predicted_throughput']:,.1f}",
                           signed(row["throughput_error"])]  # fmt: skip
        cells = [row["id"], f"{row['published']:.2f} {unit(row)}", f"{row['predicted']:.2f} {unit(row)}",
                 signed(row["memory_error"]), signed(row.get("unadjusted_error")), *speed_cells]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    runs = [row for row in result["rows"] if row.get("kind") == "run" and "predicted" in row]
    worst = max(runs, key=lambda row: abs(row["memory_error"]))
    lines += ["", f"The worst row of memory is {worst['id']} ({signed(worst['memory_error'])}), with its peak at "
              f"{worst['peak_phase']}. " + WORST.get(worst["id"], "")]  # fmt: skip
    return lines


# Why a row is off, as far as it is known. Said only of the row that is the worst.
WORST: dict[str, str] = {
    "lit-6": "Why is not known: the published figure is close to the bytes of the 16-bit weights, so that it may hold "
    "the moment of their loading, which a plan of training does not see.",
    "tune-3b-8": "Why is not known: its source pages 8-bit states, and does not say how much of them the figure holds.",
    "tune-3b-3": "Its source compiles the model: what inductor recomputes instead of keeping cannot be traced, so the "
    "prediction is that of the eager model.",
}


def search_speed(result: dict[str, Any]) -> list[str]:
    """How long a search takes."""
    cold, warm = result["cold"], result["warm"]
    return [
        "## A search", "",
        f"{result['model']}, {result['traced_classes']} traced classes, {cold['configurations']:,} configurations, "
        f"{result['cores']} cores:", "",
        f"- nothing known before: {cold['seconds']:.1f} s ({cold['cpu_seconds']:.1f} s of processor time);",
        f"- from the cache: {warm['seconds']:.2f} s;",
        f"- peak memory of the process: {result['peak_rss_bytes'] / GIB:.2f} GiB.",
    ]  # fmt: skip


def regret(result: dict[str, Any]) -> list[str]:
    """Whether the plan is the best choice."""
    lines = [
        "## The choice", "",
        f"{result['done']} of {result['of']} workloads on a CPU with a limit on memory, each with a measured sweep of "
        f"all configurations in {result['rounds']} alternating rounds: the choice was within the limit in "
        f"{result['within_limit']}, and within 5 % of the best in {result['good']}. Median of its time over the "
        f"best's: {result['median_ratio']:.3f}. Step time: mean error {percent(result['mean_time_error'])}; memory: "
        f"median error {percent(result['median_memory_error'])}, worst {percent(result['worst_memory_error'])}.", "",
        "| workload | configurations | limit | chosen over best | interval | within the limit |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for entry in result["workloads"]:
        model = entry["model"]
        low, high = entry["interval"]
        lines.append(
            f"| {model['model_type']} {entry['task']} {entry['workload']} | {entry['configurations']} | "
            f"{entry['limit_bytes'] / 2**20:,.0f} MiB | {entry['ratio']:.3f} | {low:.3f} to {high:.3f} | "
            f"{'yes' if entry['within_limit'] else 'no'} |"
        )
    return lines


def soak(title: str, good: str) -> Callable[[dict[str, Any]], list[str]]:
    """A soak table: how many were as they should be."""

    def section(result: dict[str, Any]) -> list[str]:
        rows = result["rows"]
        fine = sum(bool(row.get(good)) if good != "problems" else not row["problems"] for row in rows)
        what = result["what"][:1].upper() + result["what"][1:]
        return [f"## {title}", "", f"{what}: {fine} of {len(rows)} as they should be."]

    return section


def kills(result: dict[str, Any]) -> list[str]:
    """Kills by recipe."""
    rows = result["rows"]
    total = sum(row["kills"] for row in rows)
    lines = [
        "## Kills", "",
        f"{result['what']}: {sum(row['resumed_bit_exactly'] for row in rows)} of {total} resumed bit for bit, "
        f"{sum(row['inside_a_save'] for row in rows)} of the kills inside a save.", "",
        "| recipe | kills | inside a save | resumed bit for bit |", "|---|---|---|---|",
    ]  # fmt: skip
    return [*lines, *(
        f"| {row['recipe']} | {row['kills']} | {row['inside_a_save']} | {row['resumed_bit_exactly']} |" for row in rows
    )]  # fmt: skip


PLANNER = {"published": published, "search-speed": search_speed, "regret": regret}
SOAK = {
    "soak-kills": kills,
    "soak-oom": soak("Out of memory", "equal"),
    "soak-nan": soak("Numbers that are not finite", "good"),
    "soak-malformed": soak("Malformed input", "problems"),
    "soak-disk": soak("Storage and signals", "good"),
    "soak-pressure": soak("Real pressure on memory", "equal"),
}


def unit(row: dict[str, Any]) -> str:
    """GB or GiB."""
    return "GiB" if "GiB" in row["unit"] else "GB"


def percent(value: float | None) -> str:
    """A share for people."""
    return "-" if value is None else f"{value:.1%}"


def signed(value: float | None) -> str:
    """A share with its sign."""
    return "" if value is None else f"{value:+.1%}"
