"""What a plan means, in terms that every tool shares, and what an export consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.errors import ThriftyError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ZERO_STAGE = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter as peft describes it."""

    kind: str
    """LORA, IA3, ..."""
    rank: int | None
    alpha: float | None
    dropout: float
    targets: list[str]
    """Names of the modules that have one."""
    all_linear: bool
    """Whether these are all linear layers but the head."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Settings of the adapter beyond these that differ from peft's defaults, e.g. use_dora."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """A configuration in neutral terms."""

    model: str
    config: PretrainedConfig
    task: str
    seq_len: int
    micro_batch: int
    accumulation: int
    devices: int
    sharding: str
    precision: str
    """bf16, fp16, tf32 or fp32: of matrix products."""
    dtype: str
    """Of the weights."""
    checkpointing: bool
    checkpoint_every: int
    """Every which block is recomputed."""
    compiled: bool
    optimizer: str
    """Of the optimizer, e.g. AdamW, AdamW8bit, Lion."""
    optimizer_settings: dict[str, Any]
    """What its method sets beyond learning rate, betas, epsilon and weight decay."""
    optim: str | None
    """The value of `TrainingArguments.optim` that means this optimizer; None where none does."""
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    """Of the optimizer itself, wherever they were set."""
    epsilon: float
    max_grad_norm: float
    adapter: Adapter | None
    quantization: str | None
    """Form of the frozen weights, nf4 or None."""
    double_quantization: bool
    """Whether the scales of the frozen weights are quantised too."""
    packing: bool
    """Whether samples are packed into rows without padding."""
    fields: dict[str, Any]
    """The `TrainingArguments` fields of user and methods."""
    missing: tuple[str, ...]
    """Methods, or settings of methods, that no field or adapter carries."""

    @property
    def global_batch(self) -> int:
        """Samples a step on all devices."""
        return self.micro_batch * self.accumulation * self.devices

    @property
    def zero_stage(self) -> int:
        """0 to 3."""
        return ZERO_STAGE[self.sharding]

    @property
    def autocast(self) -> bool:
        """Whether weights are kept in float32 and products run in 16 bits."""
        return self.dtype == "float32" and self.precision in ("bf16", "fp16")

    @property
    def optimizer_words(self) -> str:
        """The optimizer with its settings, for the list of what a tool cannot express."""
        settings = ", ".join(f"{key}={value}" for key, value in self.optimizer_settings.items())
        return f"the optimizer {self.optimizer}" + (f" ({settings})" if settings else "")

    def unexpressed(self, *expressed: str) -> list[str]:
        """What of adapter, quantised weights and packing a tool cannot say.

        Args:
            expressed: What it can: `quantization`, `packing`, and names of `Adapter.extras`.
        """
        lines = []
        if self.quantization is not None and "quantization" not in expressed:
            lines.append(f"frozen weights in {self.quantization}")
        if self.packing and "packing" not in expressed:
            lines.append("packing of samples into rows without padding")
        extras = self.adapter.extras if self.adapter is not None else {}
        lines += [f"the adapter's {key}={value}" for key, value in extras.items() if key not in expressed]
        return lines


@dataclass(kw_only=True)
class Export:
    """Files and launch flags for a tool."""

    tool: str
    files: dict[str, str]
    """Name to content."""
    flags: list[str] = field(default_factory=list)
    """Launch flags."""
    missing: list[str] = field(default_factory=list)
    """What the tool cannot express, or where it must be said by hand."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The configuration as a mapping."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """The tool's documented keys: a type, a tuple of types, a list of values, or a mapping of further keys."""
    source: str = ""
    """Where the keys are documented."""

    def check(self) -> None:
        """Compares the values with the tool's documented keys.

        Raises:
            ThriftyError: The export wrote something that the tool does not know.
        """
        faults = list(_faults(self.values, self.keys, ""))
        if faults:
            raise ThriftyError(f"the export for {self.tool} is wrong: " + "; ".join(faults))

    def write(self, folder: str | Path) -> list[Path]:
        """Writes the files and returns their paths."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, content in self.files.items():
            (root / name).write_text(content, encoding="utf-8")
            paths.append(root / name)
        return paths

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {"tool": self.tool, "files": self.files, "flags": self.flags, "missing": self.missing}


def _faults(values: Mapping[str, Any], keys: Mapping[str, Any], prefix: str) -> Any:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in keys:
            yield f"{name} is not documented"
            continue
        expected = keys[key]
        if isinstance(expected, Mapping):
            if isinstance(value, Mapping):
                yield from _faults(value, expected, f"{name}.")
            else:
                yield f"{name} must be a mapping"
        elif isinstance(expected, list):
            if value not in expected:
                yield f"{name}={value!r} is none of {expected}"
        elif not isinstance(value, expected) or (isinstance(value, bool) and not _takes_bool(expected)):
            yield f"{name}={value!r} has the wrong type"


def _takes_bool(expected: Any) -> bool:
    return expected in (bool, object) or (isinstance(expected, tuple) and bool in expected)
