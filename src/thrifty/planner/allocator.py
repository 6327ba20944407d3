"""A simulator of PyTorch's CUDA caching allocator: how much it reserves for a given order of allocations and frees.

It follows c10/cuda/CUDACachingAllocator.cpp: sizes in multiples of 512 bytes; a pool for blocks up to 1 MiB, served
from 2 MiB segments, and one for larger blocks, served from segments of 20 MiB or, above 10 MiB, of the size rounded to
2 MiB; best fit; blocks are split if enough remains and merged with free neighbours when freed; segments are kept.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

KIB, MIB = 1 << 10, 1 << 20
_MIN_BLOCK = 512
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_MIN_OWN_SEGMENT = 10 * MIB
_SEGMENT_ROUNDING = 2 * MIB


@dataclass(frozen=True)
class AllocatorOptions:
    """What `PYTORCH_CUDA_ALLOC_CONF` sets.

    Attributes:
        expandable_segments: One growing segment a pool instead of many fixed ones.
        max_split_size: Larger blocks are not split, in bytes; None for no limit.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None


@dataclass(frozen=True)
class Usage:
    """Peaks in bytes: of allocated blocks, of reserved segments, and the number of segments at the end."""

    allocated: int
    reserved: int
    segments: int


class _Block:
    __slots__ = ("address", "following", "free", "preceding", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size, self.free = address, size, True
        self.preceding: _Block | None = None
        self.following: _Block | None = None


class _Pool:
    """Free blocks in the order (size, address), with fixed or expandable segments behind them."""

    def __init__(self, *, small: bool, options: AllocatorOptions) -> None:
        self.small, self.options = small, options
        self.free: list[tuple[int, int]] = []
        self.by_address: dict[int, _Block] = {}
        self.reserved = 0
        self.segments = 0
        self._tail: _Block | None = None
        self._next_address = 0

    def take(self, size: int) -> _Block:
        block = self._best_fit(size) or self._grow(size)
        if self._splits(block.size - size, size):
            rest = _Block(block.address + size, block.size - size)
            rest.preceding, rest.following = block, block.following
            if block.following is not None:
                block.following.preceding = rest
            block.following, block.size = rest, size
            if self._tail is block:
                self._tail = rest
            self._add(rest)
        block.free = False
        return block

    def give(self, block: _Block) -> None:
        block.free = True
        before, after = block.preceding, block.following
        if before is not None and before.free:
            self._remove(before)
            block = self._join(before, block)
        if after is not None and after.free:
            self._remove(after)
            block = self._join(block, after)
        self._add(block)

    def _join(self, left: _Block, right: _Block) -> _Block:
        left.size += right.size
        left.following = right.following
        if right.following is not None:
            right.following.preceding = left
        if self._tail is right:
            self._tail = left
        return left

    def _best_fit(self, size: int) -> _Block | None:
        at = bisect_left(self.free, (size, -1))
        if at == len(self.free):
            return None
        limit = self.options.max_split_size
        found, address = self.free[at]
        if limit is not None and (size < limit <= found or (size >= limit and found >= size + _LARGE_SEGMENT)):
            return None
        del self.free[at]
        return self.by_address.pop(address)

    def _splits(self, rest: int, size: int) -> bool:
        if self.small or self.options.expandable_segments:
            return rest >= _MIN_BLOCK
        limit = self.options.max_split_size
        return rest > _SMALL and (limit is None or size < limit)

    def _grow(self, size: int) -> _Block:
        if self.options.expandable_segments:
            tail = self._tail if self._tail is not None and self._tail.free else None
            page = _SMALL_SEGMENT if self.small else _LARGE_SEGMENT
            missing = size - (tail.size if tail is not None else 0)
            mapped = -(-missing // page) * page
            self.reserved += mapped
            if tail is not None:
                self._remove(tail)
                tail.size += mapped
                self._next_address += mapped
                return tail
            block = _Block(self._next_address, mapped)
            block.preceding = self._tail
            if self._tail is not None:
                self._tail.following = block
            else:
                self.segments = 1
            self._tail = block
            self._next_address += mapped
            return block
        length = self._segment_size(size)
        self.reserved += length
        self.segments += 1
        block = _Block(self._next_address, length)
        self._next_address += length
        return block

    def _segment_size(self, size: int) -> int:
        if self.small:
            return _SMALL_SEGMENT
        if size < _MIN_OWN_SEGMENT:
            return _LARGE_SEGMENT
        return -(-size // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING

    def _add(self, block: _Block) -> None:
        insort(self.free, (block.size, block.address))
        self.by_address[block.address] = block

    def _remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.by_address[block.address]


class CachingAllocator:
    """The allocator of one device and one stream, without a limit of memory."""

    def __init__(self, options: AllocatorOptions | None = None) -> None:
        options = options or AllocatorOptions()
        self._small, self._large = (_Pool(small=small, options=options) for small in (True, False))
        self._blocks: dict[int, tuple[_Pool, _Block]] = {}
        self.allocated = self.peak_allocated = 0

    @property
    def reserved(self) -> int:
        """Bytes of all segments. They are never given back, so this is also their peak."""
        return self._small.reserved + self._large.reserved

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return self._small.segments + self._large.segments

    def allocate(self, ident: int, nbytes: int) -> None:
        """Allocates `nbytes` under the name `ident`. Nothing is taken for zero bytes."""
        if nbytes <= 0:
            return
        size = max(_MIN_BLOCK, -(-nbytes // _MIN_BLOCK) * _MIN_BLOCK)
        pool = self._small if size <= _SMALL else self._large
        block = pool.take(size)
        self._blocks[ident] = (pool, block)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def release(self, ident: int) -> None:
        """Frees what was allocated as `ident`; unknown names are ignored, as allocations of nothing have none."""
        if ident in self._blocks:
            pool, block = self._blocks.pop(ident)
            self.allocated -= block.size
            pool.give(block)


def simulate(
    ident: np.ndarray,
    nbytes: np.ndarray,
    *,
    start: int = 0,
    late: frozenset[int] = frozenset(),
    steps: int = 2,
    options: AllocatorOptions | None = None,
) -> Usage:
    """Replays a training step several times.

    Args:
        ident: (events,) which allocation.
        nbytes: (events,) signed bytes: positive allocates, negative frees.
        start: Events before this one happen once; what they allocate lives through all steps.
        late: Allocations before `start` that come into being only at the end of the first step: optimizer state, which
            then
            takes gaps among the cached activations.
        steps: How often the rest is replayed. What a step leaves allocated (gradients) is freed at its end.
        options: Settings of the allocator.
    """
    allocator = CachingAllocator(options)
    sequence = [(int(i), round(n)) for i, n in zip(ident.tolist(), nbytes.tolist(), strict=True)]
    for name, size in sequence[:start]:
        if name not in late:
            allocator.allocate(name, size)
    for step in range(steps):
        living: dict[int, None] = {}
        for name, size in sequence[start:]:
            if size > 0:
                allocator.allocate(name, size)
                living[name] = None
            else:
                allocator.release(name)
                living.pop(name, None)
        if step == 0:
            for name, size in sequence[:start]:
                if name in late:
                    allocator.allocate(name, size)
        for name in living:
            allocator.release(name)
    return Usage(allocator.peak_allocated, allocator.reserved, allocator.segments)
