"""Tables of numbers for the docs, each made of a file in `benchmarks/results/`; and a search for numbers without one.

A page asks for a table by a pair of comments, `<!-- generated: results NAME.PART -->` and `<!-- /generated -->`, where
NAME is a result file without `.json`; `docs/generate.py` fills it in.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from thrifty.bench import evidence, guide, tables
from thrifty.bench.publish import read
from thrifty.errors import InputError
from thrifty.report import text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKS = re.compile(r"(<!-- generated: results ([\w.-]+) -->\n)(.*?)(<!-- /generated -->)", re.S)
GENERATED = re.compile(r"<!-- generated: .*?<!-- /generated -->", re.S)
_NUMBER = re.compile(r"[-−+×]?\d+(\.\d+)?\s?(%|ms|s|h|min|×|x|[KMG]i?B|k|M|B|tokens/s|samples/s)?")
"""A table cell that is a measured or estimated quantity: a number with or without a unit, and nothing else."""


def filled(page: str) -> str:
    """The page with every block of results made anew. A block without its file is an `InputError`."""
    return MARKS.sub(lambda m: m[1] + block(m[2]) + m[4], page)


def block(name: str) -> str:
    """The text of one block, such as `bench-embedded.additive`; a bare file name gives all of its parts.

    Raises:
        InputError: There is no such file or part.
    """
    if name == "index":
        return index(prefix="results/") + "\n"
    stem, _, part = name.partition(".")
    result = read(RESULTS / f"{stem}.json") if stem != "evidence" else None
    parts = all_evidence() if result is None else PARTS[result["format"]](result)
    if part and part not in parts:
        raise InputError("the result file has no such part", key=name, value=part, fix=", ".join(parts))
    chosen = [parts[part]] if part else list(parts.values())
    lines = "\n\n".join("\n".join(lines) for lines in chosen if lines)
    return lines + "\n"


def result_pages() -> dict[Path, str]:
    """One page for every result file of the bench, and one for all evidence."""
    made = {}
    for path, result in results():
        lines = [f"# {title(path.stem, result)}", "", f"From `benchmarks/results/{path.name}`.", "", block(path.stem)]
        made[ROOT / "docs/results" / f"{path.stem}.md"] = "\n".join(lines)
    if any(path.stem.startswith("evidence-") for path in made):
        lines = ["# Evidence: each technique against its baseline", "", EVIDENCE, "", block("evidence")]
        made[ROOT / "docs/results/evidence.md"] = "\n".join(lines)
    return made


EVIDENCE = (
    "Each row is a file of `benchmarks/results/`, made by the evidence file of that name in `benchmarks/evidence/`: "
    "real data, both sides with a schedule of their own that decays fully, at equal seconds. Rows that did not help "
    "stay. A side whose pace cannot be told from the baseline's gets as many steps. Runs are short, so that they say "
    "what a technique does early, on a small model; a larger one may differ."
)
TITLES = {
    "bench-embedded": "The bench: a small Llama on the embedded text",
    "bench-bert-films": "The bench: MiniLM fine-tuned on film reviews",
    "bench-vit-digits": "The bench: a small ViT on digits",
    "bench-instructions": "The bench: a small Llama on instructions of very unequal lengths",
    "bench-can-tell": "Can the bench tell?",
    "bench-repeat": "Does the bench say the same twice?",
    "depth-sweep": "Deep models: ReZero and Fixup where the plain model stops to train",
    "guide-cpu": "The single-GPU guide, measured on a processor",
    "guide-accelerator": "The single-GPU guide, measured on an accelerator",
    "peers": "Other tools on the same task",
}


def title(stem: str, result: Mapping[str, Any]) -> str:
    """A heading for a result's page."""
    return TITLES.get(stem) or (f"Evidence: {result['name']}" if stem.startswith("evidence-") else stem)


