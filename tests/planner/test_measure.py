"""Peaks on a CPU by the allocator's own events."""

from __future__ import annotations

import pytest
import torch

from thrifty.planner.measure import AllocationLog, living_storages

MIB = 2**20


@pytest.fixture
def log() -> AllocationLog:
    return AllocationLog(living_storages())


def test_a_state_that_is_replaced_counts_once_beside_the_new_one(log: AllocationLog) -> None:
    log.open()
    state = torch.zeros(MIB, dtype=torch.uint8)
    for _ in range(3):
        log.begin_step()
        for _ in range(4):  # each time the old one is freed: it was made before the step, and after the log was opened
            state = state + 1
        log.end_step()
    assert log.close() == pytest.approx([2 * MIB] * 3, rel=0.01)
    assert state[0] == 12
    assert not log.is_open


def test_what_lives_only_for_a_moment_counts(log: AllocationLog) -> None:
    log.open()
    kept = torch.zeros(MIB, dtype=torch.uint8)
    log.begin_step()
    torch.zeros(3 * MIB, dtype=torch.uint8)
    torch.zeros(2 * MIB, dtype=torch.uint8)
    log.end_step()
    torch.zeros(9 * MIB, dtype=torch.uint8)  # between the steps
    log.begin_step()  # and one that never ended
    log.begin_step()
    assert log.close() == pytest.approx([4 * MIB, MIB, MIB], rel=0.01)
    assert len(kept) == MIB
