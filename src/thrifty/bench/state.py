"""What a bench has measured so far: one line a measurement, on disk before the next one starts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thrifty.bench.measure import Outcome
from thrifty.errors import InputError
from thrifty.report.files import from_json, to_json, write_atomic

STATE_FILE = "state.jsonl"


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits for settings and versions: measurements of others must not be mixed with these."""
    return hashlib.blake2b(to_json(settings).encode(), digest_size=6).hexdigest()


class State:
    """The state file of a bench.

    Args:
        folder: The bench's output folder; made where missing.
        settings: Everything that decides what is measured, as plain data.
        fresh: Drop what was measured before.

    Raises:
        InputError: The folder holds the state of another bench.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.path = folder / STATE_FILE
        self.key = fingerprint(settings)
        self.outcomes: dict[str, Outcome] = {}
        self.notes: dict[str, Any] = {}
        """Decisions that a continued bench must not take anew, and when it began."""
        folder.mkdir(parents=True, exist_ok=True)
        if fresh:
            self.path.unlink(missing_ok=True)
        if self.path.exists():
            self._read()
        else:
            write_atomic(self.path, to_json({"format": "thrifty-bench-state/1", "key": self.key}) + "\n")

    @property
    def resumed(self) -> bool:
        """Whether anything had been measured before."""
        return bool(self.outcomes or self.notes)

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        complete = lines[:-1]  # what follows the last line end was cut off by a kill
        try:
            head, *rows = [from_json(line) for line in complete]
            key = head["key"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                "is no state of a bench, or is damaged", key=str(self.path), fix="--fresh measures anew"
            ) from error
        if key != self.key:
            raise InputError(
                "the folder holds another bench (other settings or versions)", key="--output",
                value=str(self.path.parent), fix="another folder, or --fresh to replace it",
            )  # fmt: skip
        for row in rows:
            if "note" in row:
                self.notes[row["note"]] = row["value"]
            else:
                self.outcomes[row["job"]] = Outcome.from_dict(row["outcome"])
        if lines[-1]:
            write_atomic(self.path, b"\n".join(complete) + b"\n")

    def add(self, name: str, outcome: Outcome) -> None:
        """Keeps a measurement."""
        self.outcomes[name] = outcome
        self._append({"job": name, "outcome": outcome.to_dict()})

    def note(self, name: str, value: Any) -> Any:
        """Keeps a decision and returns it."""
        self.notes[name] = value
        self._append({"note": name, "value": value})
        return value

    def _append(self, row: Mapping[str, Any]) -> None:
        with open(self.path, "ab", buffering=0) as file:
            file.write(to_json(row).encode() + b"\n")
            os.fsync(file.fileno())
