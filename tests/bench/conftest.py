"""A tiny run file's content, and outcomes without a training where only the arithmetic is tested."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from small import run_values
from thrifty.bench.measure import Job, Outcome


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THRIFTY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of a run file that trains a step in a few milliseconds."""
    return {
        **run_values(tmp_path_factory.mktemp("data"), layers=2),
        "task": "causal-lm",
        "max_steps": 40,
        "learning_rate": 1e-2,
        "warmup_steps": 4,
        "use_cpu": True,
        "seed": 7,
    }


class Simulated:
    """A machine without trainings: step times of known ratios with noise, for the arithmetic alone."""

    def __init__(self, pace: Callable[[Job], float], noise: float = 0.01, seed: int = 0) -> None:
        self.pace, self.noise, self.draw = pace, noise, random.Random(seed)
        self.jobs: list[Job] = []
        self.stop_after: int | None = None

    def run(self, job: Job) -> Outcome:
        if self.stop_after is not None and len(self.jobs) >= self.stop_after:
            raise KeyboardInterrupt
        self.jobs.append(job)
        seconds = self.pace(job) * (1 + self.draw.gauss(0, self.noise))
        tokens = 64 * job.steps
        found = Outcome(
            step_seconds=seconds, tokens_per_second=64 / seconds, tokens=tokens, steps=job.steps,
            train_seconds=seconds * job.steps, warm_up_seconds=3 * seconds, start_seconds=0.1, peak_bytes=1000,
        )  # fmt: skip
        if job.kind == "loss":
            found.evaluation_seconds = 0.01
            points = [max(1, job.steps * i // job.evaluations) for i in range(1, job.evaluations + 1)]
            found.curve = [(s, 64 * s, s * seconds, 5 - 2 * s / (s + 20) + 0.01 * (job.seed % 3)) for s in points]
            found.metrics = {"eval_loss": found.curve[-1][3]}
        return found
