"""Holds the planner to this machine's GPU: predicted and real memory and step time of many cells, before and after
calibration, and the tests that need a GPU.

    benchmarks/gpu_check.sh                     # about 8 minutes; writes benchmarks/results/gpu-<device>.json
    python benchmarks/gpu_check.py --device cpu --tiny --minutes 1    # the same on a CPU, to see that it runs

Each cell is a model and a set of methods, trained for four real steps by thrifty's trainer on random data and predicted
by `thrifty.estimate`. The file is written after every cell, so a limit on time loses nothing. What did not run says
why; a cell that crashes is named, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

TEXT = {"seq_len": 512}
# model, task, micro-batch, options
MODELS: list[tuple[Any, str, int, dict[str, Any]]] = [
    ("gpt2", "causal-lm", 8, TEXT),
    ("bert-base-uncased", "masked-lm", 16, TEXT),
    ("llama-3.2-1b", "causal-lm", 2, {"seq_len": 1024}),
    ("qwen3-0.6b", "causal-lm", 4, {"seq_len": 1024}),
    ("vit-base", "image-classification", 32, {}),
    ("t5-base", "seq2seq-lm", 8, TEXT),
]
TINY: list[tuple[Any, str, int, dict[str, Any]]] = [
    ({"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
      "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 611}, "causal-lm", 2, {"seq_len": 64}),
    ({"model_type": "vit", "image_size": 32, "patch_size": 8, "hidden_size": 64, "intermediate_size": 128,
      "num_hidden_layers": 2, "num_attention_heads": 4}, "image-classification", 4, {}),
]  # fmt: skip
METHODS: list[list[Any]] = [
    [],
    ["bf16"],
    ["gradient-checkpointing"],
    ["bf16", "gradient-checkpointing"],
    ["lora"],
    ["bf16", "lora", "gradient-checkpointing"],
    ["adafactor"],
    ["chunked-cross-entropy"],
    ["optimizer-in-backward"],
    ["adamw-8bit"],
    ["bf16", "activation-offload"],
    ["bf16-pure"],
    ["optimizer-offload"],
    ["fp16", "activation-compression"],
    ["bf16", "qlora", "gradient-checkpointing"],
    ["bf16", "fp8"],
]


def main() -> None:
    """Runs everything that fits into the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--tiny", action="store_true", help="two tiny models, for a look at the script itself")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device is present. Fix: run on a machine that has one, or --device cpu --tiny")
    from thrifty.hardware.calibrate import calibrate, forget_calibration
    from thrifty.hardware.devices import detect_id
    from thrifty.planner.residuals import forget_residuals

    ends = time.monotonic() + 60 * options.minutes
    identity = "cpu" if options.device == "cpu" else detect_id(torch.cuda.get_device_name())
    out = options.out or HERE / "results" / f"gpu-{identity}.json"
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(), "device": identity, "machine": platform.platform(),
        "name": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor(),
        "versions": versions(), "cells": [],
    }  # fmt: skip
    models = TINY if options.tiny else MODELS
    cells = [(model, methods) for methods in METHODS for model in models]
    forget_calibration(identity)
    forget_residuals(identity)  # the bare prediction is examined
    if options.device == "cuda":
        result["tests"] = gpu_tests(20 * options.minutes)
    save(result, out)
    for model, methods in cells:
        if time.monotonic() > ends - 45:
            result["cells"].append({"model": name_of(model[0]), "methods": methods, "skipped": "no time was left"})
            continue
        result["cells"].append(cell(model, methods, identity, options.device))
        print(show(result["cells"][-1]), flush=True)
        save(result, out)
    calibrate(options.device, seconds=5 if options.tiny else 20)
    for entry in result["cells"]:
        again(entry, models, identity)
    result["summary"] = summary(result["cells"])
    save(result, out)
    print(json.dumps(result["summary"], indent=2))
    if result["summary"]["failed"]:
        raise SystemExit(1)


