"""A bench from its options to its measurements: probes, rounds of speed, and runs for the loss, in that order."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Protocol

from thrifty.bench.budget import Plan, loss_runs, plan, timed_steps
from thrifty.bench.measure import MEMORY_STEPS, WARM_UP_STEPS, Job, Kind, Outcome
from thrifty.bench.options import MOST_ARMS, Options
from thrifty.bench.processes import FreshProcesses, StartMethod
from thrifty.bench.progress import Progress
from thrifty.bench.rows import BASELINE, Arm, Row, Tables, candidates
from thrifty.bench.state import State
from thrifty.errors import InputError, ThriftyError
from thrifty.recipe import Recipe

TURN_SECONDS = 0.25
"""How long a process of a round runs before the next one takes its turn."""
PROCESS_BYTES = 2**29
"""What a process needs beside the peak of its training."""
AGAIN = "baseline again"
"""The second run of the baseline in every round: the difference to the first is the machine's noise."""


class Runner(Protocol):
    """Carries out jobs."""

    def run(self, job: Job) -> Outcome:
        """Runs one job and waits for it."""
        ...


class BenchError(ThriftyError):
    """The baseline itself does not run."""


class Session:
    """Measures, keeps every measurement on disk, and goes on where it was.

    Args:
        options: What to measure.
        folder: Where the state is kept.
        fresh: Measure anew.
        method: How processes begin; None chooses for this machine.
        progress: Where to say what happens.
        arms: Fixed arms in place of tables of techniques (the guide, evidence, the bench's own test).
        memory: Whether the memory of fixed arms is measured.
        runner: What carries out a job; fresh processes by default.
    """

    def __init__(
        self,
        options: Options,
        folder: Path,
        *,
        fresh: bool = False,
        method: StartMethod | None = None,
        progress: Progress | None = None,
        arms: list[Arm] | None = None,
        memory: bool = True,
        runner: Runner | None = None,
    ) -> None:
        self.options = options
        fixed = [(arm.id, arm.methods, dict(arm.keys)) for arm in arms or ()]
        self.state = State(folder, {**options.settings(), "arms": fixed}, fresh=fresh)
        self.processes = runner or FreshProcesses(method)
        self.progress = progress or Progress()
        self.arms: list[Arm] = arms or []
        self.tables: Tables | None = None
        self.reasons: dict[str, str] = {}
        """Why an arm did not run."""
        self.plan: Plan | None = None
        self.timed: int | None = None
        """Steps of a speed measurement; None lets their pace decide."""
        self.interrupted = False
        self._fixed = bool(arms)
        self._memory = memory
        self._deadline: float | None = None

    # --- the whole ---

    def run(self) -> None:
        """Measures everything; Ctrl-C ends it early and keeps what is finished.

        Raises:
            BenchError: The baseline does not run.
            InputError: It cannot run as asked, or the time is too short.
        """
        begun = time.monotonic() - float(self.state.notes.get("spent", 0.0))
        try:
            first = self._first(begun)
            self._choose(first)
            self._round(0)
            self._divide(first, begun)
            self._speed()
            self._losses()
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self.state.note("spent", time.monotonic() - begun)
            self.progress.close()

    def outcome(self, kind: str, arm: str, number: int) -> Outcome | None:
        """A finished measurement."""
        return self.state.outcomes.get(f"{kind}/{arm}/{number}")

    @property
    def rows(self) -> list[Row]:
        """The tables' lines so far; fixed arms have none."""
        return self.tables.ordered() if self.tables is not None else []

    @property
    def running(self) -> list[Arm]:
        """The arms that run, the baseline first."""
        return [arm for arm in self.arms if arm.id not in self.reasons]

    # --- the parts ---

    def _first(self, begun: float) -> Outcome:
        """The baseline once with an evaluation: does it run, and how long does it take?"""
        base = self.arms[0] if self._fixed else Arm(BASELINE)
        self.progress.expect(1)
        steps = WARM_UP_STEPS + 6
        quality = self.options.quality
        first = self._measure("loss" if quality else "speed", base, -1, steps=steps, evaluations=1 if quality else 0)
        if first.reason is not None:
            raise (BenchError if first.crashed else InputError)(f"the baseline does not run: {first.reason}")
        return first

    def _choose(self, first: Outcome) -> None:
        """Probes every technique alone and on top of the others; the probe measures the memory."""
        if self._fixed and not self._memory:
            return
        if self._fixed:
            self.progress.expect(len(self.arms))
            for arm in self.arms:
                if arm.id in self.reasons:
                    self.progress.advance()
                    continue
                found = self._measure("memory", arm, 0, steps=MEMORY_STEPS)
                if found.reason is not None:
                    self.reasons[arm.id] = found.reason
            return
        wanted = candidates(self.options.chosen, self.options.own_methods)
        limited = self.options.chosen is None
        tables = self.tables = Tables(wanted, MOST_ARMS if limited else None, self.options.only)
        self.arms = tables.arms
        self.progress.expect(1)
        self._measure("memory", Arm(BASELINE), 0, steps=MEMORY_STEPS, predict=True)
        for arm, row in tables.build():
            reason = refused(arm)
            if reason is None:
                self.progress.expect(1)
                reason = self._measure("memory", arm, 0, steps=MEMORY_STEPS, predict=True).reason
            tables.settle(arm, row, reason)

    def _divide(self, first: Outcome, begun: float) -> None:
        kept = self.state.notes.get("plan")
        if kept is None:
            speed = {arm.id: found for arm in self.running if (found := self.outcome("speed", arm.id, 0)) is not None}
            limit = int(self.options.run.get("max_steps", -1))
            spent = time.monotonic() - begun
            made = plan(
                self.options, speed, [arm.id for arm in self.running], first, spent, limit if limit > 0 else 1000,
                getattr(self.processes, "server_seconds", 0.0),
            )  # fmt: skip
            kept = self.state.note("plan", made.to_dict())
        self.plan = Plan(**kept)
        self.progress.say(f"plan: {self.plan.text}")
        self._deadline = time.monotonic() + self.plan.expected_seconds
        self.progress.expect((self.plan.rounds - 1) * (len(self.running) + 1))

    def _speed(self) -> None:
        assert self.plan is not None
        for number in range(1, self.plan.rounds):
            self._round(number)

    def _round(self, number: int) -> None:
        """Every arm once, the baseline twice; every other round backwards, so that a steady drift cancels."""
        order = [(arm, arm.id) for arm in self.running]
        order.insert((len(order) + 1) // 2, (order[0][0], AGAIN))
        if number == 0:
            self.progress.expect(len(order))
        elif number % 2:
            order.reverse()
        if number and any(f"speed/{name}/{number}" not in self.state.outcomes for _, name in order):
            self._renew()
        steps = WARM_UP_STEPS + self.timed if self.timed else timed_steps(self._pace())
        self._together([(arm, name) for arm, name in order if arm.id not in self.reasons], number, steps)
        for arm, name in order:
            if arm.id in self.reasons:
                self.progress.advance()
                continue
            found = self._measure("speed", arm, number, steps=steps, name=name)
            if found.reason is not None:
                self._drop(arm, found)

    def _renew(self) -> None:
        """Every round has a server of its own: see `FreshProcesses.renew`."""
        renew = getattr(self.processes, "renew", None)
        if renew is not None:
            renew()

    def _together(self, order: list[tuple[Arm, str]], number: int, steps: int) -> None:
        """Measures a round with all its processes taking turns, where they fit into memory beside each other.

        On an accelerator they would share its memory and caches, and each measurement stands alone.
        """
        import psutil
        import torch

        runner = getattr(self.processes, "run_together", None)
        missing = [(arm, name) for arm, name in order if f"speed/{name}/{number}" not in self.state.outcomes]
        if runner is None or not missing or torch.accelerator.is_available():
            return
        peaks = [found.peak_bytes or 0 for arm, _ in missing if (found := self.outcome("memory", arm.id, 0))]
        if sum(peaks) + len(missing) * PROCESS_BYTES > psutil.virtual_memory().available / 2:
            return
        self.progress.begin(f"speed, round {number + 1}", self._left())
        jobs = [self._job("speed", arm, name, number, steps) for arm, name in missing]
        outcomes = runner(jobs, max(1, math.ceil(TURN_SECONDS / self._pace())))
        for (_, name), found in zip(missing, outcomes, strict=True):
            self.state.add(f"speed/{name}/{number}", found)

    def _left(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    def _pace(self) -> float:
        first = self.state.outcomes[f"{'loss' if self.options.quality else 'speed'}/{self.arms[0].id}/-1"]
        assert first.step_seconds is not None
        return first.step_seconds

    def _losses(self) -> None:
        assert self.plan is not None
        if not self.plan.steps:
            return
        base = self.outcome("speed", self.arms[0].id, 0)
        assert base is not None
        lengths = {}
        for arm in self.running:
            found = self._told_apart(arm.id)
            if found is not None:
                lengths[arm.id] = loss_runs(self.plan.steps, found, self._pooled(self.arms[0].id) or base)
        self.state.note("lengths", lengths)
        self.progress.expect(self.plan.seeds * sum(map(len, lengths.values())))
        for seed in range(self.plan.seeds):
            order = self.running if seed % 2 == 0 else self.running[::-1]
            for arm in order:
                for budget, steps in lengths[arm.id].items():
                    if arm.id in self.reasons:
                        self.progress.advance()
                        continue
                    found = self._measure(
                        f"loss-{budget}", arm, seed, steps=steps, evaluations=self.options.evaluations
                    )
                    if found.reason is not None:
                        self._drop(arm, found)

    def _pooled(self, arm: str) -> Outcome | None:
        """The speed measurement of an arm with the median step time and preparation of all its rounds."""
        import statistics

        rounds = self.plan.rounds if self.plan else 1
        found = [one for number in range(rounds) if (one := self.outcome("speed", arm, number)) is not None]
        seconds = [one.step_seconds for one in found if one.step_seconds is not None]
        if not seconds:
            return None
        prepare = statistics.median(one.prepare_seconds for one in found)
        return dataclasses.replace(found[0], step_seconds=statistics.median(seconds), prepare_seconds=prepare)

    def _told_apart(self, arm: str) -> Outcome | None:
        """As `_pooled`; a pace that cannot be told from the baseline's counts as that.

        Otherwise the noise of the timings would give a row more or fewer steps at equal seconds than it deserves.
        """
        from thrifty.bench.result import paired

        found, base = self._pooled(arm), self._pooled(self.arms[0].id)
        if found is None or base is None or base.step_seconds is None or arm == self.arms[0].id:
            return found
        ratio = paired(self, arm, self.arms[0].id)
        if ratio is None or ratio.count < 2 or ratio.excludes(1.0) or not base.tokens or not found.tokens:
            return found
        tokens = (found.tokens / found.steps) / (base.tokens / base.steps)
        return dataclasses.replace(found, step_seconds=base.step_seconds * tokens)

    def _drop(self, arm: Arm, found: Outcome) -> None:
        if arm is self.arms[0]:
            raise (BenchError if found.crashed else InputError)(f"the baseline does not run: {found.reason}")
        self.reasons[arm.id] = str(found.reason)

    def _measure(
        self,
        kind: str,
        arm: Arm,
        number: int,
        *,
        steps: int,
        evaluations: int = 0,
        name: str | None = None,
        predict: bool = False,
    ) -> Outcome:
        """One measurement, taken from the state where it is there already.

        Args:
            kind: First part of its name in the state.
            arm: What to measure.
            number: The round or seed; added to the run file's seed.
            steps: Optimizer steps.
            evaluations: Any make it a measurement of the loss.
            name: Second part of its name, where that is not the arm's id.
            predict: Whether the planner predicts the peak.
        """
        key = f"{kind}/{name or arm.id}/{number}"
        if key not in self.state.outcomes:
            self.progress.begin(f"{kind.partition('-')[0]} of {name or arm.id}", self._left())
            family: Kind = "memory" if kind == "memory" else "loss" if evaluations else "speed"
            job = self._job(family, arm, name or arm.id, number, steps, evaluations=evaluations, predict=predict)
            self.state.add(key, self.processes.run(job))
        self.progress.advance()
        return self.state.outcomes[key]

    def _job(
        self, kind: Kind, arm: Arm, name: str, number: int, steps: int, *, evaluations: int = 0, predict: bool = False
    ) -> Job:
        return Job(
            kind=kind,
            arm=name,
            run={**self.options.run, **arm.keys},
            methods=arm.methods,
            seed=int(self.options.run.get("seed", 42)) + max(0, number),
            steps=steps,
            evaluations=evaluations,
            eval_samples=self.options.eval_samples,
            threads=self.options.threads,
            predict=predict,
        )


def refused(arm: Arm) -> str | None:
    """Why a recipe cannot be: its methods exclude each other. None where it can."""
    try:
        Recipe.parse(list(arm.methods))
    except InputError as error:
        return str(error)
    return None
