"""Two loops such as users write, for the pure forms: plain PyTorch and Accelerate. And a resume check."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import tiny

Step = Callable[[int], Any]


def takes_images(model: nn.Module) -> bool:
    return "pixel_values" in inspect.signature(model.forward).parameters


def loader(model: nn.Module, count: int = 8, size: int = 2) -> DataLoader:
    """Batches of `size` samples in a fixed order, without `sample_id`."""
    images = takes_images(model)
    samples = (tiny.image_samples() if images else tiny.text_samples())[:count]
    collate = tiny.collate_images if images else tiny.collate_text
    plain = [{key: value for key, value in sample.items() if key != "sample_id"} for sample in samples]
    return DataLoader(plain, batch_size=size, collate_fn=collate)  # type: ignore[arg-type]


def batch(model: nn.Module, size: int = 3) -> dict[str, torch.Tensor]:
    """One batch for this model."""
    return next(iter(loader(model, count=size, size=size)))


@dataclass
class Setup:
    """What a loop trains with: the pure form is in `model`, `optimizer` or the hooks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    before_step: Step = lambda step: None
    after_backward: Step = lambda step: None
    """False: no update in this step."""
    after_step: Step = lambda step: None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def plain_loop(setup: Setup) -> list[float]:
    losses = []
    setup.model.train()
    for step, inputs in enumerate(loader(setup.model)):
        setup.before_step(step)
        setup.optimizer.zero_grad()
        with setup.context():
            loss = setup.model(**inputs).loss
        loss.backward()
        if setup.after_backward(step) is not False:
            setup.optimizer.step()
        setup.after_step(step)
        losses.append(loss.item())
    return losses


def new_accelerator() -> Accelerator:
    AcceleratorState._reset_state(True)  # another test may have set another precision
    return Accelerator(cpu=True)


def accelerate_loop(setup: Setup) -> list[float]:
    accelerator = new_accelerator()
    model, optimizer, batches = accelerator.prepare(setup.model, setup.optimizer, loader(setup.model))
    losses = []
    model.train()
    for step, inputs in enumerate(batches):
        setup.before_step(step)
        optimizer.zero_grad()
        with setup.context():
            loss = model(**inputs).loss
        accelerator.backward(loss)
        if setup.after_backward(step) is not False:
            optimizer.step()
        setup.after_step(step)
        losses.append(loss.item())
    return losses


def both_loops(make: Callable[[], Setup], *, seed: int = 5) -> tuple[Setup, list[float]]:
    """Trains a fresh setup in each loop, asserts that they agree bit for bit, and returns the plain one."""
    torch.manual_seed(seed)
    first = make()
    losses = plain_loop(first)
    torch.manual_seed(seed)
    second = make()
    assert accelerate_loop(second) == losses
    tiny.assert_same(tiny.weights(second.model), tiny.weights(first.model))
    assert all(torch.isfinite(torch.tensor(losses)))
    return first, losses


def baseline(build: Callable[[], nn.Module], lr: float = 1e-2) -> tuple[nn.Module, list[float]]:
    """The plain loop without any method."""
    model = build()
    return model, plain_loop(Setup(model, torch.optim.AdamW(model.parameters(), lr=lr)))


def resumes(
    folder: Path,
    methods: list[Any],
    build: Callable[[], nn.Module],
    *,
    step: int = 2,
    max_steps: int = 3,
    watch: Callable[[Any], TrainerCallback] | None = None,
    **overrides: Any,
) -> Any:
    """Trains, resumes from the checkpoint of `step`, asserts equality to the bit. Returns the uninterrupted trainer."""
    overrides = {"max_steps": max_steps, **overrides}
    full = tiny.trainer(folder / "full", methods, build(), save_strategy="steps", save_steps=1, **overrides)
    if watch is not None:
        full.add_callback(watch(full))
    full.train()
    again = tiny.trainer(folder / "again", methods, build(), **overrides)
    again.train(resume_from_checkpoint=str(folder / "full" / f"checkpoint-{step}"))
    tiny.assert_same(tiny.weights(again.model), tiny.weights(full.model))
    assert tiny.losses(again) == tiny.losses(full)
    assert len(tiny.losses(full)) == overrides["max_steps"]
    return full


class LastStep(TrainerCallback):
    """Empties a list of calls at each step's beginning, so that those of the last step stay (and no trial's)."""

    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.calls.clear()


def count_calls(module: nn.Module) -> list[int]:
    """A list that grows by one with each forward of the module."""
    calls: list[int] = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls
