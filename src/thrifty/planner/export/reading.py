"""Reads a plan: what it means in the terms that every tool shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thrifty.planner.export.intent import Adapter, Intent

if TYPE_CHECKING:
    from thrifty.method import Method
    from thrifty.planner.plan import Plan
    from thrifty.planner.structure import Structure

_NAMES = {
    "adamw": ("AdamW", None), "adamw-fused": ("AdamW", "adamw_torch_fused"), "adamw-8bit": ("AdamW8bit",
    "adamw_bnb_8bit"), "paged-adamw-8bit": ("PagedAdamW8bit", "paged_adamw_8bit"), "lion": ("Lion", "lion_32bit"),
    "lion-8bit": ("Lion8bit", "lion_8bit"), "adamw-4bit": ("AdamW4bit", "adamw_torch_4bit"),
}  # fmt: skip
"""Methods that own the optimizer: what it is called, and the value of `TrainingArguments.optim` that means it."""
_TORCH = {"fused": "adamw_torch_fused", "foreach": "adamw_torch", "loop": "adamw_torch"}
_CALLED = {
    "adamw_bnb_8bit": "AdamW8bit", "adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw": "PagedAdamW", "paged_adamw_32bit": "PagedAdamW", "lion": "Lion", "lion_32bit": "Lion",
    "lion_8bit": "Lion8bit", "adamw_torch_4bit": "AdamW4bit", "adafactor": "Adafactor", "sgd": "SGD",
}  # fmt: skip
"""What the optimizers of `TrainingArguments.optim` are called."""
_SAID = frozenset({"betas", "eps", "implementation", "kernels"})
"""Settings of an optimizer's method that every export carries, or that are no mathematics."""


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
    optimizer, optim, settings = _optimizer(structure)
    group = _group(structure)
    epsilon = group.get("eps")
    betas = group.get("betas") or (arguments["adam_beta1"], arguments["adam_beta2"])
    quantized, double = _quantization(structure)
    return Intent(
        model=plan.workload.name, config=plan.workload.config, task=plan.workload.task, seq_len=plan.workload.seq_len,
        micro_batch=chosen.micro_batch, accumulation=chosen.accumulation, devices=chosen.devices,
        sharding=chosen.sharding,
        precision=structure.precision, dtype=chosen.dtype, checkpointing=arguments["checkpointing"],
        checkpoint_every=every,
        compiled=bool(arguments["torch_compile"]), optimizer=optimizer, optimizer_settings=settings, optim=optim,
        learning_rate=float(group.get("lr") or arguments["learning_rate"]),
        weight_decay=float(arguments["weight_decay"]), betas=(float(betas[0]), float(betas[1])),
        epsilon=float(epsilon if isinstance(epsilon, float) else arguments["adam_epsilon"]),
        max_grad_norm=float(arguments["max_grad_norm"] or 0.0),
        adapter=adapter, quantization=quantized, double_quantization=double,
        packing=any(method.name == "packing" for method in structure.recipe),
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


def _group(structure: Structure) -> dict[str, Any]:
    """The settings that the optimizer's owner really gives it."""
    import torch

    if structure.recipe.owner("optimizer") is None:
        return {}
    return structure.build_optimizer([torch.nn.Parameter(torch.empty(2, 2, device="meta"))]).param_groups[0]


def _optimizer(structure: Structure) -> tuple[str, str | None, dict[str, Any]]:
    """What the optimizer is called, `TrainingArguments.optim` for it, and settings that neither says."""
    owner = structure.recipe.owner("optimizer")
    if owner is None:
        name = structure.arguments["optim"]
        name = str(getattr(name, "value", name))
        return _CALLED.get(name, "AdamW" if name.startswith("adamw_torch") else name), name, {}
    settings = {key: value for key, value in owner.settings().items() if key not in _SAID}
    called, optim = _NAMES.get(owner.name, (owner.spec.title, None))
    if owner.name == "adamw":
        optim = _TORCH[getattr(owner, "implementation")]  # noqa: B009
    return called, None if settings else optim, settings


def _quantization(structure: Structure) -> tuple[str | None, bool]:
    for method in structure.recipe:
        if method.name == "qlora":
            return "nf4", bool(getattr(method, "double_quantisation"))  # noqa: B009
        if method.name == "loftq" and getattr(method, "storage") == "4bit":  # noqa: B009
            return "nf4", bool(getattr(method, "double_quantisation", False))
    return None, False


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
        extras=_extras(config),
    )


_ADAPTER_SAID = frozenset({
    "r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "peft_type", "base_model_name_or_path",
    "inference_mode", "auto_mapping", "peft_version", "revision",
})  # fmt: skip


def _extras(config: Any) -> dict[str, Any]:
    """Settings that differ from peft's defaults and that `Adapter` has no field for."""
    import dataclasses

    found = {}
    for entry in dataclasses.fields(config):
        if entry.name in _ADAPTER_SAID or not entry.init:
            continue
        default = entry.default_factory() if callable(entry.default_factory) else entry.default
        value = getattr(config, entry.name)
        if value != default and value not in (None, [], {}, set()):
            found[entry.name] = sorted(value) if isinstance(value, set) else value
    return found


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


def _unexpressed(structure: Structure, adapter: Adapter | None, every: int) -> Iterator[str]:
    """Methods and settings that no training argument, adapter, optimizer or checkpointing period carries."""
    ctx = structure.context()
    for method in structure.recipe:
        if method.name == "packing" or method is structure.recipe.owner("optimizer"):
            continue  # fields of their own
        if adapter is not None and "adapter" in method.spec.claims:
            yield from _of_an_adapter(method)
            continue
        fields = method.configure(ctx.args, ctx)
        if not fields:
            yield f"the method '{method.name}' ({method.spec.title}): only thrifty has it"
            continue
        settings = {k: v for k, v in method.settings().items() if v not in fields.values() and v != every}
        if settings:
            yield f"settings of '{method.name}': {settings}"


def _of_an_adapter(method: Method) -> Iterator[str]:
    """What an adapter's method does besides the adapter that peft describes."""
    if method.name in ("loftq", "lora-ga"):
        yield f"the initialization of '{method.name}' ({method.spec.title}): only thrifty has it"
    if getattr(method, "paged", False):
        yield f"pages of '{method.name}': the optimizer's states move to the host when the device is full"
    if getattr(method, "compute_dtype", None) is not None:
        yield f"compute_dtype of '{method.name}': {getattr(method, 'compute_dtype')}"  # noqa: B009
