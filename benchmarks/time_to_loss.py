"""Time to a loss, from scratch: the recipe `pretrain-small` against nanoGPT's recipe for a CPU in a bare loop.

    python benchmarks/time_to_loss.py              # three seeds; writes benchmarks/results/time-to-loss.json
    python benchmarks/time_to_loss.py --quick      # one seed, about a quarter of the steps: a check of the ratio alone

Both sides train a Llama of as many parameters on the same characters, on as many threads, eager. Its shape is part of
a recipe: the baseline has nanoGPT's (4 layers, 4 heads, width 128), `pretrain-small` its own.

- *Baseline*: that shape, context 64, batch 12, 2,000 steps, fused AdamW with 1e-3 falling to 1e-4 by a cosine after 100
  steps, beta2 0.99, decay 0.1, gradients clipped at 1.0, weights drawn as there, random windows of the text. It is
  evaluated eight times; its lowest validation loss is the target, and the time until there is its time.
- *thrifty*: `thrifty train` with the recipe, in this process: the time from the beginning of training to its end, with
  every callback, guard and method. It counts when the model that it leaves is at the target or below.
- *Evaluator*: one function for both, over 1,000 windows of 64 characters, spread over the validation text. Its time
  counts for nobody, nor does the preparation of the data, which both share.

The sides run in turns of some seconds, in one process, each on a clock of its own. `--work` keeps what is
done, so that a broken measurement goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from thrifty import recipes, tasks
from thrifty.bench.result import circumstances
from thrifty.config import RunConfig, load_config, yaml_text
from thrifty.run import training
from thrifty.tasks.models import seeded

HERE = Path(__file__).parent
RECIPE = Path(recipes.__file__).parent / "pretrain-small.yaml"
LIMIT, QUICK_LIMIT = 0.25, 0.33
"""The share of the baseline's time that the recipe may take."""
QUICK_SHARE = 0.26
"""Of the recipe's steps with `--quick`; the baseline makes a quarter of its own. The rates of both were chosen for
whole runs, and the recipe's suffer more from a short one."""
OURS = ["eval_strategy=no", "save_strategy=no", "max_new_tokens=0"]
"""What is not training is left out on both sides."""
WINDOWS = 1000
"""Of the validation text, spread over all of it."""
BURST = 50
"""Steps of the baseline at a time: both sides run in turns, so that a busy machine is as busy for both."""


SHAPE = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 344,
}  # fmt: skip
"""Of the baseline's model: nanoGPT's, whose MLP without a gate has as many parameters at 512."""


@dataclasses.dataclass(frozen=True)
class Bare:
    """nanoGPT's settings for a CPU (config/train_shakespeare_char.py and the flags that its README gives for it)."""

    steps: int = 2000
    batch: int = 12
    context: int = 64
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluations: int = 8

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then half a cosine."""
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        share = (step - self.warmup) / (self.steps - self.warmup)
        return self.min_lr + 0.5 * (1 + math.cos(math.pi * share)) * (self.lr - self.min_lr)


@dataclasses.dataclass
class Workload:
    """What both sides share."""

    config: RunConfig
    baseline_model: Any
    """Configuration of the baseline's model: the recipe's, in nanoGPT's shape."""
    train: Tensor
    """The training text as one row of token ids."""
    windows: Tensor
    """Validation windows, (windows, context + 1), none of which overlap."""


