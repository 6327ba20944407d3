"""One measurement is a real training: its numbers against what is known of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from thrifty.bench.measure import WARM_UP_STEPS, Job, Outcome, measure, some


def job(run: dict[str, Any], **changes: Any) -> Job:
    return Job(**{"kind": "speed", "arm": "x", "run": run, "steps": 8, "seed": 3, "threads": 1, **changes})


@pytest.fixture(scope="module")
def plain(run: dict[str, Any]) -> Outcome:
    return measure(job(run, kind="loss", steps=10, evaluations=2))


def test_counts_and_times(plain: Outcome) -> None:
    assert plain.reason is None
    assert plain.steps == 10
    # The text's last block is shorter, and its padding does not count.
    assert 10 * 2 * 32 - 32 < plain.tokens < 10 * 2 * 32
    assert plain.step_seconds is not None
    assert plain.tokens_per_second == pytest.approx(64 / plain.step_seconds, rel=0.08)
    assert plain.train_seconds >= 7 * 0.5 * plain.step_seconds
    assert [point[0] for point in plain.curve] == [5, 10]
    assert plain.curve[0][2] < plain.curve[1][2] == plain.train_seconds
    assert plain.curve[-1][3] == plain.metrics["eval_loss"]


def test_the_loss_is_that_of_the_same_training_by_thrifty_train(run: dict[str, Any], tmp_path: Any) -> None:
    from thrifty import run as verbs
    from thrifty.config import parse_config

    content = {**run, "seed": 3, "max_steps": 10, "warmup_steps": 0.1, "max_new_tokens": 0, "num_threads": 1}
    result = verbs.train(parse_config({**content, "output_dir": str(tmp_path / "out")}))
    again = measure(job({**run, "seed": 3}, kind="loss", steps=10, evaluations=1))
    assert again.metrics["eval_loss"] == pytest.approx(result.metrics["eval_loss"], abs=1e-9)


def test_the_same_job_gives_the_same_loss(run: dict[str, Any], plain: Outcome) -> None:
    again = measure(job(run, kind="loss", steps=10, evaluations=1))
    assert again.curve[-1][3] == plain.curve[-1][3]
    other = measure(job(run, kind="loss", steps=10, evaluations=1, seed=4))
    assert other.curve[-1][3] != plain.curve[-1][3]


def test_the_peak_counts_the_optimizer_state_to_the_byte(run: dict[str, Any]) -> None:
    """Adam keeps two numbers more a parameter than plain SGD, and one step counter a tensor."""
    from thrifty import tasks
    from thrifty.config import parse_config

    config = parse_config(run)
    model = tasks.load("causal-lm", config.data, model_config=config.model_config, vocab_size=280).model
    count = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    peaks = {}
    for optim in ("sgd", "adamw_torch"):
        found = measure(job({**run, "optim": optim, "per_device_train_batch_size": 8}, kind="memory", steps=3))
        assert found.peak_bytes is not None
        peaks[optim] = found.peak_bytes
    assert peaks["adamw_torch"] - peaks["sgd"] == pytest.approx(8 * count + 4 * tensors, rel=0.02)


def test_checkpointing_lowers_the_peak_and_leaves_the_loss(run: dict[str, Any], plain: Outcome) -> None:
    bigger = {**run, "per_device_train_batch_size": 16}
    whole = measure(job(bigger, kind="memory", steps=3))
    spared = measure(job(bigger, kind="memory", steps=3, methods=("gradient-checkpointing",)))
    assert whole.peak_bytes is not None
    assert spared.peak_bytes is not None
    assert spared.peak_bytes < 0.9 * whole.peak_bytes
    loss = measure(job(run, kind="loss", steps=10, evaluations=1, methods=("gradient-checkpointing",)))
    assert loss.curve[-1][3] == pytest.approx(plain.curve[-1][3], abs=1e-6)


def test_a_refusal_is_a_reason(run: dict[str, Any]) -> None:
    found = measure(job(run, methods=("tf32",)))
    assert "TF32" in str(found.reason)
    assert not found.crashed
    assert "lionn" in str(measure(job(run, methods=("lionn",))).reason)
    no_data = measure(job({**run, "validation_fraction": 0}, kind="loss", evaluations=1, steps=5))
    assert "validation" in str(no_data.reason)


def test_warm_up_is_reported_apart(run: dict[str, Any]) -> None:
    found = measure(job(run, steps=WARM_UP_STEPS + 4))
    assert found.warm_up_seconds is not None
    assert found.warm_up_seconds > 0
    assert Outcome.from_dict(found.to_dict()) == found


def test_the_evaluated_samples_are_spread_over_all() -> None:
    class Rows(list):
        def select(self, indices: list[int]) -> list[int]:
            return [self[i] for i in indices]

    assert some(Rows(range(100)), 4) == [0, 25, 50, 75]
    assert list(some(Rows(range(3)), 4)) == [0, 1, 2]


def test_a_job_is_plain_data(run: dict[str, Any]) -> None:
    import json

    assert json.loads(json.dumps(dataclasses.asdict(job(run))))["steps"] == 8
