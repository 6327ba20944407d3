"""What a plan means, in terms that every tool shares, and what an export consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.errors import ThriftyError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from thrifty.planner.plan import Plan
    from thrifty.planner.structure import Structure

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
    """Class name, e.g. AdamW."""
    optim: str
    """`TrainingArguments.optim`."""
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    epsilon: float
    max_grad_norm: float
    adapter: Adapter | None
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


def intent_of(plan: Plan) -> Intent:
    """Reads a plan.

    Raises:
        InputError: Nothing fits.
    """
    from thrifty.planner.structure import Structure
    from thrifty.recipe import Recipe

    chosen = plan.require()
    structure = Structure(plan.workload, Recipe.parse(chosen.methods), plan.device)
    arguments = structure.arguments
    model = _small_model(structure)
    adapter = _adapter(model)
    every = _checkpoint_every(model)
    optimizer = (
        type(_optimizer(structure)).__name__ if structure.recipe.owner("optimizer") else _optimizer_name(arguments)
    )
    return Intent(
        model=plan.workload.name, config=plan.workload.config, task=plan.workload.task, seq_len=plan.workload.seq_len,
        micro_batch=chosen.micro_batch, accumulation=chosen.accumulation, devices=chosen.devices,
        sharding=chosen.sharding,
        precision=structure.precision, dtype=chosen.dtype, checkpointing=arguments["checkpointing"],
        checkpoint_every=every,
        compiled=bool(arguments["torch_compile"]), optimizer=optimizer,
        optim=str(getattr(arguments["optim"], "value", arguments["optim"])),
        learning_rate=float(arguments["learning_rate"]),
        weight_decay=float(arguments["weight_decay"]), betas=(arguments["adam_beta1"], arguments["adam_beta2"]),
        epsilon=float(arguments["adam_epsilon"]), max_grad_norm=float(arguments["max_grad_norm"] or 0.0),
        adapter=adapter,
        fields=_fields(structure), missing=tuple(_unexpressed(structure, adapter, every)),
    )  # fmt: skip


def _fields(structure: Structure) -> dict[str, Any]:
    values = dict(structure.workload.arguments)
    ctx = structure.context()
    for method in structure.recipe.using("configure"):
        values.update(method.configure(ctx.args, ctx))
    return values


def _small_model(structure: Structure) -> Any:
    step = structure.step()
    counts = {
        name: min(full, max(8, unit * 2)) for name, full in step.layers.items() for unit in (step.units.get(name, 1),)
    }
    return step.prepared_model(counts)


def _optimizer(structure: Structure) -> Any:
    import torch

    return structure.build_optimizer([torch.nn.Parameter(torch.empty(2, 2, device="meta"))])


def _optimizer_name(arguments: Mapping[str, Any]) -> str:
    name = str(getattr(arguments["optim"], "value", arguments["optim"]))
    if name.startswith("adamw"):
        return "AdamW"
    return {"adafactor": "Adafactor", "sgd": "SGD"}.get(name, name)


def _adapter(model: Any) -> Adapter | None:
    configs = getattr(model, "peft_config", None)
    if not configs:
        return None
    from torch import nn

    config = next(iter(configs.values()))
    targets = config.target_modules
    names = sorted(targets) if isinstance(targets, (set, list)) else [str(targets)]
    base = model.get_base_model()
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    wrapped = {name for name, module in base.named_modules() if hasattr(module, "base_layer")}
    plain = [
        name for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not any(name.startswith(w + ".") for w in wrapped)
    ]  # fmt: skip
    return Adapter(
        kind=str(getattr(config.peft_type, "value", config.peft_type)),
        rank=getattr(config, "r", None),
        alpha=getattr(config, "lora_alpha", None),
        dropout=float(getattr(config, "lora_dropout", 0.0) or 0.0),
        targets=names,
        all_linear=not plain,
    )


def _checkpoint_every(model: Any) -> int:
    """The period of checkpointed blocks, from the model itself."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            flags = [getattr(block, "gradient_checkpointing", None) for block in module]
            if any(flags):
                on = [i for i, flag in enumerate(flags) if flag]
                return on[1] - on[0] if len(on) > 1 else len(flags)
    return 1


def _unexpressed(structure: Structure, adapter: Adapter | None, every: int) -> Any:
    """Methods and settings that no training argument, adapter, optimizer or checkpointing period carries."""
    ctx = structure.context()
    for method in structure.recipe:
        fields = method.configure(ctx.args, ctx)
        carried = (
            bool(fields)
            or (adapter is not None and "adapter" in method.spec.claims)
            or "optimizer" in method.spec.claims
        )
        if not carried:
            yield f"the method '{method.name}' ({method.spec.title}): only thrifty has it"
        elif fields and not adapter:
            settings = {k: v for k, v in method.settings().items() if v not in fields.values() and v != every}
            if settings:
                yield f"settings of '{method.name}': {settings}"


def drop_nones(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without keys whose value is None."""
    return {key: value for key, value in values.items() if value is not None}
