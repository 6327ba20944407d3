"""Real pressure on memory: an address-space limit under which torch's own allocator refuses, through the whole trainer.

    python benchmarks/soak/pressure.py --out benchmarks/results/soak-pressure.json

Each row trains in a fresh process (a forked one would inherit a heap full of holes) with `RLIMIT_AS` set some MiB above
what the process holds, and compares with the same run without a limit, whose micro-batch was small from the start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import table  # sets the environment

ROOM = (64, 48, 32, 24)
"""MiB above what the process holds when training begins."""

CHILD = """
import contextlib, io, json, resource, sys, tempfile
import torch, transformers
import tiny
from transformers import TrainerCallback

job = json.loads(sys.argv[1])
torch.set_num_threads(1)
samples = []
g = torch.Generator().manual_seed(0)
for index in range(64):
    ids = torch.randint(3, 4000, (128,), generator=g).tolist()
    samples.append({"input_ids": ids, "labels": ids, "sample_id": index})


class Limit(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and job["room"]:
            size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + (job["room"] << 20),) * 2)


def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.LlamaConfig(vocab_size=4000, max_position_embeddings=256, num_key_value_heads=4, **sizes)
    return transformers.LlamaForCausalLM(config)


told = io.StringIO()
with contextlib.redirect_stdout(told), tempfile.TemporaryDirectory() as folder:
    run = tiny.trainer(folder, [], model(), samples, max_steps=4, learning_rate=1e-3, **job["settings"])
    run.guards.trial_step = False  # it would have found the limit before it is there
    run.add_callback(Limit())
    error = ""
    try:
        run.train()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
lines = [line for line in told.getvalue().splitlines() if "out of memory" in line]
torch.save(tiny.weights(run.model), job["out"])
print("ANSWER " + json.dumps({"losses": tiny.losses(run), "said": lines, "error": error}))
"""


def train(out: Path, room: int, rows: int, accumulation: int) -> dict[str, Any]:
    """Runs one child; its weights go to `out`."""
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    job = json.dumps({"out": str(out), "room": room, "settings": settings})
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, job], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    answer = next((line for line in done.stdout.splitlines() if line.startswith("ANSWER ")), None)
    if answer is None:
        return {"losses": [], "said": [], "error": f"died with {done.returncode}: {done.stderr[-800:]}"}
    return json.loads(answer.removeprefix("ANSWER "))


def soak(folder: Path, rooms: tuple[int, ...] = ROOM) -> list[dict[str, Any]]:
    """Runs the reference and every limit."""
    import torch

    reference = train(folder / "reference.pt", 0, 2, 16)
    expected = torch.load(folder / "reference.pt", weights_only=True)
    rows = []
    for room in rooms:
        answer = train(folder / "struck.pt", room, 32, 1)
        worst = losses = float("inf")
        if not answer["error"]:
            got = torch.load(folder / "struck.pt", weights_only=True)
            worst = max(float((expected[name] - got[name]).abs().max()) for name in expected)
            losses = max(abs(a - b) for a, b in zip(reference["losses"], answer["losses"], strict=True))
        row = {"room_mib": room, "said": answer["said"], "error": answer["error"]}
        row |= {"largest_difference_of_a_weight": worst, "largest_difference_of_a_loss": losses}
        rows.append({**row, "recovered": bool(answer["said"]), "equal": worst <= 1e-4 and losses <= 1e-4})
        print(rows[-1], flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Runs the soak and writes its table."""
    import tempfile

    args = table.parser(__doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = soak(Path(folder))
    total = {"limits": len(rows), "recovered": sum(row["recovered"] for row in rows)}
    total["equal"] = sum(row["equal"] for row in rows)
    table.write(args.out, "address-space limits through the trainer", rows, total)
    return 0 if total["equal"] == total["limits"] and total["recovered"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
