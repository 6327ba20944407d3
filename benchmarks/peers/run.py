"""The same model, data and global batch in thrifty, plain transformers.Trainer, TRL and LitGPT: the table of ratios.

    python benchmarks/peers/run.py                       # makes the environments, measures, writes the result file
    python benchmarks/peers/run.py --only trainer trl    # some of them
    python benchmarks/peers/run.py --rounds 7 --steps 120

Each peer has a virtual environment of its own with pinned versions (`requirements-*.txt`). All start from the same
weights, see the same samples in the same order, and have AdamW with a cosine schedule that decays to zero. The tools
run one after the other in every round, every other round backwards; each run is a process of its own. The first steps
are left out and reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WARM_UP = 3
BASE = "trainer"
PEERS = {
    "trainer": "plain transformers.Trainer",
    "thrifty": "thrifty.Trainer, no methods",
    "trl": "TRL SFTTrainer",
    "litgpt": "LitGPT pretrain",
}


def interpreter(peer: str, folder: Path) -> str:
    """The Python of a peer's environment, which is made where missing."""
    if peer == "thrifty":
        return sys.executable
    home = folder / peer
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = home / ".installed"
    wanted = (HERE / f"requirements-{peer}.txt").read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making the environment of {peer} in {home}", flush=True)
        venv.create(home, with_pip=True, clear=True)
        requirements = str(HERE / f"requirements-{peer}.txt")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", requirements], check=True)
        stamp.write_text(wanted)
    return str(python)


def prepare(folder: Path, seq_len: int, count: int, seed: int, overrides: list[str]) -> dict[str, str]:
    """Writes the common model and data: a small Llama and blocks of the embedded text, all of one length."""
    from thrifty import tasks
    from thrifty.bench.options import read_values
    from thrifty.config import parse_config

    values = {
        "model_config": {
            "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        },
        "embedded_corpus": "kjv", "vocab_size": 1024, "max_length": seq_len,
    }  # fmt: skip
    config = parse_config(read_values(values, overrides)[0])
    loaded = tasks.load(
        config.task, config.data, model_config=config.model_config, vocab_size=config.vocab_size, seed=seed
    )
    loaded.model.save_pretrained(folder / "model")
    loaded.processor.save_pretrained(folder / "model")

    def rows(dataset: Any, most: int) -> list[list[int]]:
        found = [row["input_ids"] for row in dataset if len(row["input_ids"]) == seq_len]
        return [list(map(int, row)) for row in found[:most]]

    data = {"train": rows(loaded.data.train_dataset, count), "validation": rows(loaded.data.eval_dataset, 64)}
    if len(data["train"]) < count:
        raise SystemExit(f"the text has {len(data['train'])} samples of {seq_len} tokens, {count} are needed")
    (folder / "data.json").write_text(json.dumps(data))
    return {"model": str(folder / "model"), "data": str(folder / "data.json")}


def measure(peer: str, python: str, spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run of one peer."""
    (folder / "spec.json").write_text(json.dumps(spec))
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    script = str(HERE / f"peer_{peer}.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if peer != "thrifty":
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, script, str(folder / "spec.json"), str(out)], capture_output=True, text=True, env=environment,
        check=False,
    )  # fmt: skip
    if done.returncode != 0 or not out.exists():
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        return {"reason": f"exit code {done.returncode}: {' '.join(last)}"}
    return json.loads(out.read_text())


def table(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the rounds say: step time, ratio to the plain Trainer with its interval, loss."""
    from thrifty.bench.statistics import ratio, typical, verdict

    def paces(peer: str) -> list[float]:
        return [typical(run["seconds"][WARM_UP:]) for run in runs[peer] if "seconds" in run]

    found = {}
    for peer, made in runs.items():
        broken = next((run["reason"] for run in made if "reason" in run), None)
        entry: dict[str, Any] = {"what": PEERS[peer], "reason": broken}
        if broken is None:
            steps = paces(peer)
            slower = ratio(steps, paces(BASE)) if peer != BASE and len(paces(BASE)) == len(steps) else None
            extra = [sum(run["seconds"][:WARM_UP]) - WARM_UP * pace for run, pace in zip(made, steps, strict=True)]
            entry |= {
                "versions": made[0]["versions"],
                "step_seconds": statistics.median(steps),
                "tokens_per_second": made[0]["tokens_per_step"] / statistics.median(steps),
                "step_ratio": slower.to_dict() if slower else None,
                "verdict": verdict(slower) if slower else None,
                "start_seconds": statistics.median(run["start_seconds"] for run in made),
                "warm_up_extra_seconds": statistics.median(extra),
                "loss": statistics.median(run["loss"] for run in made),
            }
        found[peer] = entry
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes the result file."""
    from thrifty.bench.publish import publish
    from thrifty.bench.result import circumstances

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--environments", default=str(HERE / ".environments"))
    parser.add_argument("--out", default=str(HERE.parent / "results"))
    parser.add_argument("--set", nargs="*", default=[], help="keys of the common run file")
    given = parser.parse_args(arguments)
    chosen = [peer for peer in PEERS if peer in {*given.only, BASE}]
    pythons = {peer: interpreter(peer, Path(given.environments)) for peer in chosen}
    runs: dict[str, list[dict[str, Any]]] = {peer: [] for peer in chosen}
    with tempfile.TemporaryDirectory(prefix="thrifty-peers-") as name:
        folder = Path(name)
        count = given.steps * given.micro_batch * given.accumulation
        common = prepare(folder, given.seq_len, count, 1, given.set)
        spec = {
            **common, "steps": given.steps, "micro_batch": given.micro_batch, "accumulation": given.accumulation,
            "seq_len": given.seq_len, "learning_rate": 1e-3, "threads": given.threads, "seed": 1,
        }  # fmt: skip
        for number in range(given.rounds):
            for peer in chosen if number % 2 == 0 else chosen[::-1]:
                found = measure(peer, pythons[peer], spec, folder)
                runs[peer].append(found)
                said = found.get("reason") or f"loss {found['loss']:.4f}"
                print(f"round {number + 1}/{given.rounds}  {peer}: {said}", flush=True)
    kept = ("steps", "micro_batch", "accumulation", "seq_len", "learning_rate")
    result = {
        "format": "thrifty-peers/1",
        "label": "measured",
        "name": "peers",
        **circumstances(given.threads),
        "task": {key: spec[key] for key in kept},
        "rounds": given.rounds,
        "peers": table(runs),
    }
    for peer, entry in result["peers"].items():
        if entry["reason"] is not None:
            print(f"{peer}: {entry['reason']}")
        else:
            against = entry["step_ratio"]["median"] if entry["step_ratio"] else 1.0
            print(f"{peer:<8} {1000 * entry['step_seconds']:.1f} ms a step, x{against:.3f}, loss {entry['loss']:.4f}")
    print(f"written: {publish(result, given.out)}")
    return 1 if any(entry["reason"] for entry in result["peers"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
