"""Deep models: where does the plain one stop to train, and do ReZero and Fixup go on?

    python benchmarks/depth_sweep.py                # writes benchmarks/results/depth-sweep.json

The model is a decoder of BERT's blocks, which normalise after each residual addition, from scratch on the King James
text, at several depths. Everything but the initialisation is equal for all: learning rate, steps, order of the samples.
`trained` is a run whose validation loss falls clearly below that of the best model that ignores the context (the
entropy of single tokens): a network through which no signal passes gets down to there by its last bias alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARGIN = 0.1
"""Nats a token that a trained model is better than one that ignores the context."""
ARMS = {"plain": (), "rezero": ("rezero",), "fixup": ("fixup",)}
RUN: dict[str, Any] = {
    "task": "causal-lm",
    "model_config": {
        "model_type": "bert", "is_decoder": True, "hidden_size": 48, "intermediate_size": 192,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    },
    "embedded_corpus": "kjv",
    "vocab_size": 512,
    "max_length": 64,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 32,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.01,
    "adam_beta2": 0.95,
    "use_cpu": True,
}  # fmt: skip


def without_context(run: dict[str, Any], samples: int) -> float:
    """Validation loss, in nats a token, of the frequencies of single tokens in the training data."""
    import numpy as np

    from thrifty import tasks
    from thrifty.bench.measure import some
    from thrifty.config import parse_config

    config = parse_config({**run, "model_config": {**run["model_config"], "num_hidden_layers": 1}}, name="depth")
    loaded = tasks.load(
        config.task, config.data, model_config=config.model_config, vocab_size=config.vocab_size, seed=0
    )  # fmt: skip

    def counted(dataset: Any) -> Any:
        # The first token of a sample is given, not predicted.
        tokens = np.concatenate([np.asarray(row["input_ids"][1:]) for row in dataset])
        return np.bincount(tokens, minlength=loaded.model.config.vocab_size)

    seen, held = counted(loaded.data.train_dataset) + 1, counted(some(loaded.data.eval_dataset, samples))
    return float(-(held * np.log(seen / seen.sum())).sum() / held.sum())


def main(arguments: list[str] | None = None, *, runner: Any = None) -> int:
    """Trains every arm at every depth, and writes the result file."""
    from thrifty.bench.measure import Job
    from thrifty.bench.processes import FreshProcesses
    from thrifty.bench.result import circumstances
    from thrifty.report.files import to_json, write_atomic

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=128, help="validation samples")
    parser.add_argument("--learning-rate", type=float, default=RUN["learning_rate"])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", default=str(HERE / "results" / "depth-sweep.json"))
    given = parser.parse_args(arguments)
    run = {**RUN, "learning_rate": given.learning_rate, "max_steps": given.steps}
    begun, rows = time.monotonic(), []
    processes = runner or FreshProcesses()
    level = without_context(run, given.samples)
    print(f"without context: {level:.3f}", flush=True)
    for depth in given.depths:
        shape = {**run["model_config"], "num_hidden_layers": depth}
        for arm, methods in ARMS.items():
            losses, reasons = [], []
            for seed in range(given.seeds):
                found = processes.run(
                    Job(
                        kind="loss", arm=arm, run={**run, "model_config": shape}, methods=methods, seed=42 + seed,
                        steps=given.steps, evaluations=1, eval_samples=given.samples, threads=given.threads,
                    )
                )  # fmt: skip
                if found.crashed:
                    raise SystemExit(f"{arm} with {depth} layers: {found.reason}")
                # A guard that stops a run that is not finite has found that it does not train.
                losses += [found.curve[-1][3]] if found.reason is None else []
                reasons += [found.reason] if found.reason is not None else []
            trained = sum(loss < level - MARGIN for loss in losses)
            rows.append({"depth": depth, "arm": arm, "losses": losses, "reasons": reasons, "trained": trained})
            middle = f"{statistics.median(losses):.3f}" if losses else "-"
            print(f"{depth} layers, {arm}: {middle}, {trained} of {given.seeds} trained", flush=True)
    result = {
        "format": "thrifty-depth-sweep/1",
        "label": "measured",
        "name": "depth-sweep",
        **circumstances(given.threads),
        "run": run,
        "seeds": given.seeds,
        "steps": given.steps,
        "without_context": level,
        "margin": MARGIN,
        "seconds": round(time.monotonic() - begun, 1),
        "rows": rows,
    }
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(given.out, to_json(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.exit(main())
