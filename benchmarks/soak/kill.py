"""Kills training runs at random instants with SIGKILL, resumes them, and compares the result bit for bit.

    python benchmarks/soak/kill.py --kills 200 --out benchmarks/results/soak-kills.json

A second call with the same `--out` and another `--seed` adds its kills to those in the file.

Each recipe runs once without interruption. Then the same run is started again and again: every child is killed after
its first optimizer step, many of them while a checkpoint is being written, and the next child resumes from the newest
complete checkpoint. When a chain of kills comes to its end, weights and losses must equal those of the unbroken
run. Children are forked from a process that has imported everything, so that a kill costs a second, not ten.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import table  # sets the environment and the path of the next one
from transformers import TrainerCallback

import tiny
from thrifty.safety.store import CheckpointStore
from thrifty.trainer import Trainer  # noqa: F401 - before the children are forked

STEPS = 24
RECIPES: dict[str, list[Any]] = {
    "plain": [],
    "packing": ["packing"],
    "lora": [{"lora": {"r": 2}}],
    "layer-drop": [{"layer-drop": {"theta": 0.3, "gamma": 0.5}}],
    "stacking": [{"stacking": {"start_layers": 1, "boundaries": [0.3, 0.6]}}],
    "rigl": [{"rigl": {"sparsity": 0.5, "every": 3}}],
    "lawa": [{"lawa": {"window": 3, "every": 2}}],
    "selective-backprop": [{"selective-backprop": {"beta": 1.0, "history": 16}}],
    "stacking+rigl+lawa": [
        {"stacking": {"start_layers": 1, "boundaries": [0.3, 0.6]}},
        {"rigl": {"sparsity": 0.5, "every": 3}},
        {"lawa": {"window": 3, "every": 2}},
    ],
}


class Beacon(TrainerCallback):
    """Tells the parent that the first optimizer step of this child is done, and keeps steps slow enough to be hit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.path.touch()
        if state.global_step == STEPS:
            # A child killed after the last checkpoint would find nothing left to run, and say so.
            control.should_save = False
        time.sleep(0.02)


def child(folder: Path, recipe: list[Any], beacon: Path) -> None:
    """Trains to the end, resuming where there is something to resume from, and leaves a digest of the result."""
    sys.stdout = sys.stderr = open(folder / "log.txt", "a")  # noqa: SIM115
    run = tiny.trainer(
        folder,
        recipe,
        tiny.llama(layers=4, dropout=0.1),
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=3,
    )
    run.add_callback(Beacon(beacon))
    run.train(resume_from_checkpoint="auto")
    digest = hashlib.sha256()
    for name, value in sorted(tiny.weights(run.model).items()):
        digest.update(name.encode() + value.numpy().tobytes())
    (folder / "result.json").write_text(json.dumps({"weights": digest.hexdigest(), "losses": tiny.losses(run)}))


