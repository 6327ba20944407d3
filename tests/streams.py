"""Iterable data sets that tests train on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

import tiny

COUNT = 11  # with 2 a batch the last batch of a pass is smaller


class Stream(IterableDataset):
    """Samples in an order that depends on the pass; counts what is read."""

    def __init__(self, count: int = COUNT) -> None:
        self.count, self.epoch, self.read = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __iter__(self) -> Iterator[Any]:
        for index in self.order():
            self.read += 1
            yield tiny.text_samples()[index]


class Stateful(Stream):
    """The same with a position. Its state is handed out live, as careless implementations do."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self.state = {"next": 0}
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for place in range(start, self.count):
            self.read += 1
            self.state["next"] = place + 1
            yield tiny.text_samples()[self.order()[place]]

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["next"]


class Sized(Stateful):
    def __len__(self) -> int:
        return self.count
