"""Two real gloo processes train what one process trains, and resume exactly."""

from __future__ import annotations

import datetime
import os
import random
from typing import Any

import pytest
import torch

import tiny
from thrifty.errors import NotApplicable
from thrifty.method import registry

NAMES = [name for name in registry.names() if registry.get(name).spec.processes]
# Plain and a share that changes every day in `make test`, all methods in `make soak`.
SEED = os.environ.get("THRIFTY_PAIR_SEED") or datetime.date.today().isoformat()
SHARE = sorted(random.Random(SEED).sample(NAMES, min(16, len(NAMES))))


def cases(names: list[str]) -> list[Any]:
    """Plain, the share, and marked as soak the others."""
    return ["", *(name if name in SHARE else pytest.param(name, marks=pytest.mark.soak) for name in names)]


def preset(name: str) -> list:
    return [{name: dict(registry.get(name).spec.preset)}] if name else []


@pytest.mark.parametrize("name", cases(NAMES))
def test_two_processes_equal_one(tmp_path, pair, name):
    settings = {"max_steps": 4, "optim": "sgd", "learning_rate": 0.05}
    try:
        model = tiny.for_method(name)
        one = tiny.trainer(tmp_path / "one", preset(name), model, **settings, per_device_train_batch_size=4)
    except NotApplicable:
        pytest.skip("refused on this machine")
    one.train()
    arguments = {**settings, "per_device_train_batch_size": 2}
    job = {"methods": preset(name), "task": tiny.task_for(name), "arguments": arguments}
    pair.run(**job, folder=str(tmp_path / "two"), out=str(tmp_path / "w.pt"))
    two = torch.load(tmp_path / "w.pt", weights_only=True)
    invariant = not name or registry.get(name).spec.micro_batch_invariant
    tiny.assert_same(tiny.weights(one.model), two, atol=2e-6 if invariant else 5e-2)


@pytest.mark.parametrize("name", cases([n for n in NAMES if registry.get(n).spec.resumable]))
def test_two_processes_resume_bit_exactly(tmp_path, pair, name):
    """Also in the middle of the second epoch (step 8 of 6 a run through the data)."""
    try:
        tiny.trainer(tmp_path / "probe", preset(name), tiny.for_method(name))
    except NotApplicable:
        pytest.skip("refused on this machine")
    arguments = {"max_steps": 9, "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    job = {"methods": preset(name), "task": tiny.task_for(name)}
    full = pair.run(**job, folder=str(tmp_path / "full"), arguments=arguments, out=str(tmp_path / "a"))
    for step in (1, 8):
        again = pair.run(
            **job,
            folder=str(tmp_path / f"again{step}"),
            arguments={**arguments, "save_strategy": "no"},
            out=str(tmp_path / "b"),
            resume=str(tmp_path / "full" / f"checkpoint-{step}"),
        )
        tiny.assert_same(torch.load(tmp_path / "a", weights_only=True), torch.load(tmp_path / "b", weights_only=True))
        assert full["losses"] == again["losses"], f"resumed at {step}"


@pytest.mark.parametrize("name", ["selective-backprop", "batch-size-warmup"])
def test_own_draws_keep_processes_in_step(tmp_path, pair, name):
    """Each process picks of its own samples, so two are not one; but they must not wait for each other, and must agree.

    With two micro-batches a step, the first steps of a batch-size warm-up leave one of them empty.
    """
    arguments = {"max_steps": 9, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    method = preset(name)
    full = pair.run(methods=method, folder=str(tmp_path / "full"), arguments=arguments, out=str(tmp_path / "a"))
    assert len(full["losses"]) == 9
    pair.run(
        methods=method,
        folder=str(tmp_path / "again"),
        arguments={**arguments, "save_strategy": "no"},
        out=str(tmp_path / "b"),
        resume=str(tmp_path / "full" / "checkpoint-6"),
    )
    tiny.assert_same(torch.load(tmp_path / "a", weights_only=True), torch.load(tmp_path / "b", weights_only=True))
