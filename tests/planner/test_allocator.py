"""The simulated caching allocator against the rules of the real one, worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thrifty.planner.allocator import MIB, AllocatorOptions, CachingAllocator, simulate


def used(*sizes: int, options: AllocatorOptions | None = None) -> CachingAllocator:
    allocator = CachingAllocator(options)
    for name, size in enumerate(sizes):
        allocator.allocate(name, size)
    return allocator


def test_small_blocks_are_rounded_and_share_a_segment() -> None:
    allocator = used(1, 512, 513, MIB - 2048)
    assert allocator.allocated == 512 + 512 + 1024 + MIB - 2048
    assert allocator.reserved == 2 * MIB
    assert allocator.segments == 1


def test_segment_sizes() -> None:
    assert used(MIB + 1).reserved == 20 * MIB
    assert used(10 * MIB - 512).reserved == 20 * MIB
    assert used(10 * MIB).reserved == 10 * MIB
    assert used(11 * MIB + 1).reserved == 12 * MIB


def test_nothing_is_taken_for_nothing() -> None:
    allocator = used(0)
    allocator.release(0)
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_large_remainders_of_a_mebibyte_are_not_split() -> None:
    # 20 MiB segment, 9.5 MiB used: the rest is split and serves the second; a rest of 1 MiB stays with its block.
    allocator = used(9 * MIB + MIB // 2, 9 * MIB + MIB // 2)
    assert allocator.reserved == 20 * MIB
    assert allocator.allocated == 9 * MIB + MIB // 2 + 20 * MIB - 9 * MIB - MIB // 2


def test_freed_blocks_are_merged_and_reused() -> None:
    allocator = used(4 * MIB, 4 * MIB, 4 * MIB)
    assert allocator.reserved == 20 * MIB
    for name in (0, 1):
        allocator.release(name)
    allocator.allocate(9, 8 * MIB)
    assert allocator.reserved == 20 * MIB


def test_fragmentation_reserves_more_than_it_allocates() -> None:
    allocator = used(*[3 * MIB] * 6)
    assert allocator.reserved == 20 * MIB
    for name in (0, 2, 4):
        allocator.release(name)
    allocator.allocate(9, 6 * MIB)
    assert allocator.reserved == 40 * MIB
    assert allocator.peak_allocated <= 20 * MIB


def test_expandable_segments_do_not_fragment() -> None:
    sizes = [12 * MIB, 30 * MIB, 50 * MIB]
    expandable = AllocatorOptions(expandable_segments=True)
    for options, reserved in ((None, 12 + 30 + 50), (expandable, 100)):
        allocator = CachingAllocator(options)
        for name, size in enumerate(sizes):
            allocator.allocate(name, size)
        assert allocator.reserved == reserved * MIB
        for name in range(3):
            allocator.release(name)
        allocator.allocate(9, 92 * MIB)
        assert allocator.reserved == (reserved + (0 if options else 92)) * MIB


def test_a_split_limit_keeps_large_blocks_whole() -> None:
    options = AllocatorOptions(max_split_size=64 * MIB)
    allocator = used(100 * MIB, options=options)
    allocator.release(0)
    allocator.allocate(1, 12 * MIB)
    assert allocator.reserved == 112 * MIB


def test_state_that_comes_late_takes_gaps() -> None:
    # Activations of 40 MiB are cached; 30 MiB of state then goes into their block, so the second step must reserve
    # anew.
    ident = np.array([0, 1, 1])
    nbytes = np.array([30, 40, -40]) * MIB
    early = simulate(ident, nbytes, start=1)
    late = simulate(ident, nbytes, start=1, late=frozenset({0}))
    assert early.reserved == 70 * MIB
    assert late.reserved == 80 * MIB
    assert early.allocated == late.allocated == 70 * MIB


def test_what_a_step_leaves_is_freed_at_its_end() -> None:
    assert simulate(np.array([0]), np.array([40 * MIB]), steps=5).reserved == 40 * MIB


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 40 * MIB)), max_size=60),
    st.booleans(),
)
def test_blocks_never_overlap_and_reserved_covers_them(actions: list[tuple[bool, int]], expandable: bool) -> None:
    allocator = CachingAllocator(AllocatorOptions(expandable_segments=expandable))
    living: dict[int, int] = {}
    for name, (free, size) in enumerate(actions):
        if free and living:
            oldest = next(iter(living))
            del living[oldest]
            allocator.release(oldest)
        else:
            allocator.allocate(name, size)
            living[name] = size
        blocks = sorted((id(pool), b.address, b.size) for pool, b in allocator._blocks.values())
        for (pool, address, length), (other, following, _) in pairwise(blocks):
            assert pool != other or address + length <= following
        assert sum(size for _, _, size in blocks) == allocator.allocated
        assert sum(living.values()) <= allocator.allocated <= allocator.reserved
