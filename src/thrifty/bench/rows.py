"""Which techniques stand in the tables, and in what order. The techniques say so themselves, by `bench_order`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thrifty.errors import InputError
from thrifty.method import registry

BASELINE = "baseline"
MethodItem = str | Mapping[str, Any]


@dataclass(frozen=True)
class Arm:
    """One recipe that is measured. Two tables may show the same arm.

    Attributes:
        id: Short name, unique in a bench.
        methods: As under `methods` of a run file.
        keys: Run-file keys that differ from the baseline's.
    """

    id: str
    methods: tuple[Any, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> str:
        """The same for arms that would measure the same thing."""
        return json.dumps(
            [sorted(json.dumps(m, sort_keys=True) for m in self.methods), dict(self.keys)], sort_keys=True
        )


@dataclass
class Row:
    """A line of a table.

    Attributes:
        table: `additive` or `ablation`.
        label: What the line adds.
        arm: The arm that was measured for it; None where it cannot run.
        reason: Why it cannot run.
    """

    table: str
    label: str
    arm: str | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the state and result files."""
        return {"table": self.table, "label": self.label, "arm": self.arm, "reason": self.reason}


def name_of(item: MethodItem) -> str:
    """The method's name in an entry of `methods`."""
    return item if isinstance(item, str) else str(next(iter(item)))


def label_of(item: MethodItem) -> str:
    """Name and settings as they stand in a table."""
    if isinstance(item, str):
        return item
    name, settings = next(iter(item.items()))
    shown = ", ".join(f"{key}={value}" for key, value in (settings or {}).items())
    return f"{name} ({shown})" if shown else name


def with_required(item: MethodItem) -> list[MethodItem]:
    """The method, after those that it declares as required."""
    found: list[MethodItem] = []
    for name in registry.get(name_of(item)).spec.requires:
        found += [needed for needed in with_required(name) if needed not in found]
    return [*found, item]


def candidates(chosen: Sequence[MethodItem] | None, in_run_file: Sequence[MethodItem]) -> list[MethodItem]:
    """The techniques of the tables, in the order in which they are added.

    Args:
        chosen: What the user asks for, in that order; None takes those of the run file and then all that declare a
            place, each in the declared order.
        in_run_file: The `methods` of the run file.

    Raises:
        InputError: A name is unknown.
    """
    if chosen is not None:
        for item in chosen:
            registry.get(name_of(item))
        return list(chosen)
    order = {name: registry.get(name).spec.bench_order for name in registry.names()}
    last = max((place for place in order.values() if place is not None), default=0) + 1
    named = {name_of(item) for item in in_run_file}
    own = sorted(in_run_file, key=lambda item: _place(order.get(name_of(item)), last))
    declared = sorted(
        (name for name, place in order.items() if place is not None and name not in named),
        key=lambda name: _place(order[name], last),
    )
    return [*own, *declared]


def _place(order: int | None, last: int) -> int:
    return last if order is None else order


@dataclass
class Tables:
    """Builds both tables technique by technique, as their probes say which of them can run.

    Args:
        techniques: What `candidates` returned.
        most: The most arms, the baseline among them; None for no limit.
        only: `additive` or `ablation` leaves the other table out.
    """

    techniques: Sequence[MethodItem]
    most: int | None = None
    only: str | None = None
    arms: list[Arm] = field(default_factory=lambda: [Arm(BASELINE)])
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _sum: list[MethodItem] = field(default_factory=list)
    _sections: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for table in self.tables:
            self.rows.append(Row(table, BASELINE, BASELINE))

    @property
    def tables(self) -> tuple[str, ...]:
        return (self.only,) if self.only else ("additive", "ablation")

    def build(self) -> Iterator[tuple[Arm, Row]]:
        """Yields each new arm with its first row; the caller probes it and calls `settle` before going on."""
        for item in self.techniques:
            if self.most is not None and not self._has_room(item, self.most):
                self.left_out.append(name_of(item))
                continue
            label = label_of(item)
            alone = Arm(label, tuple(with_required(item)))
            refused = None
            for table in sorted(self.tables, reverse=False, key=lambda name: name != "ablation"):
                arm = alone
                if table == "additive":
                    parts = [part for part in with_required(item) if part not in self._sum]
                    arm = Arm(" + ".join([*map(label_of, self._sum), label]), (*self._sum, *parts))
                row = Row(table, label if table == "ablation" else f"+ {label}", reason=refused)
                self.rows.append(row)
                if refused is not None:
                    continue
                same = next((other for other in self.arms if other.recipe == arm.recipe), None)
                if same is not None:
                    row.arm = same.id
                else:
                    yield arm, row
                if table == "ablation":
                    refused = row.reason  # what cannot run alone cannot be added either
                elif row.arm is not None:
                    self._sum = list(arm.methods)

    def _has_room(self, item: MethodItem, most: int) -> bool:
        """Whether a technique that nobody asked for is measured: the few rows show one of each kind.

        Left out are those of a section that has its choice already (another precision, another optimizer).
        """
        new = 2 if self._sum and self.only is None else 1  # alone, and on top of the others
        spec = registry.get(name_of(item)).spec
        return len(self.arms) + new <= most and spec.section not in self._sections

    def settle(self, arm: Arm, row: Row, reason: str | None) -> None:
        """Says what became of an arm's probe: it runs, or the reason why it does not."""
        if reason is None:
            self.arms.append(arm)
            row.arm = arm.id
            self._sections |= {
                registry.get(name_of(item)).spec.section
                for item in arm.methods
                if registry.get(name_of(item)).spec.claims
            }
        else:
            row.reason = reason

    def ordered(self) -> list[Row]:
        """The rows, table by table."""
        return [row for table in self.tables for row in self.rows if row.table == table]


def check_table(only: str | None) -> None:
    """Raises `InputError` where `only` names no table."""
    if only not in (None, "additive", "ablation"):
        raise InputError("there is no such table", key="--only", value=only, fix="additive or ablation")
