"""Pages made of the result files that are no bench: the planner's predictions, the soak tests, and speed."""

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
    for name, sections in {"planner": PLANNER, "soak": SOAK, "speed": SPEED}.items():
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
TITLES = {
    "planner": "The planner, predicted and measured",
    "soak": "What was broken on purpose",
    "speed": "Speed, against others",
}


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
    return lines + mixed_precision(result)


def mixed_precision(result: dict[str, Any]) -> list[str]:
    """What the survey says that mixed precision buys, and what is predicted of it."""
    rows = {row["id"]: row for row in result["rows"] if row["id"].startswith("deit-") and "predicted" in row}
    if len(rows) != 2:
        return []
    fp32, amp = rows["deit-1"], rows["deit-2"]
    said, found = (amp[key] / fp32[key] for key in ("published_throughput", "predicted_throughput"))
    less, lesser = (1 - amp[key] / fp32[key] for key in ("published", "predicted"))
    return [
        "", "### Mixed precision on DeiT-B", "",
        f"The survey's example, batch 64 on an RTX 3090: {fp32['published_throughput']:.0f} images/s and "
        f"{fp32['published']:.1f} GB in float32, {amp['published_throughput']:.0f} images/s and "
        f"{amp['published']:.1f} GB with automatic mixed precision. Predicted: "
        f"{fp32['predicted_throughput']:.0f} images/s and {fp32['predicted']:.1f} GB, "
        f"{amp['predicted_throughput']:.0f} images/s and {amp['predicted']:.1f} GB. So the "
        f"gain in speed is ×{said:.2f} by the survey and ×{found:.2f} by the planner, that in memory {percent(less)} "
        f"and {percent(lesser)}.", "",
        f"Speed differs by {signed(fp32['throughput_error'])} in float32 and by {signed(amp['throughput_error'])} with "
        "mixed precision. A likely reason for the former: the data sheet's float32 rate of this GPU counts two units; "
        "one of them also does the integer work, so that real products stay below it. `thrifty calibrate` measures "
        "what a device reaches. The survey names neither optimizer nor attention; DeiT's own code is assumed.",
    ]  # fmt: skip


# Why a row is off, as far as it is known. Said only of the row that is the worst.
WORST: dict[str, str] = {}


def search_speed(result: dict[str, Any]) -> list[str]:
    """How long a search takes."""
    cold, cached, run, machine = result["cold"], result["cached"], result["run"], result["machine"]
    return [
        "## A search", "",
        f"{run['model']} on {run['devices']} x {run['device']}, global batch {run['global_batch']:,}: "
        f"{cold['classes']} structural classes, {cold['variants']} with their optimizers, {cold['configurations']:,} "
        f"configurations, {result['processes']} processes, imports not counted, {machine['processor']}:", "",
        f"- nothing known before: {cold['cpu_seconds']:.1f} s of processor time, {cold['seconds']:.1f} s by the clock "
        f"of a machine that others used too, {result['cold_seconds_alone']:.1f} s on two cores of its own;",
        f"- from the cache: {cached['cpu_seconds']:.2f} s of processor time, {cached['seconds']:.2f} s by the clock;",
        f"- peak memory of all processes: {result['peak_memory_bytes'] / GIB:.2f} GiB.",
    ]  # fmt: skip