def start(folder: Path, recipe: list[Any], beacon: Path) -> int:
    beacon.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child(folder, recipe, beacon)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def ended(pid: int) -> int | None:
    """The exit status of a child that has ended, or None."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return None if done == 0 else status


def kill_once(
    folder: Path, recipe: list[Any], beacon: Path, rng: random.Random, in_save: bool
) -> dict[str, Any] | None:
    """Starts a child and kills it. Returns what was hit, or None where the child came to its end first."""
    pid = start(folder, recipe, beacon)
    while not beacon.exists():
        if (status := ended(pid)) is not None:
            return _finished(status, folder)
        time.sleep(0.001)
    if in_save:
        waiting = rng.randint(0, 4)  # saves to let pass
        seen: set[str] = set()
        while True:
            staged = {path.name for path in folder.glob(".tmp-checkpoint-*")}
            seen |= staged
            if staged and len(seen) > waiting:
                time.sleep(rng.uniform(0, 0.01))
                break
            if (status := ended(pid)) is not None:
                return _finished(status, folder)
    else:
        end = time.monotonic() + rng.uniform(0, 0.6)
        while time.monotonic() < end:
            if (status := ended(pid)) is not None:
                return _finished(status, folder)
            time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    hit = any(folder.glob(".tmp-checkpoint-*")) or any(folder.glob(".old-*")) or any(folder.glob(".del-*"))
    newest = CheckpointStore(folder, read_only=True).newest_complete()
    if newest.skipped:
        raise SystemExit(f"{folder}: a kill left something that looks like a checkpoint: {newest.skipped}")
    return {"inside_save": hit, "newest": newest.path.name if newest.path else None}


def _finished(status: int, folder: Path) -> None:
    if status != 0:
        raise SystemExit(f"a run failed:\n{(folder / 'log.txt').read_text()[-3000:]}")


def soak(name: str, recipe: list[Any], kills: int, root: Path, rng: random.Random) -> dict[str, Any]:
    """Kills one recipe `kills` times, in as many chains as it takes, and compares each chain's end."""
    reference = root / name / "unbroken"
    reference.mkdir(parents=True)
    pid = start(reference, recipe, root / name / "beacon")
    _finished(os.waitpid(pid, 0)[1], reference)
    expected = json.loads((reference / "result.json").read_text())
    done, inside, chains, exact = 0, 0, 0, 0
    while done < kills:
        chain = root / name / f"chain-{chains}"
        chain.mkdir()
        here = 0
        while not (chain / "result.json").exists():
            # A child is left alone once the kills are used up, or after 12, so that chains end.
            if done < kills and here < 12:
                hit = kill_once(chain, recipe, root / name / "beacon", rng, in_save=done % 3 == 0)
                if hit is not None:
                    done, here, inside = done + 1, here + 1, inside + hit["inside_save"]
            else:
                _finished(os.waitpid(start(chain, recipe, root / name / "beacon"), 0)[1], chain)
        chains += 1
        exact += here if json.loads((chain / "result.json").read_text()) == expected else 0
        shutil.rmtree(chain)
    return {"recipe": name, "kills": done, "inside_a_save": inside, "chains": chains, "resumed_bit_exactly": exact}


def earlier(path: Path | None) -> dict[str, Any]:
    """The table that lies there, to be added to."""
    if path is None or not path.exists():
        return {"rows": [], "seeds": [], "seconds": 0.0}
    found = json.loads(path.read_text())
    return {"rows": found["rows"], "seeds": found.get("seeds", [found.get("seed")]), "seconds": found["seconds"]}


def added(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a recipe: the counts of both."""
    rows = {row["recipe"]: dict(row) for row in old}
    for row in new:
        before = rows.get(row["recipe"], {})
        rows[row["recipe"]] = {
            key: value if isinstance(value, str) else value + before.get(key, 0) for key, value in row.items()
        }
    return list(rows.values())


def main(arguments: list[str] | None = None) -> int:
    """Runs the soak and writes its table."""
    parser = table.parser(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    rng = random.Random(args.seed)
    share = -(-args.kills // len(RECIPES))
    before = earlier(args.out)
    if args.seed in before["seeds"]:
        parser.error(f"{args.out} holds the kills of seed {args.seed} already: choose another --seed")
    rows: list[dict[str, Any]] = []
    total: dict[str, int] = {}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        for name, recipe in RECIPES.items():
            rows.append(soak(name, recipe, share, Path(root), rng))
            print(json.dumps(rows[-1]), flush=True)
            # After every recipe, so that a soak that is stopped leaves what it has shown.
            whole = added(before["rows"], rows)
            total = {key: sum(row[key] for row in whole) for key in ("kills", "inside_a_save", "resumed_bit_exactly")}
            seconds = round(before["seconds"] + time.monotonic() - begin, 1)
            what = "SIGKILL at random instants, resume, compare bit for bit"
            table.write(args.out, what, whole, total, seeds=[*before["seeds"], args.seed], seconds=seconds)
    good = total["kills"] == total["resumed_bit_exactly"] and total["inside_a_save"] * 4 >= total["kills"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