def workload(config: RunConfig, context: int) -> Workload:
    """Tokenises as the recipe does."""
    loaded = tasks.load(
        config.task, config.data, model_config=config.model_config, vocab_size=config.vocab_size, seed=config.data.seed
    )
    train, held = (stream(part) for part in (loaded.data.train_dataset, loaded.data.eval_dataset))
    count = (len(held) - 1) // context
    spread = [i * count // WINDOWS for i in range(WINDOWS)] if count > WINDOWS else range(count)
    windows = torch.stack([held[i * context : (i + 1) * context + 1] for i in spread])
    shape = transformers.AutoConfig.for_model(**{**loaded.model.config.to_dict(), **SHAPE, "head_dim": None})
    return Workload(config, shape, train, windows)


def stream(dataset: Any) -> Tensor:
    """The text of a data set of blocks that overlap by one token."""
    rows = dataset.with_format("numpy")["input_ids"]
    return torch.cat([torch.as_tensor(row[:-1].astype("int64")) for row in rows])


@torch.no_grad()
def validation_loss(model: nn.Module, windows: Tensor) -> float:
    """Nats a token over all windows."""
    was_training = model.training
    model.eval()
    total = 0.0
    for part in windows.split(128):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    model.train(was_training)
    return total / windows[:, 1:].numel()


class Clock:
    """Wall and processor time, in parts."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.wall += time.perf_counter() - self._wall
        self.cpu += time.process_time() - self._cpu


def draw_as_nanogpt(model: nn.Module) -> None:
    """Normal weights of 0.02, those that end a branch smaller by the root of the number of branches; gains of one."""
    layers = model.config.num_hidden_layers  # type: ignore[union-attr]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                ends = name.endswith(("o_proj.weight", "down_proj.weight"))
                p.normal_(0.0, 0.02 / math.sqrt(2 * layers) if ends else 0.02)


def bare_loop(shared: Workload, recipe: Bare, seed: int) -> Iterator[None]:
    """Trains by nanoGPT's recipe, as plainly and as fast as eager PyTorch goes.

    A generator: it pauses, its clock stopped, after every `BURST` steps, and returns what it found.
    """
    with seeded(seed):
        model = transformers.AutoModelForCausalLM.from_config(shared.baseline_model, attn_implementation="sdpa")
        draw_as_nanogpt(model)
    model.train()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(recipe.context + 1)
    clock, curve = Clock(), []
    every = max(1, recipe.steps // recipe.evaluations)
    clock.start()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr_at(step)
        starts = torch.randint(len(shared.train) - recipe.context, (recipe.batch, 1), generator=generator)
        ids = shared.train[starts + offsets]
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, recipe.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            clock.stop()
            curve.append([step + 1, clock.wall, clock.cpu, validation_loss(model, shared.windows)])
            clock.start()
        if (step + 1) % BURST == 0:
            clock.stop()
            yield
            clock.start()
    best = min(curve, key=lambda point: point[3])
    return {
        "seed": seed, "loss": best[3], "step": best[0], "seconds": best[1], "cpu_seconds": best[2],
        "steps": recipe.steps, "tokens": best[0] * recipe.batch * recipe.context, "curve": curve,
        "parameters": model.num_parameters(),
    }  # fmt: skip


class Timed(transformers.TrainerCallback):
    """Runs the clock during training, but for the times at which the other side has its turn.

    Args:
        clock: Of the training.
        turns: How often the other side has a turn, evenly spread over the steps.
        other: A training loop that pauses.
    """

    def __init__(self, clock: Clock, turns: int, other: Turns) -> None:
        self.clock, self.turns, self.other, self.taken = clock, turns, other, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = 1 + state.global_step * self.turns // args.max_steps
        if due > self.taken:
            self.clock.stop()
            while self.taken < due:
                self.taken += 1
                self.other.turn()
            self.clock.start()


class Turns:
    """A loop that pauses, and in the end what it returned."""

    def __init__(self, loop: Iterator[None]) -> None:
        self.loop = loop
        self.result: dict[str, Any] = {}

    def turn(self) -> bool:
        """Runs until the next pause; False at the end."""
        if not self.result:
            try:
                next(self.loop)
            except StopIteration as end:
                self.result = end.value
        return not self.result

    def finish(self) -> dict[str, Any]:
        """Runs to the end."""
        while self.turn():
            pass
        return self.result


def thrifty_run(shared: Workload, overrides: list[str], seed: int, turns: int, other: Turns) -> dict[str, Any]:
    """Trains by the recipe, as `thrifty train` does, and evaluates the model that it leaves."""
    clock = Clock()

    class TimedTrainer(training.RunTrainer):
        def events_before_guards(self) -> list[Any]:
            return [Timed(clock, turns, other), *super().events_before_guards()]

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._inner_training_loop(*args, **kwargs)
            clock.stop()
            self.eval_dataset = None  # the common evaluator looks at the model instead
            return result

    original, training.RunTrainer = training.RunTrainer, TimedTrainer
    try:
        with tempfile.TemporaryDirectory() as folder:
            words = [*OURS, *overrides, f"seed={seed}", f"output_dir={folder}/run"]
            result = training.train(load_config(RECIPE, words))
            model = transformers.AutoModelForCausalLM.from_pretrained(result.output_dir, dtype=torch.float32)
            tokens = result.summary["tokens"]
    finally:
        training.RunTrainer = original
    return {
        "seed": seed, "loss": validation_loss(model, shared.windows), "seconds": clock.wall, "cpu_seconds": clock.cpu,
        "steps": shared.config.arguments["max_steps"], "tokens": tokens, "parameters": model.num_parameters(),
    }  # fmt: skip


def one_round(shared: Workload, recipe: Bare, overrides: list[str], seed: int) -> dict[str, dict[str, Any]]:
    """Both sides with one seed, in turns."""
    baseline = Turns(bare_loop(shared, recipe, seed))
    ours = thrifty_run(shared, overrides, seed, recipe.steps // BURST, baseline)
    return {"baseline": baseline.finish(), "thrifty": ours}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both sides, in turns; what a folder of an earlier, broken measurement holds is not measured again."""
    recipe = Bare(steps=options.steps)
    shared = workload(load_config(RECIPE, [*OURS, *options.overrides]), recipe.context)
    runs: dict[str, list[dict[str, Any]]] = {"baseline": [], "thrifty": []}
    for seed in range(options.seeds):
        path = options.work / f"seed-{seed}.json" if options.work else None
        if path is not None and path.exists():
            round_of = json.loads(path.read_text("utf-8"))
        else:
            round_of = one_round(shared, recipe, options.overrides, seed)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(round_of), encoding="utf-8")
        for side, found in round_of.items():
            runs[side].append(found)
            print(
                f"seed {seed}, {side}: loss {found['loss']:.4f} in {found['seconds']:.1f} s "
                f"({found['cpu_seconds']:.1f} s of processor), {found['tokens']:,} tokens",
                flush=True,
            )
    return {
        "what": "time to the baseline's lowest validation loss, from scratch",
        **circumstances(torch.get_num_threads()),
        "baseline_recipe": dataclasses.asdict(recipe),
        "baseline_shape": SHAPE,
        "recipe": {**yaml_text.read_mapping(RECIPE)},
        "overrides": options.overrides,
        "validation_tokens": shared.windows[:, 1:].numel(),
        "limit": options.limit,
        "runs": runs,
        "summary": {side: summary(runs[side], runs["baseline"]) for side in runs},
    }


