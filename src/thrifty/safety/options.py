"""What the user may say about the guards. All are on by default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from thrifty.errors import InputError


@dataclass(kw_only=True)
class Guards:
    """The guards of a run, under Hugging Face's and our own key names.

    >>> Guards(on_non_finite="rewind")  # doctest: +ELLIPSIS
    Guards(atomic_checkpoints=True, ...)
    """

    atomic_checkpoints: bool = True
    """Checkpoints are written aside, flushed, sealed with a manifest and renamed."""
    background_save: Literal["auto", "on", "off"] = "auto"
    """Checkpoints are copied in memory and written by a thread while training goes on. `auto`: where one process writes
    them and no callback listens for saves; `on`: also where one listens, which then finds the files a little later."""
    schedule: Literal["continue", "extend"] | None = None
    """What a changed schedule means on resume; None refuses it."""
    on_oom: Literal["split", "raise"] = "split"
    """Out of memory: split the same micro-batch, or let the error through."""
    trial_step: bool = True
    """One step on the longest samples before training."""
    on_non_finite: Literal["skip", "rewind", "stop", "ignore"] = "skip"
    """A loss or gradient that is not finite: skip the step, go back to the last good checkpoint, or stop."""
    max_non_finite_in_a_row: int = 3
    """After so many, any policy stops."""
    report_loss_spikes: bool = True
    """Say so when a loss is far above the recent ones."""
    check_start: bool = True
    """Look for the faults that can be seen before the first step."""
    handle_signals: bool = True
    """SIGTERM, SIGINT and SIGUSR1: save at the next step boundary and leave."""

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[Any, ...]] = {
            "background_save": ("auto", "on", "off"),
            "schedule": (None, "continue", "extend"),
            "on_oom": ("split", "raise"),
            "on_non_finite": ("skip", "rewind", "stop", "ignore"),
        }
        for key, values in allowed.items():
            if getattr(self, key) not in values:
                raise InputError(
                    "unknown value", key=key, value=getattr(self, key), fix=f"use one of {[v for v in values if v]}"
                )
        if self.max_non_finite_in_a_row < 1:
            raise InputError(
                "must be at least 1", key="max_non_finite_in_a_row", value=self.max_non_finite_in_a_row, fix="use 3"
            )

    @classmethod
    def off(cls) -> Guards:
        """No guard at all: the bare parent."""
        settings: dict[str, Any] = {f.name: False for f in fields(cls) if f.type == "bool"}
        return cls(**settings, background_save="off", on_oom="raise", on_non_finite="ignore")
