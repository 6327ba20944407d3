"""What real steps took beside what was predicted for them, kept by machine, so that later plans are corrected."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError

if TYPE_CHECKING:
    from thrifty.planner.workload import Workload

_MOST_KEPT = 500


@dataclass(frozen=True, kw_only=True)
class Residual:
    """Measured over predicted, of one configuration on this machine."""

    workload: str
    """Hash of model, task, data type and sequence length."""
    structure: str
    """Hash of the structural class."""
    micro_batch: int
    accumulation: int
    memory: float
    seconds: float
    date: str


def workload_key(workload: Workload) -> str:
    """Hash of what is trained, whatever the methods."""
    content = [workload.config.to_dict(), workload.task, workload.dtype, workload.seq_len, workload.padded]
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


class Residuals:
    """The stored residuals of one device.

    Args:
        device: Id of the profile.
    """

    def __init__(self, device: str) -> None:
        self.path = _path(device)
        self.entries: list[Residual] = []
        if self.path.exists():
            try:
                self.entries = [Residual(**entry) for entry in json.loads(self.path.read_text())]
            except (json.JSONDecodeError, TypeError) as error:
                raise InputError(
                    f"damaged measurements: {error}", key=str(self.path), fix="delete the file and verify again"
                ) from None

    def add(self, entry: Residual) -> None:
        """Stores a residual in place of an older one of the same configuration."""
        same = ("workload", "structure", "micro_batch", "accumulation")
        kept = [old for old in self.entries if any(getattr(old, k) != getattr(entry, k) for k in same)]
        self.entries = [*kept, entry][-_MOST_KEPT:]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps([asdict(e) for e in self.entries], indent=1))
        os.replace(temporary, self.path)

    def of(self, workload: str, structure: str) -> tuple[float, float]:
        """Factors for memory and seconds: those of the class, else the mean of the workload's other classes, else 1."""
        near = [e for e in self.entries if e.workload == workload]
        own = [e for e in near if e.structure == structure]
        return _mean([e.memory for e in own or near]), _mean([e.seconds for e in own or near])


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(r) for r in ratios) / len(ratios)) if ratios else 1.0


def _path(device: str) -> Path:
    root = os.environ.get("THRIFTY_CACHE") or Path.home() / ".cache" / "thrifty"
    return Path(root) / "residuals" / f"{device}.json"


def forget_residuals(device: str) -> bool:
    """Removes the stored residuals of a device; says whether there were any."""
    path = _path(device)
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def describe(entry: dict[str, Any]) -> str:
    """A measured configuration in one line."""
    if entry["out_of_memory"]:
        return "Verified: it ran out of memory; the prediction is corrected."
    mib = 2**20
    memory, seconds = entry["memory"] - 1, entry["seconds"] - 1
    return (
        f"Verified on this machine: {entry['measured_bytes'] / mib:,.0f} MiB measured, {memory:+.1%} against the "
        f"prediction; {entry['measured_seconds']:.3g} s a step measured, {seconds:+.1%}."
    )
