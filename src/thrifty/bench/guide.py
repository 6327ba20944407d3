"""`thrifty bench --guide`: the experiment of Hugging Face's single-GPU guide, repeated and predicted.

`guide.yaml` holds the configurations and what was published. On an accelerator the shape is the guide's own; a
processor gets a smaller one, so that its numbers are to be compared as ratios to the first row only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from thrifty.bench import tables
from thrifty.bench.charts import Bar, bar_chart
from thrifty.bench.html import render
from thrifty.bench.options import Options, read_values
from thrifty.bench.processes import StartMethod
from thrifty.bench.result import result_of as bench_result
from thrifty.bench.result import shareable
from thrifty.bench.rows import Arm
from thrifty.bench.session import Session
from thrifty.config import yaml_text
from thrifty.data.cache import cache_dir
from thrifty.errors import InputError
from thrifty.method import registry
from thrifty.report.files import to_json, write_atomic

FORMAT = "thrifty-guide/1"
SAVES = 0.98
"""A peak below this share of the first row's saves memory."""
_SAMPLES, _WORDS = 256, 400
_BATCH = (4, 1)


def content() -> dict[str, Any]:
    """What `guide.yaml` says."""
    text = resources.files("thrifty.bench").joinpath("guide.yaml").read_text(encoding="utf-8")
    return yaml_text.parse(text, "guide.yaml")


def random_data(folder: Path) -> Path:
    """Random words with random labels, long enough for any shape; the same on every machine."""
    path = folder / f"random-{_SAMPLES}-{_WORDS}.jsonl"
    if not path.is_file():
        draw = random.Random(0)
        syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
        rows = []
        for number in range(_SAMPLES):
            words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(_WORDS)]
            rows.append(to_json({"text": " ".join(words), "label": str(number % 2)}))
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "\n".join(rows) + "\n")
    return path


def arm_of(entry: Mapping[str, Any]) -> Arm:
    """The arm of a row of `guide.yaml`."""
    micro, accumulation = entry.get("batch", _BATCH)
    keys = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    return Arm(entry["label"], tuple(entry.get("methods", ())), {**keys, **entry.get("keys", {})})


