"""Lets memory run out at chosen places of real runs, and compares the result with the run of the smaller micro-batch.

    python benchmarks/soak/oom.py --out benchmarks/results/soak-oom.json

A place is a part of the run (forward, backward, optimizer, trial step, evaluation) and the share of
that part's operations after which the allocator refuses. The reference is the same run that had used micro-batches of
half the size from the start; where nothing is to be split (optimizer, evaluation) it is the run without the fault.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import table  # sets the environment and the path of the next two
import torch

import tiny
from faults import InjectOom

SETTINGS: dict[str, Any] = {"max_steps": 5, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
ADAMW = {"optim": "adamw_torch"}  # on a CPU the fused one takes no memory between its writes
SAVING = {"save_strategy": "steps", "save_steps": 2}
TOLERANCE = 2e-5
"""Largest difference of a weight: rounding of float32 sums in another order, seen through AdamW's division."""


@dataclass(frozen=True)
class Place:
    """Where memory runs out."""

    part: str
    """forward, backward, optimizer, trial-forward, trial-optimizer or evaluation."""
    share: float
    """Of the part's allocating operations, how many go well."""
    step: int = 3
    micro_batch: int = 1
    accumulation: int = 1
    family: str = "llama"
    methods: tuple[Any, ...] = ()
    times: int = 1
    splits: bool = True
    """Whether the answer is a smaller micro-batch."""
    settings: dict[str, Any] = field(default_factory=dict)


PLACES: dict[str, Place] = {
    "forward, first operation": Place("forward", 0.0),
    "forward, middle": Place("forward", 0.5),
    "forward, last operation": Place("forward", 1.0),
    "backward, first operation": Place("backward", 0.0),
    "backward, middle": Place("backward", 0.5),
    "backward, last operation": Place("backward", 1.0),
    "forward of the second of two micro-batches": Place("forward", 0.5, micro_batch=2, accumulation=2),
    "backward of the first of two micro-batches": Place("backward", 0.7, accumulation=2),
    "backward of the last of four micro-batches": Place("backward", 0.9, micro_batch=4, accumulation=4),
    "twice in one step": Place("forward", 0.3, times=2),
    "trial step, forward": Place("trial-forward", 0.6),
    "trial step, backward": Place("trial-backward", 0.6),
    "trial step, optimizer": Place("trial-optimizer", 0.5, splits=False),
    "optimizer, while its state is made": Place("optimizer", 0.2, step=1, splits=False, settings=ADAMW),
    "optimizer, half done": Place("optimizer", 0.6, step=4, splits=False, settings=ADAMW | SAVING),
    "evaluation": Place("evaluation", 0.5, splits=False, settings={"eval_strategy": "steps", "eval_steps": 3}),
    "packing, forward": Place("forward", 0.5, methods=("packing",), splits=False),
    "packing, backward": Place("backward", 0.5, methods=("packing",), splits=False),
    "LoRA, backward": Place("backward", 0.5, methods=({"lora": {"r": 2}},)),
    "gradient checkpointing, recomputation": Place("backward", 0.4, methods=("gradient-checkpointing",)),
    "stacking, after the growth": Place(
        "backward", 0.8, step=4, methods=({"stacking": {"start_layers": 1, "boundaries": [0.4]}},)
    ),
    "RigL, forward": Place("forward", 0.8, methods=({"rigl": {"sparsity": 0.5, "every": 2}},)),
    "BERT, backward": Place("backward", 0.5, family="bert"),
    "ViT, forward": Place("forward", 0.5, family="vit"),
}


class Striker:
    """Counts a part's operations where they go well, and strikes once the count is known."""

    def __init__(self, run: Any, place: Place) -> None:
        self.run, self.place, self.left = run, place, place.times
        self.operations = 0
        self.seen = 0
        self.struck = 0

    @contextlib.contextmanager
    def part(self, name: str, due: bool) -> Iterator[None]:
        if name != self.place.part.removeprefix("trial-"):
            yield
            return
        if due and self.left:
            # Counted before, on the same part of an earlier step or of the trial's first pass.
            at = 1 + round(self.place.share * (max(self.operations, 1) - 1))
            with InjectOom(at) as mode:
                try:
                    yield
                finally:
                    self.left -= 1 - mode.left
                    self.struck += 1 - mode.left
            return
        with InjectOom(1 << 60) as mode:
            yield
        self.operations = mode.count or self.operations

    def due(self) -> bool:
        """Is this the step (and micro-batch) of the place?"""
        in_trial = self.run.state.global_step == 0 and not self.training
        if self.place.part.startswith("trial-"):
            return in_trial
        return not in_trial and self.run.state.global_step == self.place.step - 1

    training = False


