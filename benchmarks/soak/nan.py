"""Makes losses and gradients NaN or infinite at chosen places of real runs, under every policy.

    python benchmarks/soak/nan.py --out benchmarks/results/soak-nan.json

`skip` and `rewind` must end, bit for bit, where a plain transformers.Trainer ends whose update of that step was left
out; `stop` must leave the weights of the step before. Every row also checks that the message names step and samples.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import table  # sets the environment and the path of the next one
import torch
from transformers import TrainerCallback

import tiny
from thrifty.safety.numbers import NonFinite
from thrifty.safety.options import Guards

STEPS = 8
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Place:
    """What is spoilt, where, and what answers."""

    value: float
    where: str
    """`loss`, `gradients` (all), `parameter` (one) or `element` (one number of one parameter)."""
    policy: str = "skip"
    steps: tuple[int, ...] = (5,)
    micro_batch: int = 1
    accumulation: int = 1
    methods: tuple[Any, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    stops: bool = False


PLACES: dict[str, Place] = {
    "loss NaN": Place(NAN, "loss"),
    "loss infinite": Place(INF, "loss"),
    "loss minus infinity": Place(-INF, "loss"),
    "all gradients NaN": Place(NAN, "gradients"),
    "gradients of one parameter infinite": Place(INF, "parameter"),
    "one number of one gradient NaN": Place(NAN, "element"),
    "one number, without clipping": Place(NAN, "element", settings={"max_grad_norm": 0.0}),
    "loss of the second of three micro-batches": Place(NAN, "loss", micro_batch=2, accumulation=3),
    "gradient of the first of two micro-batches": Place(INF, "element", accumulation=2),
    "first step": Place(NAN, "loss", steps=(1,)),
    "three steps in a row": Place(NAN, "loss", steps=(3, 4, 5)),
    "four steps in a row": Place(NAN, "loss", steps=(3, 4, 5, 6), stops=True),
    "LoRA, gradient of one parameter": Place(NAN, "parameter", methods=({"lora": {"r": 2}},)),
    "loss NaN, going back": Place(NAN, "loss", "rewind", settings={"save_strategy": "steps", "save_steps": 3}),
    "gradient, going back, accumulation": Place(
        INF, "element", "rewind", accumulation=2, settings={"save_strategy": "steps", "save_steps": 3}
    ),
    "going back across a growth": Place(
        NAN,
        "loss",
        "rewind",
        methods=({"stacking": {"start_layers": 1, "boundaries": [0.5]}},),
        settings={"save_strategy": "steps", "save_steps": 3},
    ),
    "loss NaN, stop": Place(NAN, "loss", "stop", stops=True),
    "gradient infinite, stop": Place(INF, "gradients", "stop", stops=True),
}


def spoil(run: Any, place: Place) -> None:
    """Puts the fault into a trainer."""
    compute_loss, backward, batches = run.compute_loss, run.accelerator.backward, run.get_batch_samples
    count = [0]

    def due() -> bool:
        return run.state.global_step + 1 in place.steps and count[0] == place.micro_batch

    def get_batch_samples(*args: Any) -> Any:
        count[0] = 0
        return batches(*args)

    def spoilt_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(model, *args, **kwargs)
        if not model.training:
            return loss
        count[0] += 1
        return loss * place.value if place.where == "loss" and due() else loss

    def spoilt_backward(loss: Any, **kwargs: Any) -> None:
        backward(loss, **kwargs)
        if place.where == "loss" or not due():
            return
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        for gradient in gradients if place.where == "gradients" else gradients[:1]:
            if place.where == "element":
                gradient.view(-1)[3] = place.value
            else:
                gradient.fill_(place.value)

    run.get_batch_samples, run.compute_loss, run.accelerator.backward = get_batch_samples, spoilt_loss, spoilt_backward


class LeaveOut(TrainerCallback):
    """The reference: drops the gradients of some steps, and copies the weights before the first of them."""

    def __init__(self, place: Place, into: dict[str, torch.Tensor] | None) -> None:
        self.place, self.into = place, into

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step + 1 in self.place.steps:
            if self.into == {}:
                self.into.update(tiny.weights(model))
            model.zero_grad(set_to_none=True)


def soak(name: str, place: Place, root: Path) -> dict[str, Any]:
    """Runs one place and its reference."""
    settings = {"max_steps": STEPS, "gradient_accumulation_steps": place.accumulation, **place.settings}
    kept: dict[str, torch.Tensor] = {}
    reference = tiny.trainer(root / "reference", list(place.methods), tiny.llama(dropout=0.1), **settings)
    reference.add_callback(LeaveOut(place, kept if place.stops else None))
    if not place.methods:
        reference.guards = Guards.off()
    with contextlib.redirect_stdout(io.StringIO()):
        reference.train()
    run = tiny.trainer(root / "run", list(place.methods), tiny.llama(dropout=0.1), **settings)
    run.guards.on_non_finite = place.policy
    spoil(run, place)
    told = io.StringIO()
    error = ""
    with contextlib.redirect_stdout(told):
        try:
            run.train()
        except NonFinite as stopped:
            error = str(stopped)
    last = place.steps[-1] if place.stops else STEPS
    text = told.getvalue() + error
    named = all(f"step {step}: " in text for step in place.steps) and "samples " in text
    finite = all(bool(torch.isfinite(p).all()) for p in run.model.parameters())
    expected, got = kept if place.stops else tiny.weights(reference.model), tiny.weights(run.model)
    same = expected.keys() == got.keys() and all(torch.equal(expected[key], got[key]) for key in expected)
    ended = run.state.global_step == (last - 1 if place.stops else STEPS)
    return {
        "place": name,
        "policy": place.policy,
        "ended_at_step": run.state.global_step,
        "named_step_and_samples": named,
        "weights_finite": finite,
        "weights_as_expected": same,
        "good": named and finite and same and ended and bool(error) is place.stops,
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
    total = {"places": len(rows), "good": sum(row["good"] for row in rows)}
    table.write(args.out, "NaN and infinite losses and gradients at chosen places", rows, total)
    return 0 if total["places"] == total["good"] else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
