"""Is the plan the best choice? 20 workloads with a memory limit, and for each a measured sweep of all configurations.

    python benchmarks/regret.py --minutes 60      # writes benchmarks/results/regret.json; goes on where it was

Processes of one core each share the work by `--only 0 1 2 --out part-0.json`; `--merge part-*.json` joins what they
found.

For each workload the planner sees a limit on memory and a global batch. Every configuration that it considered is then
trained for real, in rounds (A B C, A B C, ...), so that slow spells of the machine meet all of them; after the first
round only the choice and what came near the best go on. Every measurement is kept at once, so that a run can be ended
and taken up anywhere. The choice is good when it is within the limit by the allocator's own count, and its time over
the best fitting one's has an interval that includes or lies below 1.05. Step times of all configurations are compared
with the calibrated prediction.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROUNDS = 5
# Times of the first round above this share of the best one's are out of the race.
NEAR = 1.3
# Student's t, 95 %, by degrees of freedom.
T_95 = {2: 4.303, 3: 3.182, 4: 2.776}
LEAST_CONFIGURATIONS = 24
TOLERANCE = 1.05
MIB = 2**20


def llama(hidden: int, layers: int, vocabulary: int, heads: int = 4) -> dict[str, Any]:
    return {"model_type": "llama", "hidden_size": hidden, "intermediate_size": hidden * 8 // 3 // 8 * 8,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
            "vocab_size": vocabulary}  # fmt: skip


def bert(hidden: int, layers: int, vocabulary: int) -> dict[str, Any]:
    return {"model_type": "bert", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
            "num_attention_heads": 4, "vocab_size": vocabulary}  # fmt: skip


def gpt2(hidden: int, layers: int, vocabulary: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": 4, "vocab_size": vocabulary,
            "n_positions": 512}  # fmt: skip


def vit(hidden: int, layers: int, side: int) -> dict[str, Any]:
    return {"model_type": "vit", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
            "num_attention_heads": 4, "image_size": side, "patch_size": 8}  # fmt: skip


# model, task, sequence length, global batch, share of the way from the least to the most memory
WORKLOADS: list[tuple[dict[str, Any], str, int | None, int, float]] = [
    (model, task, seq, batch, tightness)
    for model, task, seq, batch in [
        (llama(128, 4, 2000), "causal-lm", 128, 12),
        (llama(192, 6, 1000), "causal-lm", 64, 24),
        (llama(128, 8, 8000), "causal-lm", 64, 12),
        (gpt2(128, 4, 4000), "causal-lm", 128, 12),
        (gpt2(192, 3, 1000), "causal-lm", 192, 12),
        (bert(128, 4, 4000), "masked-lm", 64, 12),
        (bert(192, 3, 1000), "text-classification", 64, 24),
        (vit(128, 4, 64), "image-classification", None, 24),
        (vit(96, 8, 48), "image-classification", None, 24),
        (llama(256, 3, 4000), "causal-lm", 96, 12),
    ]
    for tightness in (0.25, 0.6)
]


def workload_of(index: int) -> Any:
    """The planner's workload."""
    from thrifty.planner.workload import make_workload

    model, task, seq, _, _ = WORKLOADS[index]
    options = {} if seq is None else {"seq_len": seq}
    return make_workload(model, task=task, methods=["adamw"], **options)


def prepare(index: int) -> dict[str, Any]:
    """Plans one workload: its limit, the choice, and what to measure."""
    from thrifty.planner.plan import plan

    *_, batch, tightness = WORKLOADS[index]
    workload = workload_of(index)
    search = plan(workload, device="cpu", global_batch=batch, memory="64GiB").search
    assert search is not None
    table = search.table
    least, most = float(table["allocated"].min()), float(table["allocated"].max())
    limit = round(least + tightness * (most - least))
    chosen = plan(workload, device="cpu", global_batch=batch, memory=limit).require()
    assert len(table) >= LEAST_CONFIGURATIONS, f"{len(table)} configurations are too few to choose from"
    rows = [search.configuration(i).to_dict() for i in range(len(table))]
    at = next(i for i, r in enumerate(rows) if (r["methods"], r["micro_batch"]) == (chosen.methods, chosen.micro_batch))
    return {
        "workload": index, "limit_bytes": limit, "chosen": at, "rows": rows, "seconds": table["seconds"].tolist(),
        "allocated": table["allocated"].tolist(), "times": [[] for _ in rows], "peaks": [None for _ in rows],
    }  # fmt: skip


def contenders(state: dict[str, Any], number: int) -> list[int]:
    """What a round measures: everything first, then the choice and what can still be the best."""
    if number == 0:
        return list(range(len(state["rows"])))
    fitting = [i for i, peak in enumerate(state["peaks"]) if (peak or 0) <= state["limit_bytes"]]
    best = min(state["times"][i][0] for i in fitting)
    return [i for i in range(len(state["rows"]))
            if i == state["chosen"] or (i in fitting and state["times"][i][0] <= NEAR * best)]  # fmt: skip