def cell(model: tuple[Any, str, int, dict[str, Any]], methods: list[Any], identity: str, device: str) -> dict[str, Any]:
    """Predicts and measures one cell."""
    from thrifty.errors import InputError
    from thrifty.planner.measure import measure
    from thrifty.planner.plan import estimate
    from thrifty.planner.workload import make_workload

    source, task, micro, more = model
    entry: dict[str, Any] = {"model": name_of(source), "task": task, "methods": methods, "micro_batch": micro, **more}
    try:
        workload = make_workload(source, task=task, methods=methods, **more)
        predicted = estimate(workload, device=identity, micro_batch=micro)
        took = measure(workload, micro_batch=micro, device=device)
    except InputError as refusal:
        return {**entry, "skipped": str(refusal)}
    except Exception as fault:
        # Time on a GPU is short: the cells after this one are still worth it.
        traceback.print_exc()
        return {**entry, "failed": f"{type(fault).__name__}: {fault}"}
    entry |= {
        "predicted_bytes": predicted.peak_allocated_bytes, "measured_bytes": took.peak_allocated_bytes,
        "predicted_reserved": predicted.peak_reserved_bytes, "measured_reserved": took.peak_reserved_bytes,
        "predicted_seconds": predicted.step_seconds, "measured_seconds": took.step_seconds,
        "out_of_memory": took.out_of_memory, "mfu": predicted.mfu,
    }  # fmt: skip
    if took.step_seconds is not None:
        entry["measured_mfu"] = predicted.mfu * predicted.step_seconds / took.step_seconds
    return entry


def again(entry: dict[str, Any], models: list[Any], identity: str) -> None:
    """Predicts the time of a measured cell with the calibrated profile."""
    from thrifty.planner.plan import estimate
    from thrifty.planner.workload import make_workload

    if not entry.get("measured_seconds"):
        return
    source, task, micro, more = next(m for m in models if name_of(m[0]) == entry["model"])
    workload = make_workload(source, task=task, methods=entry["methods"], **more)
    entry["calibrated_seconds"] = estimate(workload, device=identity, micro_batch=micro).step_seconds


def gpu_tests(seconds: float) -> dict[str, Any]:
    """The tests that are skipped without a GPU, for so long at most."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    try:
        done = subprocess.run(
            command, cwd=HERE.parent, capture_output=True, text=True, env={**os.environ}, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"passed": False, "last_lines": [f"not finished within {seconds:.0f} s"]}
    return {"passed": done.returncode == 0, "last_lines": (done.stdout + done.stderr).strip().splitlines()[-15:]}


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors over all measured cells: real over predicted, less one."""
    found: dict[str, Any] = {"cells": len(cells), "measured": sum(bool(c.get("measured_bytes")) for c in cells)}
    found["failed"] = sum("failed" in c for c in cells)
    pairs = {
        "memory": ("measured_bytes", "predicted_bytes"), "reserved": ("measured_reserved", "predicted_reserved"),
        "seconds": ("measured_seconds", "predicted_seconds"), "calibrated": ("measured_seconds", "calibrated_seconds"),
    }  # fmt: skip
    for name, (real, predicted) in pairs.items():
        errors = sorted(c[real] / c[predicted] - 1 for c in cells if c.get(real) and c.get(predicted))
        if errors:
            sizes = sorted(abs(e) for e in errors)
            found[name] = {
                "median": statistics.median(sizes), "p95": sizes[math.ceil(0.95 * len(sizes)) - 1],
                "most_underestimated": errors[-1], "most_overestimated": errors[0],
            }  # fmt: skip
    return found


def name_of(source: Any) -> str:
    """A model's name, or its type where it has none."""
    return source if isinstance(source, str) else source["model_type"]


def show(entry: dict[str, Any]) -> str:
    """One line."""
    what = f"{entry['model']:<18} {', '.join(map(str, entry['methods'])) or 'plain':<40}"
    if "skipped" in entry:
        return f"{what} skipped: {entry['skipped'][:90]}"
    if "failed" in entry:
        return f"{what} crashed: {entry['failed'][:90]}"
    if entry["out_of_memory"]:
        return f"{what} out of memory"
    memory = entry["measured_bytes"] / entry["predicted_bytes"] - 1
    seconds = entry["measured_seconds"] / entry["predicted_seconds"] - 1
    return f"{what} memory {memory:+6.1%}   time {seconds:+6.1%}"


def versions() -> dict[str, str]:
    """Of the libraries at work."""
    found = {}
    for name in ("torch", "transformers", "accelerate", "peft", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def save(result: dict[str, Any], path: Path) -> None:
    """Writes the file in one go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    main()
