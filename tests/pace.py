"""What something costs, as a share of a training step: on any machine, and whatever else runs there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import tiny


def share_of_a_step(call: Callable[[], Any], calls: int = 50) -> float:
    """Processor time of a call over that of a forward and backward pass of a model with two small layers.

    The median of five turns, in each of which both are measured.
    """
    model = tiny.llama()
    ids = torch.arange(64).reshape(4, 16) % tiny.VOCABULARY

    def seconds(run: Callable[[], Any], times: int) -> float:
        start = time.thread_time()
        for _ in range(times):
            run()
        return (time.thread_time() - start) / times

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    step(), call()
    return statistics.median(seconds(call, calls) / seconds(step, 5) for _ in range(5))