def results() -> list[tuple[Path, dict[str, Any]]]:
    """The result files of the bench; files of other kinds have pages of their own."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        try:
            found.append((path, read(path)))
        except InputError:
            continue
    return found


def index(prefix: str) -> str:
    """A list of the result pages."""
    lines, evidence_files = [], []
    for path, result in results():
        if path.stem.startswith("evidence-"):
            evidence_files.append(f"[{result['name']}]({prefix}{path.stem}.md)")
        else:
            lines.append(f"- [{title(path.stem, result)}]({prefix}{path.stem}.md): {tables.machine_line(result)}")
    if evidence_files:
        lines.append(f"- [Evidence]({prefix}evidence.md): {', '.join(evidence_files)}")
    return "\n".join(lines) or "None has been published yet."


def numbers_without_a_file(page: str) -> Iterator[str]:
    """Rows of Markdown tables that hold numbers and stand in no generated block."""
    bare = re.sub(r"```.*?```", "", GENERATED.sub("", page), flags=re.S)
    for line in bare.splitlines():
        if not line.lstrip().startswith("|"):
            continue
        cells = [cell.strip(" *`") for cell in line.strip().strip("|").split("|")]
        if any(_NUMBER.fullmatch(cell) for cell in cells):
            yield line


def _bench(result: Mapping[str, Any]) -> dict[str, list[str]]:
    parts = {"machine": [_label(result)]}
    for table, meaning in tables.MEANINGS.items():
        rows = tables.body(result, table)
        if rows:
            head = f"{table.capitalize()} table: {meaning}."
            parts[table] = [head, "", *tables.markdown_table(tables.header(result, table), rows)]
    parts["notes"] = [f"- {line}" for line in tables.notes(result)]
    return parts


def _guide(result: Mapping[str, Any]) -> dict[str, list[str]]:
    return {
        "machine": [_label(result)],
        "rows": tables.markdown_table(guide.ROWS_HEADER, guide.row_cells(result)),
        "table": tables.markdown_table(guide.TABLE_HEADER, guide.table_cells(result)),
        "notes": [f"- {line}" for line in guide.notes(result)],
    }


def _evidence(result: Mapping[str, Any]) -> dict[str, list[str]]:
    return {
        "machine": [_label(result)],
        "finding": tables.markdown_table(evidence.header(), [evidence.cells(result)]),
        "notes": [f"- {line}" for line in evidence.notes(result)],
    }


def all_evidence() -> dict[str, list[str]]:
    """The findings of all evidence files in one table."""
    rows, labels = [], set()
    head = [*evidence.header(), "published"]
    head.insert(1, "on")
    for path in sorted(RESULTS.glob("evidence-*.json")):
        result = read(path)
        shape = result["run"].get("model_config") or {}
        cells = evidence.cells(result)
        cells += [""] * (len(head) - 2 - len(cells))
        cells.insert(1, f"{result['run']['task']}, {shape.get('model_type', result['run'].get('model_name_or_path'))}")
        rows.append([*cells, result["published"] or tables.DASH])
        labels.add(_label(result))
    if not rows:
        raise InputError("there is no result file", key="benchmarks/results/evidence-*.json")
    return {"table": tables.markdown_table(head, rows), "machines": sorted(labels)}


def _peers(result: Mapping[str, Any]) -> dict[str, list[str]]:
    head = ["tool", "step", "tokens/s", "step time against transformers.Trainer", "loss", "start", "first steps beyond"]
    rows = []
    for entry in result["peers"].values():
        if entry["reason"] is not None:
            rows.append([entry["what"], f"did not run: {entry['reason']}"])
            continue
        against = entry["step_ratio"]
        rows.append(
            [
                entry["what"], tables.milliseconds(entry["step_seconds"]), text.count(entry["tokens_per_second"]),
                tables.DASH if against is None else f"{tables.ratio(against)} {entry['verdict']}",
                f"{entry['loss']:.3f}", text.duration(entry["start_seconds"]),
                text.duration(entry["warm_up_extra_seconds"]),
            ]
        )  # fmt: skip
    task = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in result["task"].items())
    return {
        "machine": [_label(result)],
        "table": tables.markdown_table(head, rows),
        "notes": [f"- {result['rounds']} rounds; {task}; the same weights, samples and order for all."],
    }


def _can_tell(result: Mapping[str, Any]) -> dict[str, list[str]]:
    same, planted, of = result["same_called_no_difference"], result["planted_called_slower"], result["repeats"]
    head = ["pair", "should be called", "was, of all repeats"]
    rows = [
        ["the baseline against itself", "no difference", f"{same} of {of}"],
        [f"a planted slow-down of {result['planted']:.0%}", "slower", f"{planted} of {of}"],
    ]
    notes = [f"- {result['rounds']} rounds a repeat, in {text.duration(result['seconds'])} altogether."]
    return {"machine": [_label(result)], "table": tables.markdown_table(head, rows), "notes": notes}


def _repeat(result: Mapping[str, Any]) -> dict[str, list[str]]:
    rows = [[row["row"], row["what"], row["first"], row["second"]] for row in result["rows"]]
    speed, loss = result["speed"], result["loss"]
    return {
        "machine": [_label(result)],
        "summary": [
            f"The same bench twice: {speed['equal']} of {speed['of']} rows are called the same for their speed, and "
            f"{loss['equal']} of {loss['of']} verdicts on losses are the same."
        ],
        "table": tables.markdown_table(["row", "what", "first time", "second time"], rows),
        "notes": [f"- The {nth} time: {plan}." for nth, plan in zip(("first", "second"), result["plans"], strict=True)],
    }


def _depth(result: Mapping[str, Any]) -> dict[str, list[str]]:
    run, seeds = result["run"], result["seeds"]
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    cells = {(row["depth"], row["arm"]): _depth_cell(row, seeds) for row in result["rows"]}
    rows = [[str(depth), *(cells[depth, arm] for arm in arms)] for depth in dict.fromkeys(d for d, _ in cells)]
    return {
        "machine": [_label(result)],
        "table": tables.markdown_table(["layers", *arms], rows),
        "notes": [
            f"- Median validation loss of {seeds} seeds after {result['steps']} steps, and how many of them trained: "
            f"came more than {result['margin']:g} below {result['without_context']:.3f}, the loss of the best model "
            "that ignores the context.",
            f"- All with the learning rate {run['learning_rate']:g}, without warm-up; the plain model is BERT's, with "
            "its normalisation after each addition, as a decoder. ReZero and Fixup take the normalisations out.",
        ],
    }


def _depth_cell(row: Mapping[str, Any], seeds: int) -> str:
    middle = f"{statistics.median(row['losses']):.3f}" if row["losses"] else "not finite"
    return f"{middle}, {row['trained']} of {seeds} trained"


def _label(result: Mapping[str, Any]) -> str:
    return f"**{result['label'].capitalize()}** on {tables.machine_line(result)}."


PARTS: dict[str, Callable[[Mapping[str, Any]], dict[str, list[str]]]] = {
    "thrifty-bench/1": _bench,
    "thrifty-guide/1": _guide,
    "thrifty-evidence/1": _evidence,
    "thrifty-peers/1": _peers,
    "thrifty-bench-can-tell/1": _can_tell,
    "thrifty-bench-repeat/1": _repeat,
    "thrifty-depth-sweep/1": _depth,
}