def summary(runs: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the seeds, and the shares of the baseline's time."""
    pairs = list(zip(runs, baseline, strict=True))
    return {
        "loss": statistics.median(run["loss"] for run in runs),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "cpu_seconds": statistics.median(run["cpu_seconds"] for run in runs),
        "reached": [run["loss"] <= base["loss"] for run, base in pairs],
        "ratios": [run["seconds"] / base["seconds"] for run, base in pairs],
        "cpu_ratios": [run["cpu_seconds"] / base["cpu_seconds"] for run, base in pairs],
        "ratio": statistics.median(run["seconds"] / base["seconds"] for run, base in pairs),
        "cpu_ratio": statistics.median(run["cpu_seconds"] / base["cpu_seconds"] for run, base in pairs),
    }


def main() -> int:
    """Measures, writes the result and compares it with the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000, help="of the baseline")
    parser.add_argument("--quick", action="store_true", help="one seed, both sides at about a quarter of their steps")
    parser.add_argument("--limit", type=float, help="the largest share of the baseline's time that passes")
    parser.add_argument("--work", type=Path, help="a folder that keeps finished runs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/time-to-loss.json; none with --quick")
    parser.add_argument("overrides", nargs="*", help="keys of the recipe, for example max_steps=250")
    options = parser.parse_args()
    if options.quick:
        steps = yaml_text.read_mapping(RECIPE)["max_steps"]
        options.seeds, options.steps = 1, options.steps // 4
        options.overrides = [f"max_steps={round(QUICK_SHARE * steps)}", *options.overrides]
    options.limit = options.limit or (QUICK_LIMIT if options.quick else LIMIT)
    out = options.out or (None if options.quick else HERE / "results" / "time-to-loss.json")
    result = measure(options)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    ours, theirs = result["summary"]["thrifty"], result["summary"]["baseline"]
    print(
        f"loss {ours['loss']:.4f} (baseline {theirs['loss']:.4f}) in {ours['ratio']:.3f} of its time "
        f"({', '.join(f'{ratio:.3f}' for ratio in ours['ratios'])}; processor time {ours['cpu_ratio']:.3f}); "
        f"limit {options.limit}"
    )
    sizes = {side: runs[0]["parameters"] for side, runs in result["runs"].items()}
    if sizes["thrifty"] > 1.001 * sizes["baseline"]:
        print(f"not comparable: the recipe's model is larger, {sizes['thrifty']:,} to {sizes['baseline']:,} parameters")
        return 1
    return 0 if all(ours["reached"]) and ours["ratio"] <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