class GuideSession(Session):
    """Measures every different configuration once, and predicts each."""

    def __init__(self, guide: Mapping[str, Any], options: Options, folder: Path, **given: Any) -> None:
        self.guide = guide
        self.arm_of_label: dict[tuple[str, str], str] = {}
        arms: list[Arm] = []
        for part in ("rows", "table"):
            for entry in guide[part]:
                arm = arm_of(entry)
                same = next((other for other in arms if other.recipe == arm.recipe), None)
                if same is None:
                    if any(other.id == arm.id for other in arms):
                        arm = Arm(f"{arm.id} (table)", arm.methods, arm.keys)
                    arms.append(arm)
                self.arm_of_label[part, entry["label"]] = (same or arm).id
        super().__init__(options, folder, arms=arms, **given)
        for arm in arms:
            missing = [name for name in arm.methods if name not in registry.names()]
            if missing:
                self.reasons[arm.id] = f"there is no method '{missing[0]}' yet"

    def _losses(self) -> None:
        """In place of losses, which random data does not have: what the planner predicts."""
        for arm in self.arms:
            for where in ("here", "published"):
                key = f"predicted-{where}/{arm.id}"
                if key not in self.state.notes and arm.id not in self.reasons:
                    self.progress.begin(f"prediction of {arm.id}", None)
                    self.state.note(key, self._predict(arm, where))

    def device(self) -> str:
        """The planner's profile of this machine."""
        import torch

        from thrifty.hardware.devices import detect_id

        return detect_id(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"

    def _predict(self, arm: Arm, where: str) -> dict[str, Any]:
        from thrifty.config import parse_config
        from thrifty.planner.plan import estimate
        from thrifty.planner.workload import make_workload, workload_from_run

        micro = int(arm.keys["per_device_train_batch_size"])
        accumulation = int(arm.keys["gradient_accumulation_steps"])
        published = self.guide["published_on"]
        try:
            if where == "here":
                run = {**self.options.run, **arm.keys, "methods": list(arm.methods)}
                workload = workload_from_run(parse_config(run, name="guide"))
            else:
                own = {key: value for key, value in arm.keys.items() if key in ("optim", "torch_compile")}
                workload = make_workload(
                    published["model"], task="text-classification", seq_len=published["seq_len"],
                    methods=arm.methods, attn_implementation=published["attn_implementation"], **own,
                )  # fmt: skip
            found = estimate(
                workload, device=self.device() if where == "here" else published["device"], micro_batch=micro,
                accumulation=accumulation,
            )  # fmt: skip
        except InputError as error:
            return {"reason": str(error)}
        return {
            "peak_bytes": found.peak_allocated_bytes,
            "device_bytes": found.device_total_bytes,
            "samples_per_second": found.samples_per_second,
        }


def result_of(session: Session) -> dict[str, Any]:
    """Both tables of the guide, ready for JSON."""
    assert isinstance(session, GuideSession)
    bench = bench_result(session)
    rows = [
        {
            "label": entry["label"],
            "published": {"samples_per_second": entry["published"][0], "memory_mb": entry["published"][1]},
            "arm": session.arm_of_label["rows", entry["label"]],
        }
        for entry in session.guide["rows"]
    ]
    table = [
        {
            "label": entry["label"],
            "published": {"speed": entry["published"][0], "memory": entry["published"][1]},
            "arm": session.arm_of_label["table", entry["label"]],
        }
        for entry in session.guide["table"]
    ]
    for arm in session.arms:
        found = bench["arms"][arm.id]
        if found.get("step_seconds"):
            samples = arm.keys["per_device_train_batch_size"] * arm.keys["gradient_accumulation_steps"]
            found["samples_per_second"] = samples / found["step_seconds"]
        for where in ("here", "published"):
            found[f"predicted_{where}"] = session.state.notes.get(f"predicted-{where}/{arm.id}")
    return {
        **bench,
        "format": FORMAT,
        "source": session.guide["source"],
        "published_on": session.guide["published_on"],
        "run": shareable(session.options.run),
        "rows": rows,
        "table": table,
        "noise": bench["noise"],
    }


ROWS_HEADER = [
    "configuration", "published samples/s", "predicted", "measured here", "against vanilla", "published memory",
    "predicted", "predicted here", "measured here",
]  # fmt: skip
TABLE_HEADER = ["technique", "guide: speed", "measured", "", "guide: memory", "measured", ""]


def row_cells(result: Mapping[str, Any]) -> list[list[str]]:
    """The nine configurations: published beside predicted and measured."""
    rows = []
    for row in result["rows"]:
        arm, published = result["arms"][row["arm"]], row["published"]
        there, here = arm.get("predicted_published") or {}, arm.get("predicted_here") or {}
        head = [row["label"], f"{published['samples_per_second']:.2f}", _rate(there)]
        memory = [f"{published['memory_mb']:,} MB", _mb(there.get("device_bytes")), _mb(here.get("peak_bytes"))]
        if arm["reason"] is not None:
            rows.append([*head, f"cannot run here: {arm['reason']}"])
            continue
        rows.append([*head, _rate(arm), tables.speed(arm), *memory, _mb(arm["peak_bytes"])])
    return rows


def table_cells(result: Mapping[str, Any]) -> list[list[str]]:
    """The guide's table, filled in by measurement."""
    rows = []
    for row in result["table"]:
        arm, published = result["arms"][row["arm"]], row["published"]
        if arm["reason"] is not None:
            rows.append([row["label"], published["speed"], f"not measured: {arm['reason']}"])
            continue
        faster = {"faster": "yes", "slower": "no, slower", "no difference": "no"}.get(arm.get("verdict", ""), "–")
        change = arm["peak_change"]
        saves = "–" if change is None else "yes" if change < SAVES - 1 else "no, more" if change > 1 - SAVES else "no"
        speed = tables.DASH if arm.get("speed") is None else tables.ratio(arm["speed"])
        rows.append(
            [
                row["label"], published["speed"], faster, speed, published["memory"], saves,
                tables.DASH if change is None else tables.percent(change),
            ]
        )  # fmt: skip
    return rows


def _rate(found: Mapping[str, Any]) -> str:
    value = found.get("samples_per_second")
    return tables.DASH if value is None else f"{value:.2f}"


def _mb(value: Any) -> str:
    if value is None:
        return tables.DASH
    return f"{value / 1e6:,.0f} MB" if value >= 1e8 else f"{value / 1e6:.1f} MB"


def notes(result: Mapping[str, Any]) -> list[str]:
    """What has to be said beside the tables."""
    published = result["published_on"]
    lines = [
        f"Published: {result['source']}, on {published['device']}, {published['model']}, batch 4 x "
        f"{published['seq_len']}; memory by nvidia-smi. Predicted beside it: the planner for that device, with today's "
        "software (torch of 2022 kept gradients through the step and updated one parameter at a time).",
        "Measured here: allocated bytes at the peak of a step.",
    ]
    if not result["machine"]["accelerators"]:
        lines.append("This machine has no accelerator: a small model stands in, so compare ratios to the first row.")
    return [*lines, *tables.notes({**result, "arms": {k: a for k, a in result["arms"].items() if a["reason"] is None}})]


def markdown(result: Mapping[str, Any]) -> str:
    """Both tables in Markdown."""
    lines = [f"**{result['label'].capitalize()}** on {tables.machine_line(result)}.", ""]
    lines += [*tables.markdown_table(ROWS_HEADER, row_cells(result)), ""]
    lines += [*tables.markdown_table(TABLE_HEADER, table_cells(result)), ""]
    return "\n".join([*lines, *(f"- {line}" for line in notes(result))]) + "\n"


def terminal(result: Mapping[str, Any]) -> str:
    """Both tables for a terminal."""
    from thrifty.bench.compare import plain as columns

    blocks = []
    for head, rows in ((ROWS_HEADER, row_cells(result)), (TABLE_HEADER, table_cells(result))):
        blocks.append(columns(head, [[*row, *[""] * (len(head) - len(row))] for row in rows]))
    return "\n\n".join([*blocks, "\n".join([*notes(result), f"{result['label']}: {tables.machine_line(result)}"])])


def page(result: Mapping[str, Any]) -> str:
    """Both tables as a page."""
    bars = [
        Bar(row["label"], arm["peak_bytes"], _mb(arm["peak_bytes"]), style=f"c{index % 8}")
        for index, row in enumerate(result["rows"])
        if (arm := result["arms"][row["arm"]]).get("peak_bytes")
    ]
    note = "of a training step, measured here"
    return render(
        title="The single-GPU guide, measured", kind="bench", subtitle=tables.machine_line(result),
        bars=[{"title": "Peak memory", "note": note, "svg": bar_chart("memory", bars)}],
        tables=[
            {"title": "The nine configurations", "note": "", "head": ROWS_HEADER, "rows": row_cells(result)},
            {"title": "What improves speed, what saves memory", "note": "each against the first configuration",
             "head": TABLE_HEADER, "rows": table_cells(result)},
        ],
        notes=notes(result),
    )  # fmt: skip


def run(
    overrides: Sequence[str] = (),
    *,
    minutes: float = 10.0,
    rounds: int | None = None,
    threads: int | None = None,
    **common: Any,
) -> int:
    """Carries out the experiment and returns the exit code."""
    import torch

    from thrifty.bench.run import carry_out

    guide = content()
    shape = "accelerator" if torch.accelerator.is_available() else "cpu"
    values = {**guide["common"], **guide["shapes"][shape], "train_file": str(random_data(cache_dir() / "guide"))}
    content_, own = read_values(values, overrides)
    if own:
        raise InputError("are fixed by the guide", key="methods", value=own, fix="thrifty bench --methods ...")
    options = Options(
        run=content_, name=f"guide-{shape}", minutes=minutes, rounds=rounds, threads=threads, quality=False,
    )  # fmt: skip

    def start(folder: Path, fresh: bool, method: StartMethod | None) -> Session:
        return GuideSession(guide, options, folder, fresh=fresh, method=method)

    return carry_out(start, result_of, options, page, markdown, terminal, **common)
