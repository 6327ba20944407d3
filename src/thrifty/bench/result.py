"""From measurements to what may be said: medians, intervals and verdicts, as plain data for tables, pages and files."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from thrifty.bench.measure import WARM_UP_STEPS, Outcome
from thrifty.bench.rows import Arm, name_of
from thrifty.bench.session import AGAIN, Session
from thrifty.bench.statistics import (
    LOSS_CONFIDENCE,
    SPEED_CONFIDENCE,
    Interval,
    difference,
    ratio,
    reached,
    verdict,
)
from thrifty.method import registry

FORMAT = "thrifty-bench/1"
Result = dict[str, Any]


def result_of(session: Session) -> Result:
    """Everything that the bench found, ready for JSON."""
    options, plan = session.options, session.plan
    again = _values(session, AGAIN, "token_seconds")
    first = _values(session, session.arms[0].id, "token_seconds") if session.arms else {}
    both = sorted(set(again) & set(first))
    noise = ratio([again[n] for n in both], [first[n] for n in both]) if both else None
    return {
        "format": FORMAT,
        "label": "measured",
        "name": options.name,
        **circumstances(options.threads),
        "complete": plan is not None and not session.interrupted,
        "plan": plan.to_dict() if plan else None,
        "seconds": session.state.notes.get("spent"),
        "settings": {
            "warm_up_steps": WARM_UP_STEPS,
            "evaluations": options.evaluations,
            "eval_samples": options.eval_samples,
            "speed_confidence": SPEED_CONFIDENCE,
            "loss_confidence": LOSS_CONFIDENCE,
        },
        "run": shareable(options.run),
        "noise": plain(noise),
        "noise_rounds": [again[n] / first[n] for n in both],
        "rows": _rows(session),
        "arms": {arm.id: _arm(session, arm) for arm in session.arms},
        "left_out": session.tables.left_out if session.tables else [],
    }


def circumstances(threads: int | None = None) -> dict[str, Any]:
    """Date, machine and versions: what every file with numbers says."""
    from thrifty.hardware.detect import detect
    from thrifty.report.summary import versions

    hardware = detect()
    machine = {**hardware.to_dict(), "accelerators": [asdict(device) for device in hardware.accelerators]}
    for part in (machine, *machine["accelerators"]):
        part.pop("free_bytes", None)  # of the moment, not of the machine
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {**machine, "threads": threads or hardware.threads, "platform": platform.platform()},
        "versions": versions(),
    }


def shareable(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run file's content without the folders of this machine."""
    names = ("train_file", "validation_file", "model_name_or_path", "tokenizer_name_or_path")
    own = {key: Path(run[key]).name for key in names if key in run and Path(str(run[key])).is_absolute()}
    return {**run, **own}


def _rows(session: Session) -> list[dict[str, Any]]:
    rows, before = [], {}
    for row in session.rows:
        reason = row.reason or (session.reasons.get(row.arm) if row.arm else None)
        entry = {**row.to_dict(), "reason": reason}
        if row.arm is not None and reason is None:
            last = before.get(row.table)
            if row.table == "additive" and last is not None:
                entry["against_previous"] = {
                    "speed": plain(inverse(paired(session, row.arm, last))),
                    "peak": _change(_peak(session, row.arm), _peak(session, last)),
                }
            before[row.table] = row.arm
        rows.append(entry)
    return rows


def _arm(session: Session, arm: Arm) -> dict[str, Any]:
    base = session.arms[0].id
    entry: dict[str, Any] = {
        "methods": list(arm.methods),
        "keys": dict(arm.keys),
        "reason": session.reasons.get(arm.id),
        "peak_bytes": _peak(session, arm.id),
        "peak_change": _change(_peak(session, arm.id), _peak(session, base)),
        **_predicted(session, arm.id),
        "emulated": _emulated(session, arm),
    }
    speed = [found for found in _speed(session, arm.id).values() if found.step_seconds is not None]
    if speed:
        steps = [float(found.step_seconds or 0) for found in speed]
        slower = paired(session, arm.id, base) if arm.id != base else None
        entry |= {
            "step_seconds": statistics.median(steps),
            "tokens_per_second": statistics.median(float(found.tokens_per_second or 0) for found in speed),
            "rounds": len(speed),
            "start_seconds": statistics.median(found.start_seconds for found in speed),
            "prepare_seconds": statistics.median(found.prepare_seconds for found in speed),
            "warm_up_extra_seconds": statistics.median(_extra(found) for found in speed),
            "whole_schedule": all(found.whole_schedule for found in speed),
            "step_ratio": plain(paired(session, arm.id, base, "step_seconds") if slower else None),
            "speed": plain(inverse(slower)),
            "verdict": verdict(slower),
        }
    return entry | _losses(session, arm.id, base)


def _extra(found: Outcome) -> float:
    """What the first steps took beyond the pace of the others: compilation, allocation."""
    return max(0.0, float(found.warm_up_seconds or 0.0) - WARM_UP_STEPS * float(found.step_seconds or 0.0))


