"""Evidence: one technique against its baseline, each with a schedule of its own that decays fully, at equal seconds.

Kaddour et al., "No Train No Gain" (2023) found that the gains of several techniques vanish against such a baseline. So
a claim about a technique is an evidence file, which anybody can run again:

    name: muon
    claim: needs fewer steps than AdamW          # for people
    run: ../runs/lm.yaml                         # or the keys themselves
    seconds: 60                                  # of training, for each run of both sides
    baseline: {learning_rate: 4e-3}              # keys and methods of the baseline
    arm: {methods: [muon]}                       # keys and methods of the technique
    tune: {learning_rate: [2e-3, 4e-3, 8e-3]}    # both sides choose among these, by a seed of its own;
                                                 # tune_arm gives the technique other values

The paces of both sides are measured in alternation, each side is given the number of steps that fits into the seconds,
and the runs alternate by seed. Every measurement is kept, so that a killed run goes on.

Evidence files with the same baseline train it once: its losses follow from its steps alone, and what a step costs is
measured anew beside each technique. These runs are kept in a folder beside the bench's own.
"""

from __future__ import annotations

import statistics as numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thrifty.bench import tables
from thrifty.bench.budget import Plan
from thrifty.bench.charts import Curve
from thrifty.bench.html import curves_entry, render
from thrifty.bench.measure import Outcome
from thrifty.bench.options import Options, read_run
from thrifty.bench.processes import StartMethod
from thrifty.bench.result import circumstances, inverse, paired, plain, shareable
from thrifty.bench.rows import BASELINE, Arm, label_of
from thrifty.bench.session import Session
from thrifty.bench.state import State, fingerprint
from thrifty.bench.statistics import LOSS_CONFIDENCE, difference, ratio, reached, verdict
from thrifty.config import yaml_text
from thrifty.errors import InputError, did_you_mean
from thrifty.report import text

FORMAT = "thrifty-evidence/1"
TUNING_SEED = 1000
"""Added to the seed: what was chosen by a seed must not be judged by it."""


@dataclass(kw_only=True)
class Evidence:
    """An evidence file.

    Attributes:
        name: Of the technique or the claim.
        run: Path of a run file beside this one, or its keys; None is the bench's own.
        arm, baseline: Keys of a run file, `methods` among them.
        claim, source: For people.
        published: What the source measured, in its own words or figures, to stand beside what is measured here.
        seconds: Of training, for each run.
        seeds: How many; 0 measures speed and memory alone.
        tune: Keys with the values to choose from, for both sides.
        tune_arm: The same for the arm alone, in place of `tune`.
        rounds: How often the paces are measured.
        timed_steps: Steps of each such measurement, more of them where the technique changes its pace during a run;
            None for about two seconds of them.
        evaluations: During a run.
        eval_samples: Validation samples.
    """

    name: str
    arm: Mapping[str, Any]
    run: str | Mapping[str, Any] | None = None
    baseline: Mapping[str, Any] = field(default_factory=dict)
    claim: str = ""
    source: str = ""
    published: str = ""
    seconds: float = 60.0
    seeds: int = 3
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tune_arm: Mapping[str, Sequence[Any]] | None = None
    rounds: int = 5
    timed_steps: int | None = None
    evaluations: int = 10
    eval_samples: int = 256

    def choices(self, *, arm: bool) -> list[dict[str, Any]]:
        """Every combination of the values that a side chooses from; none where nothing is tuned."""
        found: list[dict[str, Any]] = [{}]
        tuned = self.tune_arm if arm and self.tune_arm is not None else self.tune
        for key, values in tuned.items():
            found = [{**one, key: value} for one in found for value in values]
        return found if tuned else []


