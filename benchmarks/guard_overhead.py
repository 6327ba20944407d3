"""What the guards themselves take of a real run's time: the sum over every entry into their code.

    python benchmarks/guard_overhead.py

An A/B of whole runs would drown a share of a per cent in noise. Here every method through which the trainer enters a
guard is wrapped by a stopwatch, and every method through which a guard goes on to transformers' own code stops it. The
run is the demo's: its model, its data, its batch. What happens once (start) or at a save is listed beside.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers

from thrifty.config import load_config
from thrifty.safety import checkpointing, lean, memory, oom, running, store, update

LIMIT = 0.01
HANDED_ON = (
    "training_step",
    "get_batch_samples",
    "compute_loss",
    "_prepare_inputs",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_maybe_log_save_evaluate",
)
"""Methods of transformers' Trainer that guards enter by, and where they hand over."""
ENTRIES: dict[type, tuple[str, ...]] = {
    checkpointing.SafeCheckpoints: HANDED_ON,
    memory.SafeMemory: HANDED_ON,
    running.SafeRunning: HANDED_ON,
    running.GuardEvents: ("on_pre_optimizer_step", "on_step_end"),
    oom.MicroBatcher: ("run", "begin_step"),
    update.UpdateGuard: ("run",),
}
OUTSIDE_THE_LOOP: dict[type, tuple[str, ...]] = {
    running.SafeRunning: ("ready",),
    store.CheckpointStore: ("_commit", "rotate"),
}


class Stopwatch:
    """Adds up the time in which a guard is at work, by entry, while others stand above it on the stack."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.stack: list[str | None] = []
        self.since = 0.0

    def switch(self) -> None:
        now = time.perf_counter()
        if self.stack and self.stack[-1] is not None:
            self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    def around(self, function: Any, name: str | None) -> Any:
        """Wraps a function: a guard's by its name, other code by None."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self.stack.append(name)
            if name is not None:
                self.calls[name] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self.stack.pop()

        return wrapped


def install(watch: Stopwatch) -> None:
    """Wraps the entries and the exits for the rest of this process."""
    for cls, names in (*ENTRIES.items(), *OUTSIDE_THE_LOOP.items()):
        for name in names:
            if name in vars(cls):
                setattr(cls, name, watch.around(vars(cls)[name], f"{cls.__name__}.{name}"))
    # What `LeanLoop` does in the parent's place is the parent's work.
    for cls in (transformers.Trainer, lean.LeanLoop):
        for name in HANDED_ON:
            if name in vars(cls):
                setattr(cls, name, watch.around(vars(cls)[name], None))
    for cls, place in ((oom.MicroBatcher, 2), (update.UpdateGuard, 1)):
        # Both are handed the function that does the work.
        inner = vars(cls)["run"]

        def run(*args: Any, inner: Any = inner, place: int = place) -> Any:
            return inner(*args[:place], watch.around(args[place], None), *args[place + 1 :])

        setattr(cls, "run", run)  # noqa: B010 - the class is a variable


def measure(steps: int, overrides: list[str]) -> dict[str, Any]:
    """Trains and returns the table."""
    from thrifty.hardware.detect import detect
    from thrifty.report.summary import versions
    from thrifty.run import train

    watch = Stopwatch()
    install(watch)
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    from thrifty.run.training import RunTrainer

    original = RunTrainer.events_before_guards
    RunTrainer.events_before_guards = lambda self: [Clock(), *original(self)]
    with tempfile.TemporaryDirectory() as folder:
        words = [f"max_steps={steps}", f"output_dir={folder}/run", "max_new_tokens=0", "save_strategy=no", *overrides]
        train(load_config(None, words))
    step_seconds = (times[-1] - times[0]) / (len(times) - 1)
    outside = {f"{cls.__name__}.{name}" for cls, names in OUTSIDE_THE_LOOP.items() for name in names}
    rows = [
        {
            "entry": name,
            "calls": watch.calls[name],
            "microseconds_a_step": round(1e6 * seconds / steps, 1),
            "share_of_step": seconds / steps / step_seconds,
        }
        for name, seconds in sorted(watch.seconds.items(), key=lambda item: -item[1])
        if name not in outside
    ]
    share = sum(row["share_of_step"] for row in rows)
    return {
        "what": "time in the guards' own code over a real run",
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "hardware": detect().lines(),
        "steps": steps,
        "overrides": overrides,
        "step_seconds": step_seconds,
        "rows": rows,
        "once_seconds": {name: watch.seconds[name] for name in sorted(outside) if watch.calls[name]},
        "share_of_step": share,
        "limit": LIMIT,
    }


def main() -> int:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    default = Path(__file__).parent / "results" / "guard-overhead.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("overrides", nargs="*", help="keys of the run, for example per_device_train_batch_size=4")
    args = parser.parse_args()
    result = measure(args.steps, args.overrides)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(f"{row['entry']:<45}{row['microseconds_a_step']:>9.1f} us{row['share_of_step']:>9.4%}")
    print(f"{result['share_of_step']:.3%} of a step of {result['step_seconds'] * 1e3:.0f} ms (limit {LIMIT:.0%})")
    return 0 if result["share_of_step"] < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
