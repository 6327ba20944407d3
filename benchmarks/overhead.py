"""What a trainer costs beside the arithmetic: a bare PyTorch loop, `transformers.Trainer` and `thrifty.Trainer`.

    python benchmarks/overhead.py            # writes benchmarks/results/overhead.json
    python benchmarks/overhead.py --quick    # short steps only; the exit code says whether the bounds hold

All three train the same Llama on the same batches with the same optimizer, schedule, clipping and logging interval.
They take turns in one process, a burst of steps each, in another order each round; a round gives one ratio and the
median over the rounds counts. A second set of ratios is that of the lower quartiles of single steps over all rounds,
which shows the steps that nothing disturbed. With one thread the clock is the processor time of the process, which on
an idle machine is the wall clock's and on a busy one leaves out what others took. Saving and evaluation are off, the
guards are on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, default_data_collator

import thrifty

WARM_UP = 3
SIZES: dict[str, dict[str, int]] = {
    "20 ms": {"hidden": 128, "layers": 4, "vocab": 512, "batch": 2, "length": 48, "steps": 40},
    "500 ms": {"hidden": 512, "layers": 8, "vocab": 2048, "batch": 2, "length": 112, "steps": 5},
}
"""Workloads by the time that a step of theirs takes on one core; the result file says what it took."""
BOUNDS = {"thrifty_over_transformers": 1.01, "thrifty_over_bare_500_ms": 1.01, "overhead_share": 1.0}
Stamps = list[tuple[float, float]]


def model_of(size: dict[str, int]) -> Any:
    """The model, always from the same seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=3 * size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=size["length"],
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def data_of(size: dict[str, int], steps: int) -> list[dict[str, torch.Tensor]]:
    """Samples for so many steps."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, size["vocab"], (steps * size["batch"], size["length"]), generator=generator)
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]


def now() -> tuple[float, float]:
    """Wall clock and processor time."""
    return time.perf_counter(), time.process_time()


def bare(size: dict[str, int], steps: int) -> Stamps:
    """The loop that somebody writes who wants the same: clipping, schedule, a log line every ten steps."""
    model = model_of(size).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)
    loader = DataLoader(data_of(size, steps), batch_size=size["batch"], shuffle=True, collate_fn=default_data_collator)  # type: ignore[arg-type]
    stamps, total = [], torch.zeros(())
    for number, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()
        if number % 10 == 0:
            json.dumps({"loss": total.item() / 10, "learning_rate": schedule.get_last_lr()[0], "step": number})
            total.zero_()
        stamps.append(now())
    return stamps


class Clock(TrainerCallback):
    """Notes when each step has ended."""

    def __init__(self) -> None:
        self.stamps: Stamps = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stamps.append(now())


def trained(cls: type[transformers.Trainer], size: dict[str, int], steps: int) -> Stamps:
    """The same by a trainer."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=size["batch"],
            max_steps=steps,
            learning_rate=1e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=False,
        )
        trainer = cls(model_of(size), args, train_dataset=data_of(size, steps), callbacks=[clock])  # type: ignore[arg-type]
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        if isinstance(trainer, thrifty.Trainer):
            trainer.say = lambda line: None
        trainer.train()
    return clock.stamps


ARMS: dict[str, Callable[[dict[str, int], int], Stamps]] = {
    "bare": bare,
    "transformers": lambda size, steps: trained(transformers.Trainer, size, steps),
    "thrifty": lambda size, steps: trained(thrifty.Trainer, size, steps),
}


def orders() -> Iterator[tuple[str, ...]]:
    """Every order of the arms in turn, so that none is always the first."""
    return itertools.cycle(itertools.permutations(ARMS))