def read(path: str | Path, *, seeds: int | None = None) -> Evidence:
    """Reads an evidence file.

    Raises:
        InputError: It is missing, or a key or value is wrong.
    """
    path = Path(path).expanduser()
    values = yaml_text.read_mapping(path)
    known = list(Evidence.__dataclass_fields__)
    for key in values:
        if key not in known:
            raise InputError(
                f"{path.name} has an unknown key{did_you_mean(key, known)}", key=key, value=values[key],
                fix=f"one of {', '.join(known)}",
            )  # fmt: skip
    for key in ("name", "arm"):
        if not values.get(key):
            raise InputError(f"is missing in {path.name}", key=key, fix="see docs/bench.md")
    for key in ("arm", "baseline", "tune", "tune_arm"):
        if not isinstance(values.get(key, {}), Mapping):
            raise InputError("must be a mapping", key=key, value=values[key], fix=f"{key}: {{key: value}}")
    for key, least in (
        ("seconds", 0.5),
        ("seeds", 0),
        ("rounds", 1),
        ("timed_steps", 1),
        ("evaluations", 1),
        ("eval_samples", 1),
    ):
        value = values.get(key, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise InputError("must be a number that is large enough", key=key, value=value, fix=f"{least} or more")
    for key, choices in {**values.get("tune", {}), **values.get("tune_arm", {})}.items():
        if not isinstance(choices, list) or not choices:
            raise InputError("must be a list of values", key=f"tune.{key}", value=choices, fix="[1e-3, 2e-3]")
    if isinstance(values.get("run"), str):
        values["run"] = str((path.parent / values["run"]).resolve())
    return Evidence(**{**values, **({"seeds": seeds} if seeds is not None else {})})


class EvidenceSession(Session):
    """Measures the paces, tunes, and trains both sides at equal seconds."""

    def __init__(self, evidence: Evidence, options: Options, folder: Path, **given: Any) -> None:
        self.evidence = evidence
        sides = [_side(BASELINE, evidence.baseline), _side(evidence.name, evidence.arm)]
        super().__init__(options, folder, arms=sides, **given)
        self.timed = evidence.timed_steps
        own = {
            **options.settings(), "seconds": evidence.seconds, "baseline": dict(evidence.baseline),
            "more": evidence.choices(arm=False), "rounds": None,
        }  # fmt: skip
        place = folder.parent / f"baseline-{fingerprint(own)[:6]}"
        self.shared = State(place, own, fresh=bool(given.get("fresh")))
        """The baseline's runs, which other evidence files with the same baseline use too."""

    def _divide(self, first: Outcome, begun: float) -> None:
        for arm in self.arms:
            if arm.id in self.reasons:
                raise InputError(f"'{arm.id}' does not run: {self.reasons[arm.id]}", key="arm")
        tried = sum(len(self.evidence.choices(arm=arm)) for arm in (False, True)) if self.evidence.seeds else 0
        runs = 2 * self.evidence.seeds + tried - len(self.shared.outcomes)
        seconds = runs * self.evidence.seconds
        made = f"{self.evidence.seeds} seeds of {self.evidence.seconds:g} s for both sides"
        self.plan = Plan(self.evidence.rounds, self.evidence.seeds, 0, seconds, made)
        self.progress.say(f"plan: {made}, in all {text.duration(seconds)} of training")
        self.progress.expect((self.evidence.rounds - 1) * 3 + runs)

    def _losses(self) -> None:
        if not self.evidence.seeds:
            return
        chosen = [self._tuned(arm) for arm in self.arms]
        for seed in range(self.evidence.seeds):
            for arm in chosen if seed % 2 == 0 else chosen[::-1]:
                found = self._train(arm, f"loss-{arm.id}", seed)
                if found.reason is not None:
                    raise InputError(f"'{arm.id}' failed in its run: {found.reason}", key="arm")
        self.state.note("chosen", [dict(arm.keys) for arm in chosen])

    def _tuned(self, arm: Arm) -> Arm:
        best: tuple[float, Arm] | None = None
        choices = self.evidence.choices(arm=arm is self.arms[1])
        if len(choices) == 1:
            return Arm(arm.id, arm.methods, {**arm.keys, **choices[0]})
        for choice in choices:
            tried = Arm(arm.id, arm.methods, {**arm.keys, **choice})
            label = ",".join(f"{key}={value}" for key, value in choice.items())
            found = self._train(tried, f"tune-{arm.id}-{label}", TUNING_SEED)
            # A value with which it diverges is not chosen; that is a result, not a fault.
            if found.reason is None and found.curve and (best is None or found.curve[-1][3] < best[0]):
                best = (found.curve[-1][3], tried)
        if best is None and choices:
            raise InputError(f"'{arm.id}' trains with none of these values", key="tune", value=choices)
        return best[1] if best is not None else arm

    def steps(self) -> dict[str, int]:
        """Steps of both sides that take equally long, the preparation of the methods counted.

        The baseline's are those that fit into the seconds, or those that it was trained with already.
        """
        base, arm = (self._told_apart(side.id) for side in self.arms)
        assert base is not None
        assert arm is not None
        assert base.step_seconds is not None
        assert arm.step_seconds is not None
        count = self.shared.notes.get("steps")
        if count is None:
            fitting = (self.evidence.seconds - base.prepare_seconds) / base.step_seconds
            count = self.shared.note("steps", max(1, round(fitting)))
            self.shared.note("step_seconds", base.step_seconds)
        seconds = int(count) * base.step_seconds + base.prepare_seconds - arm.prepare_seconds
        return {self.arms[0].id: int(count), self.arms[1].id: max(1, round(seconds / arm.step_seconds))}

    @property
    def drift(self) -> float:
        """The machine's pace now over that when the baseline was trained, as the baseline's step time."""
        base, then = self._pooled(self.arms[0].id), self.shared.notes.get("step_seconds")
        return 1.0 if base is None or base.step_seconds is None or not then else base.step_seconds / float(then)

    def _train(self, arm: Arm, kind: str, seed: int) -> Outcome:
        kept = self.state.notes.get("steps") or self.state.note("steps", self.steps())
        key, shared = f"{kind}/{arm.id}/{seed}", arm.id == self.arms[0].id
        if shared and key in self.shared.outcomes and key not in self.state.outcomes:
            self.state.add(key, self.shared.outcomes[key])
        found = self._measure(kind, arm, seed, steps=int(kept[arm.id]), evaluations=self.evidence.evaluations)
        if shared and key not in self.shared.outcomes:
            self.shared.add(key, found)
        return found


def _side(name: str, keys: Mapping[str, Any]) -> Arm:
    own = dict(keys)
    return Arm(name, tuple(own.pop("methods", ())), own)


def result_of(session: Session) -> dict[str, Any]:
    """What was found, ready for JSON."""
    assert isinstance(session, EvidenceSession)
    evidence, base, arm = session.evidence, *session.arms
    runs = {
        side.id: {s: found for s in range(evidence.seeds) if (found := session.outcome(f"loss-{side.id}", side.id, s))}
        for side in session.arms
    }
    both = [seed for seed in runs[base.id] if seed in runs[arm.id]]
    ours = [runs[arm.id][seed].curve[-1][3] for seed in both]
    theirs = [runs[base.id][seed].curve[-1][3] for seed in both]
    change = difference(ours, theirs) if both else None
    times = [
        reached([(p[2], p[3]) for p in runs[arm.id][seed].curve], loss) for seed, loss in zip(both, theirs, strict=True)
    ]
    drift = session.drift  # of the machine, since the baseline was trained
    pairs = [
        (t, drift * runs[base.id][seed].train_seconds) for seed, t in zip(both, times, strict=True) if t is not None
    ]
    slower, step = paired(session, arm.id, base.id), paired(session, arm.id, base.id, "step_seconds")
    chosen = session.state.notes.get("chosen", [dict(side.keys) for side in session.arms])
    return {
        "format": FORMAT,
        "label": "measured",
        "name": evidence.name,
        **circumstances(session.options.threads),
        "complete": len(both) == evidence.seeds and not session.interrupted,
        "claim": evidence.claim,
        "source": evidence.source,
        "published": evidence.published,
        "run": shareable(session.options.run),
        "seconds": evidence.seconds,
        "seeds": len(both),
        "tuned": {"baseline": evidence.choices(arm=False), "arm": evidence.choices(arm=True)},
        "baseline": _described(session, base, runs[base.id], chosen[0]),
        "arm": _described(session, arm, runs[arm.id], chosen[1]),
        "difference": plain(change),
        "verdict": _verdict(change),
        "drift": drift,
        "time_to_baseline_loss": {
            "not_reached": len(times) - len(pairs),
            "ratio": plain(ratio([a for a, _ in pairs], [b for _, b in pairs], LOSS_CONFIDENCE)) if pairs else None,
        },
        "step_time_ratio": plain(step),
        "rate_ratio": plain(inverse(step)),
        "speed": verdict(slower),
    }


def _verdict(change: Any) -> str:
    if change is None or change.count < 2:
        return "not measured"
    return "no difference" if not change.excludes(0.0) else "better" if change.high < 0 else "worse"


def _described(session: Session, side: Arm, runs: Mapping[int, Outcome], keys: Mapping[str, Any]) -> dict[str, Any]:
    memory = session.outcome("memory", side.id, 0)
    found = list(runs.values())
    return {
        "methods": list(side.methods),
        "keys": dict(keys),
        "peak_bytes": memory.peak_bytes if memory is not None else None,
        "losses": [one.curve[-1][3] for one in found],
        "steps": [one.steps for one in found],
        "tokens": [one.tokens for one in found],
        "train_seconds": [one.train_seconds for one in found],
        "metrics": {
            name: numbers.median(one.metrics[name] for one in found) for name in (found[0].metrics if found else {})
        },
        "curves": [[list(point) for point in one.curve] for one in found],
    }


def header() -> list[str]:
    """Columns of a table of evidence."""
    return ["technique", "against", "seconds a run", "loss", "baseline's loss", "difference", "verdict", "peak memory",
            "step time", "time to the baseline's loss"]  # fmt: skip


def cells(result: Mapping[str, Any]) -> list[str]:
    """One row of that table."""
    arm, base, change = result["arm"], result["baseline"], result["difference"]
    memory = text.size(arm["peak_bytes"]) if arm["peak_bytes"] else tables.DASH
    if arm["peak_bytes"] and base["peak_bytes"]:
        memory += f" ({tables.percent(arm['peak_bytes'] / base['peak_bytes'] - 1)})"
    step = tables.ratio(result["step_time_ratio"]) if result["step_time_ratio"] else tables.DASH
    if not result["seeds"]:
        return [result["name"], _sides(base), *[tables.DASH] * 4, result["speed"], memory, step, tables.DASH]
    if change is None:
        return [result["name"], "not finished"]
    time = result["time_to_baseline_loss"]
    missed = f", not reached by {time['not_reached']} of {result['seeds']}" if time["not_reached"] else ""
    return [
        result["name"], _sides(base), f"{result['seconds']:g}", f"{numbers.median(arm['losses']):.3f}",
        f"{numbers.median(base['losses']):.3f}",
        f"{tables.signed(change['median'])} ({tables.span(change, tables.signed)})", result["verdict"], memory, step,
        (f"×{time['ratio']['median']:.2f}{missed}" if time["ratio"] else "not reached"),
    ]  # fmt: skip


def _sides(side: Mapping[str, Any]) -> str:
    parts = [label_of(item) for item in side["methods"]]
    return ", ".join([*parts, *(f"{key}={value}" for key, value in side["keys"].items())]) or "the run file as it is"


def notes(result: Mapping[str, Any]) -> list[str]:
    """What has to be said beside the table."""
    lines = [f"Claim: {result['claim']}"] if result["claim"] else []
    lines += [f"Source: {result['source']}"] if result["source"] else []
    if result["published"]:
        lines.append(f"Published: {result['published']}.")
    if result["step_time_ratio"]:
        lines.append(f"Steps a second, measured here: {tables.ratio(result['rate_ratio'])} of the baseline's.")
    if not result["seeds"]:
        return [*lines, "Speed and memory alone: the losses of the two sides are not comparable."]
    lines.append(
        f"{result['seeds']} seeds; both sides have schedules of their own that decay fully; "
        f"{LOSS_CONFIDENCE:.0%} interval of the paired differences."
    )
    for side in ("arm", "baseline"):
        found = result[side]
        if found["steps"]:
            took = numbers.median(found["train_seconds"])
            lines.append(f"{side}: {_sides(found)}; {found['steps'][0]:,} steps, which took {text.duration(took)}.")
    return lines


def markdown(result: Mapping[str, Any]) -> str:
    """The finding as a table."""
    lines = [f"**{result['label'].capitalize()}** on {tables.machine_line(result)}.", ""]
    lines += tables.markdown_table(header(), [cells(result)])
    return "\n".join([*lines, "", *(f"- {line}" for line in notes(result))]) + "\n"


def terminal(result: Mapping[str, Any]) -> str:
    """The finding for a terminal."""
    head, row = header(), cells(result)
    width = max(map(len, head))
    lines = [f"{name:<{width}}  {cell}" for name, cell in zip(head, row, strict=False)]
    return "\n".join([*lines, "", *notes(result), f"{result['label']}: {tables.machine_line(result)}"])


def page(result: Mapping[str, Any]) -> str:
    """The finding as a page."""
    curves = [
        Curve(f"{name}, seed {seed + 1}", [(p[2], p[3]) for p in points], style)
        for side, name, style in (("baseline", BASELINE, "c0"), ("arm", result["name"], "c1"))
        for seed, points in enumerate(result[side]["curves"])
    ]
    legend = [(BASELINE, "c0"), (result["name"], "c1")]
    title = "Validation loss against seconds of training"
    return render(
        title=f"Evidence: {result['name']}", kind="bench", subtitle=tables.machine_line(result),
        curves=[curves_entry(title, "every seed", curves, legend, x_name="seconds")],
        tables=[{"title": "Finding", "note": result["claim"], "head": header(), "rows": [cells(result)]}],
        notes=notes(result),
    )  # fmt: skip


def run(
    path: str, overrides: Sequence[str] = (), *, seeds: int | None = None, threads: int | None = None, **common: Any
) -> int:
    """Carries out an evidence file and returns the exit code."""
    from thrifty.bench.run import carry_out

    evidence = read(path, seeds=seeds)
    content, own = _content(evidence, overrides)
    if own:
        evidence.baseline = {**evidence.baseline, "methods": [*own, *evidence.baseline.get("methods", ())]}
        evidence.arm = {**evidence.arm, "methods": [*own, *evidence.arm.get("methods", ())]}
    options = Options(
        run=content, name=evidence.name, minutes=None, seeds=max(1, evidence.seeds), evaluations=evidence.evaluations,
        eval_samples=evidence.eval_samples, threads=threads, rounds=evidence.rounds,
        more={"seconds": evidence.seconds, "timed_steps": evidence.timed_steps,
              "tune": [evidence.choices(arm=arm) for arm in (False, True)]},
    )  # fmt: skip

    def start(folder: Path, fresh: bool, method: StartMethod | None) -> Session:
        return EvidenceSession(evidence, options, folder, fresh=fresh, method=method)

    return carry_out(start, result_of, options, page, markdown, terminal, **common)


def _content(evidence: Evidence, overrides: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    from thrifty.bench.options import read_values

    if isinstance(evidence.run, Mapping):
        return read_values(evidence.run, overrides)
    content, own, _ = read_run(evidence.run, overrides)
    return content, own
