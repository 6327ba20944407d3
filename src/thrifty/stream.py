"""An endless stream of micro-batches with a position, for methods that draw more samples than they train on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import skip_first_batches


def set_epoch(loader: Any, epoch: int) -> None:
    """Tells the innermost sampler of a prepared loader the epoch, through any number of wrappers.

    accelerate looks one level deep, so that on several processes a run resumed in mid-epoch would repeat the order of
    the first epoch.
    """
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


class SampleStream:
    """Runs over a prepared loader again and again, and remembers how many micro-batches were taken.

    It reuses the parent's own loader, so that the samples come in exactly the order of a run without this stream.

    Args:
        loader: The loader that `accelerate` prepared for this process.
        collator: The run's collator, which may want to know the epoch.
    """

    keeps_position = True  # tells the trainer that no batches have to be skipped for it after a resume

    def __init__(self, loader: Any, collator: Any = None) -> None:
        # Ranks may take different numbers of batches: nothing in the loader may wait for the other ranks. The order
        # needs no synchronisation, since it is seeded by the epoch.
        loader.rng_types = None
        self.loader = loader
        self.dataset = loader.dataset
        self.collator = collator
        self.taken = 0
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> SampleStream:
        # The parent begins an epoch. Without this stream, the loader would now draw a seed for its workers: so that a
        # method which takes every sample trains as if it were not there, the global RNG has to move on here too.
        torch.empty((), dtype=torch.int64).random_()
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._open()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = self._open()
            batch = next(self._iterator)
        self.taken += 1
        return batch

    def _open(self) -> Iterator[Any]:
        epoch, offset = divmod(self.taken, len(self.loader))
        loader: Any = skip_first_batches(self.loader, offset) if offset else self.loader
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        set_epoch(self.loader, epoch)
        if hasattr(self.collator, "set_epoch"):
            self.collator.set_epoch(epoch)
        # Opening a loader draws a seed for its workers. From the global RNG, a resumed run would draw it at another
        # moment.
        getattr(loader, "base_dataloader", loader).generator = torch.Generator().manual_seed(self.taken)
        return iter(loader)

    def seek(self, taken: int) -> None:
        """Goes to the place after `taken` micro-batches without reading them."""
        self.taken = taken
        self._iterator = None