def measure(name: str, size: dict[str, int], rounds: int, clock: int) -> dict[str, Any]:
    """Bursts in turn.

    Args:
        name: What the size is called.
        size: The workload.
        rounds: Bursts of each arm.
        clock: 0 for the wall, 1 for processor time.
    """
    means: dict[str, list[float]] = {arm: [] for arm in ARMS}
    single: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for order, _ in zip(orders(), range(rounds), strict=False):
        for arm in order:
            stamps = ARMS[arm](size, size["steps"] + WARM_UP)
            single[arm] += [b[clock] - a[clock] for a, b in itertools.pairwise(stamps[WARM_UP - 1 :])]
            means[arm].append((stamps[-1][clock] - stamps[WARM_UP - 1][clock]) / (len(stamps) - WARM_UP))

    def over(arm: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(means[arm], means[base], strict=True))

    def extra(arm: str) -> float:
        return statistics.median(1e3 * (a - b) for a, b in zip(means[arm], means["bare"], strict=True))

    calm = {arm: statistics.quantiles(steps, n=4)[0] for arm, steps in single.items()}
    return {
        "step": name,
        "size": size,
        "rounds": rounds,
        "step_milliseconds": {arm: 1e3 * statistics.median(found) for arm, found in means.items()},
        "all_milliseconds": {arm: [1e3 * value for value in found] for arm, found in means.items()},
        "transformers_over_bare": over("transformers", "bare"),
        "thrifty_over_bare": over("thrifty", "bare"),
        "thrifty_over_transformers": over("thrifty", "transformers"),
        "undisturbed_milliseconds": {arm: 1e3 * value for arm, value in calm.items()},
        "undisturbed": {
            "transformers_over_bare": calm["transformers"] / calm["bare"],
            "thrifty_over_bare": calm["thrifty"] / calm["bare"],
            "thrifty_over_transformers": calm["thrifty"] / calm["transformers"],
        },
        "extra_milliseconds": {arm: extra(arm) for arm in ("transformers", "thrifty")},
    }


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """The bounds that do not hold, one line each."""
    found = []
    for row in rows:
        if row["thrifty_over_transformers"] > BOUNDS["thrifty_over_transformers"]:
            found.append(f"{row['step']}: thrifty over transformers {row['thrifty_over_transformers']:.4f}")
        if row["step"] == "500 ms" and row["thrifty_over_bare"] > BOUNDS["thrifty_over_bare_500_ms"]:
            found.append(f"{row['step']}: thrifty over the bare loop {row['thrifty_over_bare']:.4f}")
        extra = row["extra_milliseconds"]
        if row["step"] == "20 ms" and extra["thrifty"] > BOUNDS["overhead_share"] * extra["transformers"]:
            found.append(f"{row['step']}: {extra['thrifty']:.2f} ms a step beside {extra['transformers']:.2f} ms")
    return found


def line_of(row: dict[str, Any]) -> str:
    """One size, for people."""
    parts = [f"{row['step']}: bare {row['step_milliseconds']['bare']:.2f} ms"]
    parts += [
        f"{arm} x{row[f'{arm}_over_bare']:.4f} ({row['extra_milliseconds'][arm]:+.2f} ms)"
        for arm in ("transformers", "thrifty")
    ]
    calm = row["undisturbed"]
    parts.append(f"thrifty over transformers x{row['thrifty_over_transformers']:.4f}")
    return ", ".join(parts) + "; undisturbed: " + ", ".join(f"{name} x{value:.4f}" for name, value in calm.items())


def main() -> int:
    """Measures, and writes the table unless `--quick`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=None, help="12 of the short steps, half as many of the long ones")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "overhead.json")
    args = parser.parse_args()
    from thrifty.bench.result import circumstances

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    rounds = args.rounds or (6 if args.quick else 12)
    clock = 1 if args.threads == 1 and not torch.accelerator.is_available() else 0
    rows = []
    for name, size in SIZES.items():
        if args.quick and name != "20 ms":
            continue
        rows.append(measure(name, size, rounds if name == "20 ms" else max(2, rounds // 2), clock))
        print(line_of(rows[-1]), flush=True)
    found = faults(rows)
    for line in found:
        print(f"out of bounds: {line}")
    if not args.quick:
        result = {
            "what": "time of a step by a bare loop, transformers.Trainer and thrifty.Trainer with an empty recipe",
            **circumstances(args.threads),
            "clock": ("wall", "processor time")[clock],
            "bounds": BOUNDS,
            "rows": rows,
            "out_of_bounds": found,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
