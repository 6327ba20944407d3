"""How much of the processor's rate training reaches: a bare eager loop, the planned configuration, and with `compile`.

    python benchmarks/utilisation.py            # writes benchmarks/results/utilisation.json
    python benchmarks/utilisation.py --quick    # a small model; the exit code says whether the plan is not slower

A Llama of 50 M parameters. *bare* is a PyTorch loop in fp32 with fused AdamW, clipping and SDPA attention, as the
library gives it. *planned* is what `plan: auto` chooses for this machine without leave to change the mathematics;
*compiled* adds `compile` to that, whose first steps (compilation) are not counted but listed; *planned with bf16* is
what is chosen where bf16 is allowed, on a processor that has units for it. They take turns, a burst each, in another
order each round. The rate of a matrix product of the model's own shape is measured beside every burst;
the share is the model's operations (six for each parameter outside the embeddings and each token) over that rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, default_data_collator

import thrifty
from thrifty.hardware.calibrate import calibrate
from thrifty.hardware.detect import detect

GOAL = 1.1
WARM_UP = 1
FULL = {"hidden": 640, "layers": 8, "vocab": 8192, "batch": 4, "length": 128, "steps": 2}
SMALL = {"hidden": 128, "layers": 2, "vocab": 4096, "batch": 4, "length": 128, "steps": 4}


def config_of(size: dict[str, int]) -> dict[str, Any]:
    """The model, as a run file names it."""
    return {
        "model_type": "llama",
        "vocab_size": size["vocab"],
        "hidden_size": size["hidden"],
        "intermediate_size": 8 * size["hidden"] // 3 // 64 * 64,
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["hidden"] // 64,
        "num_key_value_heads": size["hidden"] // 64,
        "max_position_embeddings": size["length"],
        "use_cache": False,
    }


def planned(size: dict[str, int], allow: Sequence[str] = ()) -> tuple[list[Any], int, list[str]]:
    """Methods and micro-batch that `plan: auto` chooses with this leave, and what it says."""
    from thrifty.config.run_config import parse_config
    from thrifty.planner.plan import plan
    from thrifty.planner.workload import workload_from_run

    run = parse_config(
        {
            "task": "causal-lm",
            "model_config": config_of(size),
            "embedded_corpus": "kjv",
            "max_length": size["length"],
            "vocab_size": size["vocab"],
            "optim": "adamw_torch_fused",
        }
    )
    found = plan(workload_from_run(run), device="cpu", global_batch=size["batch"], allow=allow)
    keys = found.run_keys()
    return keys["methods"], int(keys["per_device_train_batch_size"]), list(found.explanation)


def gemm_rate(size: dict[str, int]) -> float:
    """Operations per second of a product of the model's shape, the best of several."""
    rows, hidden = size["batch"] * size["length"], size["hidden"]
    a, b = torch.randn(rows, hidden), torch.randn(hidden, 8 * hidden // 3)
    best = float("inf")
    for _ in range(12):
        begin = time.process_time()
        a @ b
        best = min(best, time.process_time() - begin)
    return 2 * rows * hidden * b.shape[1] / best


class Arm:
    """A model in training that does a burst of steps when it is asked to."""

    def __init__(self, size: dict[str, int]) -> None:
        self.size = size

    def new_model(self) -> Any:
        torch.manual_seed(0)
        values = dict(config_of(self.size))
        values.pop("model_type")
        return LlamaForCausalLM(LlamaConfig(**values))

    def rows(self, steps: int) -> list[dict[str, torch.Tensor]]:
        ids = torch.randint(3, self.size["vocab"], (steps * self.size["batch"], self.size["length"]))
        return [{"input_ids": row, "labels": row} for row in ids]

    def burst(self) -> tuple[float, float]:
        """Seconds of a step, and those of the steps before that were not counted."""
        raise NotImplementedError


class Bare(Arm):
    def __init__(self, size: dict[str, int]) -> None:
        super().__init__(size)
        self.model = self.new_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def burst(self) -> tuple[float, float]:
        self.model.train()
        stamps = [time.process_time()]
        data, batch = self.rows(WARM_UP + self.size["steps"]), self.size["batch"]
        for begin in range(0, len(data), batch):
            loss = self.model(**default_data_collator(data[begin : begin + batch])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            stamps.append(time.process_time())
        return per_step(stamps)


class Trained(Arm):
    """`thrifty.Trainer` with a recipe."""

    def __init__(self, size: dict[str, int], methods: list[Any], micro_batch: int) -> None:
        super().__init__(size)
        self.methods, self.micro_batch = methods, micro_batch

    def burst(self) -> tuple[float, float]:
        stamps: list[float] = []

        class Clock(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if not stamps:
                    stamps.append(time.process_time())

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                stamps.append(time.process_time())

        steps = WARM_UP + self.size["steps"]
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder,
                per_device_train_batch_size=self.micro_batch,
                gradient_accumulation_steps=self.size["batch"] // self.micro_batch,
                max_steps=steps,
                learning_rate=1e-4,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
                use_cpu=True,
            )
            data: Any = self.rows(steps)
            # A new model each time: methods change it in place.
            trainer = thrifty.Trainer(
                self.new_model(), args, train_dataset=data, methods=self.methods, callbacks=[Clock()], task="causal-lm"
            )
            trainer.say = lambda line: None
            trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
            trainer.train()
        return per_step(stamps)


def per_step(stamps: list[float]) -> tuple[float, float]:
    """Mean seconds of the counted steps, and the sum of the first ones."""
    counted = stamps[WARM_UP:]
    return (counted[-1] - counted[0]) / (len(counted) - 1), counted[0] - stamps[0]


def measure(size: dict[str, int], rounds: int, compiled: bool) -> dict[str, Any]:
    """Bursts in turn, and the shares."""
    methods, micro_batch, explanation = planned(size)
    chosen: dict[str, Any] = {"planned": methods, "micro_batch": micro_batch}
    bare = Bare(size)
    arms: dict[str, Arm] = {"bare": bare, "planned": Trained(size, methods, micro_batch)}
    if compiled:
        arms["compiled"] = Trained(size, [*methods, "compile"], micro_batch)
        if detect(use_cpu=True).bf16:
            halved, micro, more = planned(size, ["bf16"])
            arms["planned with bf16"] = Trained(size, halved, micro)
            chosen["planned with bf16"], explanation = halved, [*explanation, *more]
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    first: dict[str, list[float]] = {name: [] for name in arms}
    rates = []
    for number in range(rounds):
        names = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
        for name in names:
            rates.append(gemm_rate(size))
            step, warm_up = arms[name].burst()
            seconds[name].append(step)
            first[name].append(warm_up)
            print(f"{name}: {step:.3f} s a step ({warm_up:.1f} s before), {rates[-1] / 1e9:.1f} GFLOP/s", flush=True)
    model = bare.model
    parameters = sum(p.numel() for p in model.parameters())
    flops = 6 * model.num_parameters(exclude_embeddings=True) * size["batch"] * size["length"]
    rate = statistics.median(rates)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "size": size,
        "parameters": parameters,
        "rounds": rounds,
        "methods": chosen,
        "explanation": explanation,
        "step_seconds": median,
        "all_seconds": seconds,
        "first_steps_seconds": first,
        "gemm_flops_per_second": rate,
        "share_of_gemm_rate": {name: flops / value / rate for name, value in median.items()},
        "speed_over_bare": {
            name: statistics.median(a / b for a, b in zip(seconds["bare"], values, strict=True))
            for name, values in seconds.items()
        },
    }


def main() -> int:
    """Measures, and writes the table unless `--quick`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "utilisation.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        if not args.quick:  # what is planned rests on what this machine can do, and not on a data sheet
            os.environ["THRIFTY_CACHE"] = folder
            calibrate("cpu")
        found = measure(SMALL if args.quick else FULL, args.rounds, not args.quick and not args.no_compile)
    for name, speed in found["speed_over_bare"].items():
        share = found["share_of_gemm_rate"][name]
        print(f"{name}: x{speed:.3f} of the bare loop's speed, {share:.1%} of the rate of matrix products")
    best = max(found["speed_over_bare"].values())
    good = found["speed_over_bare"]["planned"] >= 0.97 if args.quick else best >= GOAL
    if not args.quick:
        from thrifty.bench.result import circumstances

        what = "speed and utilisation of a bare eager loop and of what is planned, on a processor"
        result = {"what": what, **circumstances(args.threads), "clock": "processor time", "goal": GOAL, **found}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**result, "good": good}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
