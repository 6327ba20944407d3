"""Where an iterable data set stands, so that a resumed run goes on after the same samples.

A map-style set is placed by its indices; an iterable one has to say itself where it is, by `state_dict` and
`load_state_dict` (those of `datasets`, of torchdata, or of the user). Loaders read ahead, so the state is taken when
a batch is put together and kept with that batch; the checkpoint holds the state after the last batch that was trained.

A set without state, one that loader workers read (each in a process of its own), and a shuffle buffer, whose content
`datasets` does not keep, are read again up to the position: exact where the set gives the same samples again, but slow.
"""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import PartialState
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from torch.utils.data import IterableDataset

from thrifty import _hf

DATA_STATE = "thrifty_data_rank{rank}.pt"
"""The member of a checkpoint that holds the position; of rank 0 alone where one stream feeds all processes."""


def is_map_style(dataset: Any) -> bool:
    """Can samples be read by index? (torch's `IterableDataset` inherits a `__getitem__` that only raises.)"""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)


class IterableStream:
    """A prepared loader over an iterable data set, with a position that can be saved and sought.

    Args:
        loader: The loader that `accelerate` prepared for this process.
        samples: Samples that all processes together take with one batch of this loader.
        report: Gets one line where the position has to be sought by reading.
    """

    keeps_position = True  # tells the trainer that no batches have to be skipped for it after a resume

    def __init__(self, loader: Any, *, samples: int, report: Callable[[str], None]) -> None:
        self.loader, self.dataset, self.samples = loader, loader.dataset, samples
        self.epoch, self.taken = 0, 0
        self.position: Any = None
        self._report = report
        self._resume: dict[str, Any] | None = None
        self._noted: deque[Any] = deque()
        self._dispatched = isinstance(loader, DataLoaderDispatcher)
        self.whole = self._dispatched or isinstance(self.dataset, IterableDatasetShard)
        """Whether this process's data set is the stream of all processes, and not a share of its own."""
        self._source: Any = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        self.why_not = why_no_state(self._source, workers=getattr(loader, "num_workers", 0))
        if self.why_not is None:
            self._note_states()

    def _note_states(self) -> None:
        base = getattr(self.loader, "base_dataloader", self.loader)
        collate = base.collate_fn

        def collate_and_note(rows: list[Any]) -> Any:
            self._noted.append(copy.deepcopy(self._source.state_dict()))
            return collate(rows)

        base.collate_fn = collate_and_note

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Tells loader and data set which pass comes next."""
        self.epoch = epoch
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        self._noted.clear()
        self.taken, self.position = 0, None
        left_out = 0
        if resume is not None and resume["epoch"] == self.epoch:
            self.taken = resume["samples"] // self.samples
            if resume["finished"]:
                return  # accelerate's dispatcher raises where a pass holds nothing more
            if resume["state"] is not None and self.why_not is None:
                self.position = resume["state"]
                self._source.load_state_dict(copy.deepcopy(self.position))
            else:
                left_out = self.taken
        iterator = iter(self.loader)
        for _ in range(left_out):
            next(iterator, None)
            self._advance()
        for batch in iterator:
            self.taken += 1
            self._advance()
            yield batch

    def _advance(self) -> None:
        """Takes the state that belongs to the batch given out now; later ones were read ahead."""
        whole_batches = self._dispatched and not self.loader.split_batches
        for _ in range(self._processes() if whole_batches else 1):
            if self._noted:
                self.position = self._noted.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The position: pass, samples of it that were given out, and what the data set says; for `torch.save`."""
        return {
            "version": 1,
            "epoch": self.epoch,
            "samples": self.taken * self.samples,
            "state": self.position,
            "whole": self.whole,
            "finished": bool(self.loader.end_of_dataloader),
        }

    def seek(self, saved: dict[str, Any]) -> None:
        """Makes the next pass go on from a saved position, in that position's own pass."""
        self._resume = saved
        by_reading = saved["state"] is None or self.why_not is not None
        if by_reading and saved["samples"] and not saved["finished"]:
            why = self.why_not or "the checkpoint holds no state of it"
            self._report(
                f"the data set is read again up to sample {saved['samples']} of pass {saved['epoch'] + 1}: {why}"
            )
        elif self.whole and self._processes() > 1 and not saved["finished"]:
            self._report(
                "where the last batch of this pass is too small for all processes, it is filled up with other samples "
                "than in an unbroken run"
            )

    def _processes(self) -> int:
        return PartialState().num_processes


def why_no_state(dataset: Any, *, workers: int) -> str | None:
    """Why a data set cannot say where it is; None where it can."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return "it has no state_dict and load_state_dict"
    if workers > 0:
        return "loader workers read it (dataloader_num_workers=0 keeps its state)"
    if _hf.has_shuffle_buffer(dataset):
        return "the content of its shuffle buffer is not part of its state"
    buffer = io.BytesIO()
    try:
        torch.save(dataset.state_dict(), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        # Whatever a foreign state_dict raises or holds: it is said, and the position is sought in another way.
        return f"its state_dict cannot be kept without pickle ({type(error).__name__})"
    return None
