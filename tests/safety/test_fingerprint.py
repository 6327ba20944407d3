from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainingArguments, get_scheduler

from thrifty.errors import InputError
from thrifty.safety.fingerprint import (
    compare,
    content_hash,
    describe,
    require_same,
    resume_position,
    samples_seen,
)
from thrifty.safety.schedule import hold_after, place_at


def description(tmp_path: Any, rows: int = 40, batch: int = 4, max_steps: int = 10, **changes: Any) -> dict[str, Any]:
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, **changes)
    data = datasets.Dataset.from_dict({"input_ids": [[i, i + 1] for i in range(rows)]})
    return describe(args, max_steps=max_steps, total_batch_size=batch, dataset=data)


def test_the_same_run_has_the_same_description_through_json(tmp_path) -> None:
    first = description(tmp_path)
    assert compare(json.loads(json.dumps(first)), description(tmp_path)) == []
    assert require_same(first, description(tmp_path)) == []
    assert compare({}, first) == []


def test_more_epochs_are_refused_with_both_meanings_by_name(tmp_path) -> None:
    saved, now = description(tmp_path, num_train_epochs=1), description(tmp_path, num_train_epochs=2, max_steps=20)
    with pytest.raises(InputError, match=r"num_train_epochs was 1.0, is 2.0.*schedule=continue .*schedule=extend"):
        require_same(saved, now)
    assert {d.key for d in require_same(saved, now, "extend")} == {"max_steps", "num_train_epochs"}
    with pytest.raises(InputError, match="use continue or extend"):
        require_same(saved, now, "both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"learning_rate": 1e-3}, "learning_rate"),
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type"),
        ({"seed": 7}, "seed"),
    ],
)
def test_what_changes_the_run_is_named(tmp_path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=f"{key} was"):
        require_same(description(tmp_path), description(tmp_path, **changes))


def test_other_data_are_refused_whatever_the_schedule(tmp_path) -> None:
    with pytest.raises(InputError, match="the data is not that of the checkpoint: length was 40, is 41"):
        require_same(description(tmp_path), description(tmp_path, rows=41), "extend")


def test_another_batch_is_accepted_and_its_number_of_steps_is_no_other_schedule(tmp_path) -> None:
    found = require_same(description(tmp_path), description(tmp_path, batch=8, max_steps=5))
    assert [str(d) for d in found] == ["total_batch_size was 4, is 8"]


def test_random_samples_are_not_hashed_and_the_generator_is_untouched(tmp_path) -> None:
    class Augmented(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": torch.rand(2) + index}

    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    before = torch.get_rng_state()
    got = describe(args, max_steps=1, total_batch_size=1, dataset=Augmented())
    assert got["data"]["first_and_last"] == [None, None]
    assert torch.equal(torch.get_rng_state(), before)


def test_content_hash_tells_contents_apart() -> None:
    samples = [
        {"a": [1, 2]},
        {"a": [12]},
        {"b": [1, 2]},
        {"a": torch.tensor([1, 2])},
        {"a": torch.tensor([1.0, 2.0])},
        {"a": "1"},
    ]
    assert len({content_hash(s) for s in samples}) == len(samples)
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    assert content_hash({"a": object()}) == content_hash({"a": object()}), "no memory address goes in"


def test_doubling_the_batch_goes_on_after_the_same_samples() -> None:
    seen = samples_seen(5, dataset_length=40, total_batch_size=4)
    assert seen == 20
    with pytest.raises(InputError, match=r"20 samples into an epoch, no multiple of the new 8 x 1.*for instance 4"):
        resume_position(seen, dataset_length=40, micro_batch=8, accumulation=1, world_size=1, num_train_epochs=1)
    at = resume_position(seen, dataset_length=40, micro_batch=4, accumulation=2, world_size=1, num_train_epochs=1)
    assert (at.micro_batches_to_skip, at.first_step_micro_batches, at.global_step, at.max_steps) == (5, 1, 2, 5)


@pytest.mark.parametrize("limits", [{"num_train_epochs": 1}, {"max_steps": 10}, {"max_steps": 3}])
def test_nothing_left_is_an_error(limits: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"nothing is left to run: 40 samples.*are already trained"):
        resume_position(40, dataset_length=40, micro_batch=4, accumulation=1, world_size=1, **limits)  # type: ignore[arg-type]


@given(
    length=st.integers(1, 60),
    old=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    new=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    steps=st.integers(0, 80),
    drop_last=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_position_against_a_loop_that_counts(length: int, old, new, steps: int, drop_last: bool) -> None:
    """Walks through the data of 40 epochs with the old sizes, then asks for the place with the new ones."""
    micro, accumulation, world = old
    across, total = micro * world, micro * world * accumulation
    usable = length // across * across if drop_last else length
    if usable == 0:
        return
    seen = done = 0
    while done < steps:
        left = usable - seen % usable
        seen += min(total, left)
        done += 1
    got = samples_seen(steps, dataset_length=length, total_batch_size=total, drop_last_to=across if drop_last else None)
    assert got == seen
    sizes = {"micro_batch": new[0], "accumulation": new[1], "world_size": new[2]}
    try:
        at = resume_position(seen, dataset_length=length, num_train_epochs=200, drop_last=drop_last, **sizes)  # type: ignore[arg-type]
    except InputError as error:
        if "no multiple" not in str(error) and "no whole micro-batch" not in str(error):
            raise
        return
    new_across = new[0] * new[2]
    new_usable = length // new_across * new_across if drop_last else length
    assert at.epoch * new_usable + at.micro_batches_to_skip * new_across == seen
    assert (at.micro_batches_to_skip + at.first_step_micro_batches) % new[1] == 0
    assert 1 <= at.first_step_micro_batches <= new[1]
    assert at.steps_into_epoch * new[1] <= at.micro_batches_to_skip


def scheduler(kind: str, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return optimizer, get_scheduler(kind, optimizer, num_warmup_steps=2, num_training_steps=steps)


def rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return values


def test_placed_schedule_goes_on_like_one_that_walked() -> None:
    walked = rates(*scheduler("cosine", 10), 10)
    optimizer, schedule = scheduler("cosine", 10)
    place_at(schedule, 6)
    assert rates(optimizer, schedule, 4) == walked[6:]
    assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_held_schedule_does_not_rise_again() -> None:
    optimizer, schedule = scheduler("cosine", 10)
    assert rates(optimizer, schedule, 14)[13] > 0.01
    optimizer, schedule = scheduler("cosine", 10)
    hold_after(schedule, 10)
    assert rates(optimizer, schedule, 14)[10:] == pytest.approx([0.0] * 4)


def test_a_schedule_that_depends_on_the_run_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(InputError, match="ReduceLROnPlateau"):
        place_at(SimpleNamespace(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)), 3)