def sweep(state: dict[str, Any], ends: float, keep: Path) -> bool:
    """Measures what is missing, and keeps every single measurement; says whether all is there."""
    from thrifty.planner.measure import measure

    workload = workload_of(state["workload"])
    for number in range(ROUNDS):
        for i in contenders(state, number):
            if len(state["times"][i]) > number:
                continue
            if time.monotonic() > ends:
                return False
            row = state["rows"][i]
            took = measure(workload.with_methods(row["methods"]), micro_batch=row["micro_batch"],
                           accumulation=row["accumulation"], steps=2, memory=number == 0)  # fmt: skip
            assert took.step_seconds is not None
            state["times"][i].append(took.step_seconds)
            state["peaks"][i] = state["peaks"][i] if number else took.peak_allocated_bytes
            keep.write_text(json.dumps(state), encoding="utf-8")
    return True


def judge(state: dict[str, Any]) -> dict[str, Any]:
    """What a finished sweep says of the choice."""
    index, times, peaks, at = state["workload"], state["times"], state["peaks"], state["chosen"]
    near = [i for i in contenders(state, 1) if (peaks[i] or 0) <= state["limit_bytes"]]
    best = min(near, key=lambda i: statistics.median(times[i]))
    ratios = [math.log(a / b) for a, b in zip(times[at], times[best], strict=True)]
    middle = statistics.mean(ratios)
    half = T_95[ROUNDS - 1] * statistics.stdev(ratios) / math.sqrt(len(ratios)) if at != best else 0.0
    fitting = sum((peak or 0) <= state["limit_bytes"] for peak in peaks)
    return {
        "workload": index, "model": WORKLOADS[index][0], "task": WORKLOADS[index][1],
        "limit_bytes": state["limit_bytes"], "configurations": len(times), "fitting": fitting, "contenders": len(near),
        "chosen": state["rows"][at], "best": state["rows"][best], "chosen_peak_bytes": peaks[at],
        "within_limit": (peaks[at] or 0) <= state["limit_bytes"], "ratio": math.exp(middle),
        "interval": [math.exp(middle - half), math.exp(middle + half)],
        "good": math.exp(middle - half) <= TOLERANCE,
        "time_errors": [said / statistics.median(took) - 1 for said, took in zip(state["seconds"], times, strict=True)],
        "memory_errors": [said / (took or 1) - 1 for said, took in zip(state["allocated"], peaks, strict=True)],
    }  # fmt: skip


def main() -> None:
    """Sweeps as many workloads as fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--calibrate", type=float, default=20.0, help="seconds; 0 takes the stored calibration")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of workloads")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "regret.json")
    parser.add_argument("--merge", type=Path, nargs="+", help="results of parts, to join in place of measuring")
    options = parser.parse_args()
    if options.merge:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
        entries = sorted((e for part in parts for e in part["workloads"]), key=lambda e: e["workload"])
        write(options.out, {"workloads": entries})
        return
    from thrifty.hardware.calibrate import calibrate

    ends = time.monotonic() + 60 * options.minutes
    done: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"workloads": []}
    if options.calibrate and not options.out.with_suffix(".partial.json").exists():
        calibrate("cpu", seconds=options.calibrate)
    for index in range(len(WORKLOADS)):
        if any(entry["workload"] == index for entry in done["workloads"]) or index not in (options.only or [index]):
            continue
        if time.monotonic() > ends:
            break
        keep = options.out.with_suffix(".partial.json")
        state = json.loads(keep.read_text(encoding="utf-8")) if keep.exists() else None
        if state is None or state["workload"] != index:
            state = prepare(index)
        if not sweep(state, ends, keep):
            break
        entry = judge(state)
        keep.unlink()
        done["workloads"].append(entry)
        write(options.out, done)
        print(f"{index}: {entry['configurations']} configurations, ratio {entry['ratio']:.3f} "
              f"[{entry['interval'][0]:.3f}, {entry['interval'][1]:.3f}], within the limit: {entry['within_limit']}, "
              f"time error {statistics.median(map(abs, entry['time_errors'])):.1%}", flush=True)  # fmt: skip


def write(path: Path, done: dict[str, Any]) -> None:
    """Keeps what is done, with its summary."""
    done |= summary(done["workloads"])
    path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all workloads."""
    from thrifty.bench.result import circumstances

    time_errors = [abs(e) for entry in entries for e in entry["time_errors"]]
    memory_errors = [abs(e) for entry in entries for e in entry["memory_errors"]]
    return {
        **circumstances(), "rounds": ROUNDS,
        "done": len(entries), "of": len(WORKLOADS), "within_limit": sum(e["within_limit"] for e in entries),
        "good": sum(e["good"] for e in entries), "median_ratio": statistics.median(e["ratio"] for e in entries),
        "mean_time_error": statistics.mean(time_errors), "median_time_error": statistics.median(time_errors),
        "median_memory_error": statistics.median(memory_errors), "worst_memory_error": max(memory_errors),
    }  # fmt: skip


if __name__ == "__main__":
    main()