def _losses(session: Session, arm: str, base: str) -> dict[str, Any]:
    seeds = session.plan.seeds if session.plan else 0
    theirs = {seed: found for seed in range(seeds) if (found := _good(session, "loss-tokens", base, seed))}
    entry: dict[str, Any] = {"curves": []}
    lengths = session.state.notes.get("lengths", {}).get(arm, {})
    for budget in ("tokens", "seconds"):
        # Where a row needs as many steps for equal tokens as for equal seconds, one run is both.
        kind = f"loss-{budget if budget in lengths else 'tokens'}"
        ours = {seed: found for seed in theirs if (found := _good(session, kind, arm, seed))}
        if not ours:
            continue
        losses = [found.curve[-1][3] for found in ours.values()]
        entry[f"loss_at_equal_{budget}"] = {
            "median": statistics.median(losses),
            "seeds": losses,
            "steps": [found.steps for found in ours.values()],
            "train_seconds": [found.train_seconds for found in ours.values()],
            "metrics": {
                name: statistics.median(found.metrics[name] for found in ours.values())
                for name in next(iter(ours.values())).metrics
            },
            "difference": None
            if arm == base
            else plain(difference(losses, [theirs[seed].curve[-1][3] for seed in ours])),
        }
        if kind == f"loss-{budget}":
            entry["curves"] += [
                {"budget": budget, "seed": seed, "points": [list(point) for point in found.curve]}
                for seed, found in ours.items()
            ]
    if theirs and entry["curves"]:
        entry["time_to_baseline_loss"] = _time_to_loss(session, arm, theirs)
    return entry


def _time_to_loss(session: Session, arm: str, theirs: dict[int, Outcome]) -> dict[str, Any]:
    """Seconds until the baseline's final loss of the same seed, in whichever of the arm's runs got there first."""
    ours, base, missed = [], [], 0
    lengths = session.state.notes.get("lengths", {}).get(arm, {})
    for seed, other in theirs.items():
        loss = other.curve[-1][3]
        runs = [found for budget in lengths if (found := _good(session, f"loss-{budget}", arm, seed))]
        times = [t for run in runs if (t := reached([(p[2], p[3]) for p in run.curve], loss)) is not None]
        if times:
            ours.append(min(times))
            base.append(other.train_seconds)
        elif runs:
            missed += 1
    return {
        "seconds": statistics.median(ours) if ours else None,
        "not_reached": missed,
        "ratio": plain(ratio(ours, base, LOSS_CONFIDENCE)) if ours else None,
    }


def _good(session: Session, kind: str, arm: str, number: int) -> Outcome | None:
    found = session.outcome(kind, arm, number)
    return found if found is not None and found.reason is None and found.curve else None


def _speed(session: Session, arm: str) -> dict[int, Outcome]:
    """By round."""
    rounds = session.plan.rounds if session.plan else 1
    return {n: one for n in range(rounds) if (one := session.outcome("speed", arm, n)) and one.reason is None}


def _values(session: Session, arm: str, what: str) -> dict[int, float]:
    values = {}
    for number, found in _speed(session, arm).items():
        if what == "step_seconds" and found.step_seconds:
            values[number] = found.step_seconds
        elif what == "token_seconds" and found.tokens_per_second:
            values[number] = 1 / found.tokens_per_second
    return values


def paired(session: Session, arm: str, other: str, what: str = "token_seconds") -> Interval | None:
    """Time of `arm` over that of `other`, round by round; the baseline's is the geometric mean of its two runs."""
    ours, theirs = _values(session, arm, what), _values(session, other, what)
    if other == session.arms[0].id:
        again = _values(session, AGAIN, what)
        theirs = {n: (value * again.get(n, value)) ** 0.5 for n, value in theirs.items()}
    both = sorted(set(ours) & set(theirs))
    return ratio([ours[n] for n in both], [theirs[n] for n in both]) if both else None


def inverse(found: Interval | None) -> Interval | None:
    """The ratio of rates from that of times."""
    if found is None:
        return None
    low = 1 / found.high if found.high > 0 else 0.0
    high = 1 / found.low if found.low > 0 else float("inf")
    return Interval(1 / found.median, low, high, found.count, found.confidence)


def _peak(session: Session, arm: str) -> int | None:
    found = session.outcome("memory", arm, 0)
    return found.peak_bytes if found is not None and found.reason is None else None


def _predicted(session: Session, arm: str) -> dict[str, Any]:
    """The planner's peak, and the measured one over it, less one; or why there is none."""
    found = session.outcome("memory", arm, 0)
    if found is None or found.reason is not None:
        return {}
    if found.not_predicted is not None:
        return {"not_predicted": found.not_predicted}
    if found.predicted_bytes is None:
        return {}
    error = _change(found.peak_bytes, found.predicted_bytes)
    return {"predicted_bytes": found.predicted_bytes, "prediction_error": error}


def _emulated(session: Session, arm: Arm) -> dict[str, str]:
    """The methods that only do as if on the device that was measured, and what that means."""
    found = next((one for kind in ("memory", "speed") if (one := session.outcome(kind, arm.id, 0))), None)
    if found is None:
        return {}
    names = [name_of(item) for item in arm.methods]
    reasons = {name: registry.get(name).spec.emulated.get(found.device) for name in names if name in registry.names()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _change(value: int | None, base: int | None) -> float | None:
    return value / base - 1 if value is not None and base else None


def plain(found: Interval | None) -> dict[str, Any] | None:
    return found.to_dict() if found is not None else None


def faults(session: Session) -> Sequence[str]:
    """The measurements that crashed instead of being refused."""
    return [f"{key}: {found.reason}" for key, found in session.state.outcomes.items() if found.crashed]
