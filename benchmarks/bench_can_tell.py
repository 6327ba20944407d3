"""Can the bench tell? Pairs without a difference, and a planted slow-down of 10 %, many times over.

    python benchmarks/bench_can_tell.py             # 20 repeats, writes benchmarks/results/bench-can-tell.json

Each repeat is a bench of its own: rounds in fresh processes, the baseline twice a round, and two rows: the baseline
once more, to be called `no difference` in at least 19 of 20 repeats, and the baseline with a method that wastes a tenth
of every step's time, to be called `slower` in at least 18 of 20.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thrifty.method import Method, register

HERE = Path(__file__).parent
SLOWER_BY = 0.10
SMALL = {
    "model_config.hidden_size": "64",
    "model_config.intermediate_size": "176",
    "model_config.num_hidden_layers": "2",
    "max_length": "64",
    "per_device_train_batch_size": "8",
    "vocab_size": "512",
}


# Registered when this file is imported, so also in the processes that the bench starts.
@register("planted-slow-down", title="A planted slow-down", section="optimizers", exact=True)
@dataclass(kw_only=True)
class PlantedSlowDown(Method):
    """Wastes a share of every step's time."""

    by: float = SLOWER_BY
    """Share of the step's own time."""

    begun: float = field(default=0.0, init=False, repr=False)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        now = time.perf_counter()
        until = now + self.by * (now - self.begun)
        while time.perf_counter() < until:
            pass


def repeat(
    number: int, *, by: float, rounds: int, threads: int | None, overrides: tuple[str, ...], runner: Any
) -> dict[str, Any]:
    """One bench: what it says of the pair and of the planted row."""
    from thrifty.bench.options import Options, read_run
    from thrifty.bench.result import result_of
    from thrifty.bench.rows import BASELINE, Arm
    from thrifty.bench.session import Session

    run, _, name = read_run(None, overrides)
    run["seed"] = 42 + 100 * number
    options = Options(run=run, name=name, minutes=None, rounds=rounds, quality=False, threads=threads)
    arms = [Arm(BASELINE), Arm("same again"), Arm("planted", ({"planted-slow-down": {"by": by}},))]
    with tempfile.TemporaryDirectory(prefix="thrifty-can-tell-") as folder:
        session = Session(options, Path(folder), runner=runner, arms=arms, memory=False)
        session.run()
        if session.interrupted:
            raise KeyboardInterrupt
        found = result_of(session)["arms"]
    shown = ("same again", "planted")
    return {name: {"verdict": found[name]["verdict"], "speed": found[name]["speed"]} for name in shown}


def main(arguments: list[str] | None = None, *, runner: Any = None) -> int:
    """Repeats, writes the result file, and returns 0 where the bench can tell."""
    from thrifty.bench.result import circumstances
    from thrifty.report.files import to_json, write_atomic

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--planted", type=float, default=SLOWER_BY, help="share of a step's time")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", default=str(HERE / "results" / "bench-can-tell.json"))
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_args(arguments)
    keys = SMALL | dict(override.split("=", 1) for override in given.overrides)
    begun, rows = time.monotonic(), []
    for number in range(given.repeats):
        found = repeat(
            number, by=given.planted, rounds=given.rounds, threads=given.threads,
            overrides=tuple(f"{key}={value}" for key, value in keys.items()), runner=runner,
        )  # fmt: skip
        rows.append(found)
        said = ", ".join(f"{name}: {row['verdict']} (x{row['speed']['median']:.3f})" for name, row in found.items())
        print(f"{number + 1}/{given.repeats}  {said}", flush=True)
    right = {
        "same_called_no_difference": sum(row["same again"]["verdict"] == "no difference" for row in rows),
        "planted_called_slower": sum(row["planted"]["verdict"] == "slower" for row in rows),
    }
    result = {
        "format": "thrifty-bench-can-tell/1",
        "label": "measured",
        "name": "bench-can-tell",
        **circumstances(given.threads),
        "planted": given.planted,
        "repeats": given.repeats,
        "rounds": given.rounds,
        "seconds": round(time.monotonic() - begun, 1),
        **right,
        "rows": rows,
    }
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(given.out, to_json(result, indent=1) + "\n")
    print(f"{right} of {given.repeats}; {given.out}")
    enough = right["same_called_no_difference"] >= 0.95 * given.repeats
    return 0 if enough and right["planted_called_slower"] >= 0.9 * given.repeats else 1


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.exit(main())
