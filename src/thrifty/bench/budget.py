"""How many rounds and steps fit into the time that the user gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thrifty.bench.measure import WARM_UP_STEPS, Outcome
from thrifty.bench.options import FEWEST_ROUNDS, FEWEST_STEPS, MOST_ROUNDS, Options
from thrifty.errors import InputError

TIMED_SECONDS = 1.5
"""A process times steps for about so long, and no fewer than `FEWEST_TIMED` of them, or of slow steps `SLOW_TIMED`."""
FEWEST_TIMED, MOST_TIMED = 20, 100
SLOW_TIMED, SLOW_SECONDS = 8, 4.0
SAME_LENGTH = 0.03
"""Runs whose lengths differ by less than this share are one run: equal tokens are then equal seconds."""
_SPEED_SHARE = 0.4
_RESERVE = 0.93  # what is planned of the time: the machine may become slower, and the report takes some seconds


@dataclass(frozen=True)
class Plan:
    """What will be measured.

    Attributes:
        rounds: Of speed.
        seeds: Of the losses.
        steps: Steps of the baseline's runs for the loss; 0 where none are made.
        expected_seconds: Of everything from here on.
        text: For people.
    """

    rounds: int
    seeds: int
    steps: int
    expected_seconds: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the state file."""
        return asdict(self)


def timed_steps(step_seconds: float) -> int:
    """Steps of a speed run, warm-up included, from the baseline's first measurement."""
    fewest = min(FEWEST_TIMED, max(SLOW_TIMED, math.ceil(SLOW_SECONDS / step_seconds)))
    return WARM_UP_STEPS + min(MOST_TIMED, max(fewest, math.ceil(TIMED_SECONDS / step_seconds)))


def steps_for_tokens(steps: int, row: Outcome, baseline: Outcome) -> int:
    """Steps after which a row has trained on as many tokens as the baseline in `steps`."""
    ours, theirs = row.tokens / max(1, row.steps), baseline.tokens / max(1, baseline.steps)
    return max(1, round(steps * theirs / ours)) if ours > 0 else steps


def steps_for_seconds(steps: int, row: Outcome, baseline: Outcome) -> int:
    """Steps that a row makes in the time that the baseline needs for `steps`, its preparation included."""
    assert row.step_seconds is not None
    assert baseline.step_seconds is not None
    seconds = steps * baseline.step_seconds - max(0.0, row.prepare_seconds - baseline.prepare_seconds)
    return max(1, round(seconds / row.step_seconds))


def same_length(first: int, second: int) -> bool:
    """Whether two runs are so alike in length that one stands for both."""
    return abs(first - second) <= max(1, SAME_LENGTH * second)


def loss_runs(steps: int, row: Outcome, baseline: Outcome) -> dict[str, int]:
    """The runs that a row needs, with their steps: one at equal tokens, and one at equal seconds if that differs."""
    tokens, seconds = steps_for_tokens(steps, row, baseline), steps_for_seconds(steps, row, baseline)
    return {"tokens": tokens} if same_length(seconds, tokens) else {"tokens": tokens, "seconds": seconds}


def plan(
    options: Options,
    speed: Mapping[str, Outcome],
    arms: Sequence[str],
    first: Outcome,
    spent_seconds: float,
    limit: int,
    server_seconds: float = 0.0,
) -> Plan:
    """Divides the time that is left.

    Args:
        options: What was asked for.
        speed: One speed measurement of every arm that runs.
        arms: These arms, the baseline first.
        first: A measurement of the baseline with an evaluation.
        spent_seconds: Since the bench began.
        limit: The most steps that the run file allows.
        server_seconds: What a round takes before its first process can begin.

    Raises:
        InputError: Even the fewest rounds and steps do not fit.
    """
    base = speed[arms[0]]
    round_seconds = server_seconds + sum(_seconds(speed[arm]) for arm in [*arms, arms[0]])

    def loss_seconds(steps: int) -> float:
        total = 0.0
        for arm in arms:
            row = speed[arm]
            assert row.step_seconds is not None
            for length in loss_runs(steps, row, base).values():
                evaluations = (options.evaluations + 1) * first.evaluation_seconds
                total += row.start_seconds + _WAIT + length * row.step_seconds + evaluations
        return options.seeds * total

    left = math.inf if options.minutes is None else 60 * options.minutes * _RESERVE - spent_seconds
    rounds = options.rounds
    if rounds is None:
        share = _SPEED_SHARE if options.quality else 1.0
        fitting = MOST_ROUNDS if math.isinf(left) else 1 + math.floor(share * left / round_seconds)
        rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS, fitting))
    speed_seconds = (rounds - 1) * round_seconds
    if not options.quality:
        return Plan(rounds, 0, 0, speed_seconds, f"{rounds} rounds of speed and no losses")
    steps = options.steps or limit
    if options.steps is None:
        while steps > FEWEST_STEPS and speed_seconds + loss_seconds(steps) > left:
            steps = max(FEWEST_STEPS, min(steps - 1, int(steps * 0.97)))
    needed = speed_seconds + loss_seconds(steps)
    if needed > left / _RESERVE and options.steps is None:
        minutes = math.ceil((spent_seconds + needed) / 60 / _RESERVE) + 1
        raise InputError(
            f"{len(arms)} recipes, {rounds} rounds and {options.seeds} seeds of {steps} steps do not fit",
            key="--minutes", value=options.minutes, fix=f"--minutes {minutes}, or fewer --methods",
        )  # fmt: skip
    shrunk = (
        f", shortened from {limit:,} to fit into {options.minutes:g} minutes"
        if steps < limit and left < math.inf
        else ""
    )
    text = f"{rounds} rounds of speed, {options.seeds} seeds of {steps:,} steps{shrunk}"
    return Plan(rounds, options.seeds, steps, needed, text)


_WAIT = 0.3
"""Beginning and ending a process."""


def _seconds(row: Outcome) -> float:
    return row.start_seconds + _WAIT + row.train_seconds + max(0.0, (row.warm_up_seconds or 0.0))
