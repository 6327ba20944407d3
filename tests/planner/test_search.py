"""The search: the arithmetic of its parts, and its result against brute force over single estimates."""

from __future__ import annotations

import numpy as np
import pytest

from thrifty.errors import InputError
from thrifty.planner.search import SHARDINGS, factorisations, pareto, sharding_scales, zero_state_bytes
from thrifty.planner.trace import CATEGORIES


def test_every_division_gives_the_global_batch() -> None:
    found = factorisations(48, 4)
    assert all(micro * accumulation * 4 == 48 for micro, accumulation in found)
    assert [micro for micro, _ in found] == [1, 2, 3, 4, 6, 12]


def test_a_batch_that_cannot_be_divided_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"cannot be divided among 8 devices.*8 or 16"):
        factorisations(12, 8)


@pytest.mark.parametrize(("batch", "devices"), [(0, 1), (4, 0)])
def test_nonsense_counts(batch: int, devices: int) -> None:
    with pytest.raises(InputError):
        factorisations(batch, devices)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.41), (2, 16.64), (3, 1.88)])
def test_model_states_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    assert zero_state_bytes(7.5e9, 64, stage) / 1e9 == pytest.approx(gigabytes, abs=0.01)


def test_each_stage_divides_one_state_more() -> None:
    states = {"parameters": 100, "gradients": 100, "optimizer": 200, "gathered": 10}
    divided = [
        {name for name, f in zip(CATEGORIES, sharding_scales(s, 4, states, 4).factors, strict=True) if f == 0.25}
        for s in SHARDINGS
    ]
    assert divided == [
        set(),
        set(),
        {"optimizer"},
        {"optimizer", "gradients"},
        {"optimizer", "gradients", "parameters"},
    ]
    assert sharding_scales("ddp", 4, states, 4).extra == 100


def test_pareto_is_what_brute_force_finds() -> None:
    rng = np.random.default_rng(0)
    memory, seconds = rng.integers(1, 40, 300).astype(float), rng.integers(1, 40, 300).astype(float)
    front = set(zip(memory[pareto(memory, seconds)], seconds[pareto(memory, seconds)], strict=True))
    points = list(zip(memory, seconds, strict=True))
    expected = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    assert front == expected