def regret(result: dict[str, Any]) -> list[str]:
    """Whether the plan is the best choice."""
    lines = [
        "## The choice", "",
        f"{result['done']} of {result['of']} workloads on a CPU with a limit on memory, each with a measured sweep of "
        f"all configurations in {result['rounds']} alternating rounds: the choice was within the limit in "
        f"{result['within_limit']}; in {result['good']} the interval of its time over the best's includes or lies "
        f"below 1.05. Median of its time over the "
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


def exports(result: dict[str, Any]) -> list[str]:
    """How each export was checked."""
    lines = [
        "## Exports", "",
        "What `thrifty plan --export` writes for other tools, and how it was checked: loaded by the package itself, "
        "and what it understood compared with the plan; or, where no package is to be had, names, types and values "
        "compared with the documented ones.", "",
        "| tool | checked | with | by | plans | as planned |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for tool, entry in result["tools"].items():
        good = entry["plans"] - len(entry.get("problems", {}))
        how = entry.get("how", "its documented keys")
        lines.append(f"| {tool} | {entry['checked']} | {entry['of']} | {how} | {entry['plans']} | {good} |")
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


def time_to_loss(result: dict[str, Any]) -> list[str]:
    """Both sides seed by seed."""
    bare, runs, summary = result["baseline_recipe"], result["runs"], result["summary"]
    shapes = [
        f"{shape['num_hidden_layers']} layers of width {shape['hidden_size']}, {side[0]['parameters']:,} parameters"
        for shape, side in (
            (result["baseline_shape"], runs["baseline"]), (result["recipe"]["model_config"], runs["thrifty"])
        )
    ]  # fmt: skip
    ours = summary["thrifty"]
    lines = [
        "## Time to a loss, from scratch", "",
        f"The recipe `pretrain-small` against nanoGPT's recipe for a CPU ({bare['steps']:,} steps of {bare['batch']} x "
        f"{bare['context']} characters, AdamW at {bare['lr']:g}) in a bare loop, on the same text. The baseline's "
        f"model is nanoGPT's in shape ({shapes[0]}), the recipe's has its own ({shapes[1]}). The baseline's time is "
        "that to its lowest validation loss; thrifty's is its whole training, with all that the Trainer and the guards "
        f"do. Median share of the baseline's time: {ours['ratio']:.3f} (of its processor time: "
        f"{ours['cpu_ratio']:.3f}).", "",
        "| seed | side | validation loss | steps | tokens | seconds | of processor | share of the baseline's |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for index in range(len(runs["baseline"])):
        for side, found in runs.items():
            run = found[index]
            lines.append(
                f"| {run['seed']} | {side.replace('_', ' ')} | {run['loss']:.4f} | {run.get('step', run['steps']):,} | "
                f"{run['tokens']:,} | {run['seconds']:.1f} | {run['cpu_seconds']:.1f} | "
                f"{summary[side]['ratios'][index]:.3f} |"
            )
    machine = result["machine"]
    return [*lines, "", f"{machine['processor']}, threads: {machine['threads']}; "
            f"{result['validation_tokens']:,} characters of validation text."]  # fmt: skip


def overhead(result: dict[str, Any]) -> list[str]:
    """What a trainer costs beside the arithmetic."""
    lines = [
        "## What the loop costs", "",
        "A bare PyTorch loop, `transformers.Trainer` and `thrifty.Trainer` with an empty recipe and all guards, the "
        f"same model and batches, in turn ({result['clock']}). Ratios of rounds are medians over rounds of a burst "
        "each; those of steps compare the lower quartiles of single steps.", "",
        "| step | ratio of | bare loop | transformers / bare | thrifty / bare | thrifty / transformers |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in result["rows"]:
        for name, times, ratios in (
            ("rounds", row["step_milliseconds"], row),
            ("steps", row["undisturbed_milliseconds"], row["undisturbed"]),
        ):
            shown = [
                f"{ratios[key]:.3f}"
                for key in ("transformers_over_bare", "thrifty_over_bare", "thrifty_over_transformers")
            ]
            lines.append(f"| {row['step']} | {name} | {times['bare']:.1f} ms | {' | '.join(shown)} |")
    return lines


def start_up(result: dict[str, Any]) -> list[str]:
    """From the command to the first step."""
    lines = [
        "## Start-up", "",
        f"{result['what'][:1].upper()}{result['what'][1:]}; {result['rounds']} rounds of fresh processes:", "",
        "| clock | import torch and transformers' Trainer | first step | beyond | import thrifty |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for clock in ("wall", "processor"):
        row = result[clock]
        lines.append(
            f"| {clock} | {row['libraries']:.1f} s | {row['first_step']:.1f} s | {row['beyond_the_libraries']:.1f} s | "
            f"{row['import_thrifty']:.2f} s |"
        )
    return lines


def saving(result: dict[str, Any]) -> list[str]:
    """What a checkpoint keeps training waiting."""
    seconds = result["blocked_seconds"]
    return [
        "## Checkpoints", "",
        f"How long the loop stands still for a checkpoint of {result['checkpoint_bytes'] / 2**20:,.0f} MiB, "
        f"{result['saves_a_run']} a run, {result['rounds']} rounds: {seconds['foreground']:.2f} s written in the "
        f"foreground, {seconds['background']:.2f} s written by a thread; median share {result['blocked_share']:.2f}.",
    ]  # fmt: skip


def utilisation(result: dict[str, Any]) -> list[str]:
    """Speed and share of the processor's rate."""
    methods = {name: what for name, what in result["methods"].items() if name != "micro_batch"}
    chosen = "; ".join(f"{name}: {', '.join(map(str, what)) or 'none'}" for name, what in methods.items())
    lines = [
        "## Utilisation of a processor", "",
        f"A Llama of {result['parameters'] / 1e6:.0f} M parameters in fp32 (but where it says bf16), "
        f"{result['size']['batch']} x {result['size']['length']} tokens a step. Matrix products of its shape run at "
        f"{result['gemm_flops_per_second'] / 1e9:.0f} GFLOP/s in fp32. Methods chosen: "
        f"{chosen}.",
        "",
        "| configuration | step | speed over the bare loop | share of the products' rate |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, seconds in result["step_seconds"].items():
        lines.append(
            f"| {name} | {seconds:.2f} s | {result['speed_over_bare'][name]:.2f} | "
            f"{percent(result['share_of_gemm_rate'][name])} |"
        )
    return lines


def fine_tuning(result: dict[str, Any]) -> list[str]:
    """Tokens per second and losses of the rows of each task."""
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"Measured on {machine['processor']}, threads: {machine['threads']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, on {result['date'][:10]}. Tokens are those of the samples, without padding; each "
        "row sees the same samples in batches of the same size, once. Intervals are of 99 % for speed and 95 % for the "
        "loss.", "",
    ]  # fmt: skip
    for task in result["tasks"]:
        lines += [
            f"## Fine-tuning on unequal lengths: {task['task']}", "",
            f"Samples of {task['mean_length']:.0f} tokens on average and {task['longest']} at most, "
            f"{task['global_batch']} a step, {task['rounds']} rounds of {task['steps']} steps. thrifty's rows are the "
            f"recipe `{task['recipe']}` ({', '.join(map(str, task['methods']))}).", "",
            "| row | tokens/s | of the plain Trainer | of the best peer | loss | difference | peak memory |",
            "|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for row in task["rows"].values():
            if row["reason"] is not None:
                lines.append(f"| {row['what']} | {row['reason']} | | | | | |")
                continue
            best = row.get("speed_to_best_peer")
            cells = [row["what"], f"{row['tokens_per_second']:,.0f}", between(row.get("speed")), between(best),
                     f"{row['loss']:.4f}", between(row.get("loss_difference"), 4),
                     f"{row['peak_bytes'] / GIB:.2f} GiB"]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return lines[:-1]


def recipe_rows(result: dict[str, Any]) -> list[str]:
    """What each recipe's methods buy at a small size."""
    machine = result["machine"]
    lines = [
        "## Recipes", "",
        f"Each recipe at a small size on {machine['processor']}, threads: {machine['threads']}, against the same run "
        f"without its methods and its precision: {result['rounds']} rounds of {result['steps']} steps in turns; in "
        "brackets the lowest and the highest ratio. A packed row is full where a padded one is as long as its longest "
        "sample, so that packing takes more memory at the same number of rows.", "",
        "| recipe | methods | tokens/s | speed over plain | peak memory | of plain |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in result["rows"].items():
        if row["reason"] is not None:
            lines.append(f"| `{name}` | | {row['reason']} | | | |")
            continue
        methods = [next(iter(m)) if isinstance(m, dict) else m for m in row["methods"]]
        speed, peaks = row["speed"], row["peak_bytes"]
        lines.append(
            f"| `{name}` | {', '.join(methods) or 'none'} | {row['tokens_per_second']['recipe']:,.0f} | "
            f"{speed['median']:.2f} ({speed['low']:.2f} to {speed['high']:.2f}) | {peaks['recipe'] / 2**20:,.0f} MiB | "
            f"{peaks['recipe'] / peaks['plain']:.2f} |"
        )
    return lines


def between(value: dict[str, Any] | None, digits: int = 2) -> str:
    """A median with its interval."""
    if value is None:
        return ""
    ends = [value["low"], value["high"]]
    known = all(isinstance(end, int | float) and abs(end) < 1e6 for end in ends)
    return f"{value['median']:.{digits}f}" + (f" ({ends[0]:.{digits}f} to {ends[1]:.{digits}f})" if known else "")


PLANNER = {"published": published, "search-speed": search_speed, "regret": regret, "exports": exports}
SOAK = {
    "soak-kills": kills,
    "soak-oom": soak("Out of memory", "equal"),
    "soak-nan": soak("Numbers that are not finite", "good"),
    "soak-malformed": soak("Malformed input", "problems"),
    "soak-disk": soak("Storage and signals", "good"),
    "soak-pressure": soak("Real pressure on memory", "equal"),
}
SPEED = {
    "fine-tuning": fine_tuning,
    "time-to-loss": time_to_loss,
    "overhead": overhead,
    "start-up": start_up,
    "saving": saving,
    "utilisation": utilisation,
    "recipes": recipe_rows,
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