def strike(run: Any, place: Place) -> Striker:
    """Puts the fault into a trainer."""
    striker = Striker(run, place)
    compute_loss, backward, batches = run.compute_loss, run.accelerator.backward, run.get_batch_samples
    prediction_step = run.prediction_step
    count = [0]

    def get_batch_samples(*args: Any) -> Any:
        striker.training, count[0] = True, 0
        return batches(*args)

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return compute_loss(model, *args, **kwargs)
        count[0] += 1
        here = striker.due() and count[0] == place.micro_batch
        if striker.struck and striker.left and striker.due():
            here = True  # the second failure of "twice"
        with striker.part("forward", here):
            return compute_loss(model, *args, **kwargs)

    def back(loss: Any, **kwargs: Any) -> None:
        with striker.part("backward", striker.due() and count[0] == place.micro_batch):
            backward(loss, **kwargs)

    def predict(*args: Any, **kwargs: Any) -> Any:
        with striker.part("evaluation", striker.operations > 0 and run.state.global_step >= place.step):
            return prediction_step(*args, **kwargs)

    run.get_batch_samples, run.compute_loss, run.accelerator.backward = get_batch_samples, forward, back
    run.prediction_step = predict
    create = run.create_optimizer

    def create_optimizer(*args: Any) -> Any:
        optimizer = create(*args)
        bare = type(optimizer).step

        def step(self: Any, closure: Any = None) -> Any:
            with striker.part("optimizer", striker.due()):
                return bare(self, closure)

        if place.part.endswith("optimizer"):
            optimizer.__class__ = type(type(optimizer).__name__, (type(optimizer),), {"step": step})
            type(optimizer).__module__ = "torch.optim.struck"
        return optimizer

    run.create_optimizer = create_optimizer
    return striker


def build(folder: Path, place: Place, halved: bool) -> Any:
    """A run with the place's recipe; `halved` uses half the micro-batch and twice the accumulation."""
    settings = {**SETTINGS, **place.settings, "gradient_accumulation_steps": place.accumulation}
    if halved:
        settings["per_device_train_batch_size"] //= 2
        settings["gradient_accumulation_steps"] *= 2
    return tiny.trainer(folder, list(place.methods), tiny.FAMILIES[place.family](), **settings)


def soak(name: str, place: Place, root: Path) -> dict[str, Any]:
    """Runs one place and its reference."""
    reference = build(root / "reference", place, halved=place.splits)
    with contextlib.redirect_stdout(io.StringIO()):
        reference.train()
    struck = build(root / "struck", place, halved=False)
    striker = strike(struck, place)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        struck.train()
    expected, got = tiny.weights(reference.model), tiny.weights(struck.model)
    worst = max(float((expected[key] - got[key]).abs().max()) for key in expected)
    losses = max(abs(a - b) for a, b in zip(tiny.losses(reference), tiny.losses(struck), strict=True))
    line = next((line for line in told.getvalue().splitlines() if "out of memory" in line), "")
    return {
        "place": name,
        "struck": striker.struck,
        "largest_difference_of_a_weight": worst,
        "largest_difference_of_a_loss": losses,
        "said": line.replace(f"{root}/", ""),
        "equal": striker.struck == place.times and worst <= TOLERANCE and losses <= TOLERANCE,
    }


def main(arguments: list[str] | None = None, only: Callable[[str], bool] = lambda name: True) -> int:
    """Runs the soak and writes its table."""
    args = table.parser(__doc__).parse_args(arguments)
    rows = []
    for name, place in PLACES.items():
        if only(name):
            with tempfile.TemporaryDirectory() as root:
                rows.append(soak(name, place, Path(root)))
            print(rows[-1], flush=True)
    total = {"places": len(rows), "equal": sum(row["equal"] for row in rows)}
    table.write(args.out, "out of memory at injected places", rows, total, tolerance=TOLERANCE)
    return 0 if total["places"] == total["equal"] else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
