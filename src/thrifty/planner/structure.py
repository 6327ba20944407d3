"""Structural classes: configurations that run the same graph, so that one dry run serves them all.

Methods, data type, attention and task decide the graph; micro-batch, accumulation, number of devices and the way their
states are divided do not. A class is compiled once and kept on disk by the hash of everything that decides it.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.errors import InputError, NotApplicable
from thrifty.method import overrides
from thrifty.planner.compiled import CLOSED_FORMS, Compiled, measured_form
from thrifty.planner.program import Rows

if TYPE_CHECKING:
    import torch
    from torch import nn

    from thrifty.hardware.devices import Device
    from thrifty.method import Method, Phase
    from thrifty.planner.memory import OptimizerModel, StepModel
    from thrifty.planner.replay import ClosedForm
    from thrifty.planner.step import Step
    from thrifty.planner.workload import Workload
    from thrifty.recipe import Recipe

CACHE_FORMAT = 1
_PROBE_BLOCKS = 8


class Structure:
    """One structural class.

    Args:
        workload: The run.
        recipe: Its methods, choices included.
        device: Decides the kernels that run.
    """

    def __init__(self, workload: Workload, recipe: Recipe, device: Device) -> None:
        self.workload, self.recipe, self.device = workload, recipe, device
        self._models: list[nn.Module] = []

    @cached_property
    def key(self) -> str:
        """Hash of everything that decides the graph of a micro-batch. The optimizer does not."""
        arguments = {k: v for k, v in self.arguments.items() if k in _PASS_ARGUMENTS}
        inside = [entry for entry, m in zip(self.recipe.to_config(), self.recipe, strict=True) if _changes_pass(m)]
        return _hash([*self._common, self.workload.padded, self.workload.attn_implementation, self._attention,
                      self._seq_regime, inside, arguments])  # fmt: skip

    @cached_property
    def update_key(self) -> str:
        """Hash of everything that decides the graph of an update."""
        arguments = {k: v for k, v in self.arguments.items() if k not in _PASS_ARGUMENTS}
        return _hash([*self._common, self.recipe.to_config(), arguments])

    @cached_property
    def _common(self) -> list[Any]:
        import torch
        import transformers

        workload = self.workload
        versions = [CACHE_FORMAT, torch.__version__, transformers.__version__, _own_version()]
        return [*versions, workload.config.to_dict(), workload.task, workload.dtype, self._dialect]

    @property
    def _dialect(self) -> str:
        return "cpu" if self.device.kind == "cpu" else "cuda"

    @property
    def _attention(self) -> str:
        return self.device.attention[0]

    @property
    def _seq_regime(self) -> list[int]:
        """Where the sequence lies among the lengths at which the graph changes."""
        from thrifty.planner.step import hf_step

        step = hf_step(self.workload.config, self.workload.task)
        return [step.fixed_seq or 0, *(int(limit <= self.workload.seq_len) for limit in step.seq_breaks)]

    def compile(self) -> Compiled:
        """Dry-runs the class, or reads an earlier dry run.

        Raises:
            NotApplicable: A method cannot work on this model.
            InputError: The class cannot be dry-run.
        """
        self.check_device()
        step, update = self._compile_pass(), self._compile_update()
        trainable = step.parameter_count(trainable=True)
        groups = [(group, count) for group, count in step.parameter_counts() if group.trainable]
        itemsize = sum(group.nbytes * count for group, count in groups) / max(1, trainable)
        held = sum(method.held_bytes(trainable, itemsize, self.device.kind) for method in self.recipe)
        return Compiled(
            step, update, self.precision, bool(self.arguments["torch_compile"]), self.key, held,
            accumulation=self.arguments.get("gradient_accumulation_steps"), phases=self._phases(),
        )  # fmt: skip

    def _phases(self) -> tuple[Phase, ...]:
        """The stretches of the run in which a step is cheaper; those of several methods apply one after another."""
        total = self.context().total_steps
        found: list[Phase] = []
        for method in self.recipe.using("phases"):
            found = _crossed(found, method.phases(self.workload.config, total) or [])
        return tuple(found)

    @property
    def names(self) -> str:
        """The methods, for people."""
        return ", ".join(m.name for m in self.recipe) or "no methods"

    def is_stored(self) -> bool:
        """Whether the dry run of the micro-batch lies on disk."""
        return (_cache_folder() / f"{self.key}.step.npz").exists()

    def _compile_pass(self) -> StepModel:
        from thrifty.planner.events import TraceMismatch
        from thrifty.planner.fit import compile_step
        from thrifty.planner.memory import StepModel

        if self.key in _PASSES:
            return _PASSES[self.key]
        folder = _cache_folder()
        path, rows = folder / f"{self.key}.step.npz", folder / f"{self.key}.rows.npz"
        if path.exists():
            model = StepModel.load(path)
            _load_rows(model, rows)
        else:
            step = self.step()
            try:
                try:
                    model = compile_step(step, seq=self.workload.seq_len)
                except TraceMismatch:
                    # Blocks that share weights: only a middle one adds to a gradient that others will add to.
                    model = compile_step(dataclasses.replace(step, least_blocks=3), seq=self.workload.seq_len)
            except TraceMismatch as error:
                raise InputError(
                    f"cannot be dry-run with {self.names}: {error}", key="model", value=self.workload.name
                ) from error
            folder.mkdir(parents=True, exist_ok=True)
            # The step's file is written last, so that it vouches for the rows.
            _save_rows(model, rows)
            _write(model.save, path)
        while len(_PASSES) >= _MOST_PASSES:
            del _PASSES[next(iter(_PASSES))]
        _PASSES[self.key] = model
        return model

    def _compile_update(self) -> OptimizerModel | ClosedForm:
        from thrifty.planner.fit import compile_optimizer
        from thrifty.planner.memory import OptimizerModel

        optim = str(getattr(self.arguments["optim"], "value", self.arguments["optim"]))
        if self.recipe.owner("optimizer") is None and optim in CLOSED_FORMS:
            return CLOSED_FORMS[optim]
        path = _cache_folder() / f"{self.update_key}.update.npz"
        if path.exists():
            return OptimizerModel.load(path)
        try:
            model = compile_optimizer(self.step())
        except RuntimeError as error:
            # Reading a value of a fake tensor; the exception's class is private to torch.
            if type(error).__name__ != "DataDependentOutputException":
                raise
            return measured_form(self.build_optimizer)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(model.save, path)
        return model

    def check_device(self) -> None:
        """Refuses a precision that the device has no units for.

        Raises:
            NotApplicable: A method asks for it.
        """
        have = {"bf16": self.device.supports_bf16, "fp16": self.device.supports_fp16 or self.device.kind == "cpu"}
        have["tf32"] = self.device.supports_tf32
        for name, supported in have.items():
            if self.arguments.get(name) and not supported:
                known = ", ".join(self.device.peak_flops)
                raise NotApplicable(
                    f"{self.device.name} has no {name} units", key="precision", value=name, fix=f"it has: {known}"
                )

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The `TrainingArguments` fields that decide the cost, after the methods have set theirs."""
        ctx = self.context()
        values = {key: getattr(ctx.args, key) for key in _GRAPH_ARGUMENTS if hasattr(ctx.args, key)}
        values["checkpointing_kwargs"] = None
        for method in self.recipe.using("configure"):
            values.update(method.configure(ctx.args, ctx))
        for name in ("activation_checkpointing", "gradient_checkpointing"):
            values["checkpointing"] = bool(values.get("checkpointing")) or bool(values.get(name))
        return values

    @property
    def precision(self) -> str:
        """Of matrix products."""
        if self.arguments.get("bf16") or self.workload.dtype == "bfloat16":
            return "bf16"
        if self.arguments.get("fp16") or self.workload.dtype == "float16":
            return "fp16"
        return "tf32" if self.arguments.get("tf32") else "fp32"

    def context(self) -> Any:
        """What the methods' hooks are given in a dry run."""
        from transformers import TrainingArguments

        from thrifty.context import Context

        args = copy.copy(_plain_arguments(TrainingArguments))
        for key, value in self.workload.arguments.items():
            if key in _GRAPH_ARGUMENTS:
                object.__setattr__(args, key, value)
        object.__setattr__(args, "max_steps", self.workload.arguments.get("max_steps") or 1000)
        from thrifty import tasks

        return Context(
            args=args, task=tasks.get(self.workload.task), planning=True, total_steps=args.max_steps,
            device_kind=self.device.kind, model_config=self.workload.config,
        )  # fmt: skip

    def step(self) -> Step:
        """The training step as the tracer runs it."""
        import torch

        from thrifty.planner.step import hf_step

        arguments, workload = self.arguments, self.workload
        autocast = torch.bfloat16 if arguments.get("bf16") else torch.float16 if arguments.get("fp16") else None
        clip = arguments.get("max_grad_norm")
        step = hf_step(
            workload.config, workload.task, dtype=getattr(torch, workload.dtype), padded=workload.padded,
            attn_implementation=workload.attn_implementation, transform_model=self._transform,
            compute_loss=self._loss(),
            build_optimizer=self.build_optimizer, autocast=autocast, fp32_outputs=autocast is not None,
            dialect=self._dialect, attention=self._attention, clip_grad_norm=clip if clip and clip > 0 else None,
        )  # fmt: skip
        return dataclasses.replace(step, units=self._units(step), warm_up=any(m.warms_up for m in self.recipe))

    def _transform(self, model: nn.Module) -> nn.Module:
        """What training does to the model before the optimizer exists."""
        import torch
        from transformers import TrainerControl, TrainerState

        from thrifty.planner.step import enable_checkpointing

        ctx = self.context()
        for method in self.recipe.using("prepare_model"):
            if not overrides(method, "phases"):  # the memory is that of the full model
                model = method.prepare_model(model, ctx)
        if self.arguments["checkpointing"]:
            enable_checkpointing(model)
        starting = [m for m in self.recipe.using("on_train_begin") if not overrides(m, "phases")]
        if starting:
            # Some look at the optimizer: it gets one without state, which is then forgotten.
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
            for method in starting:
                method.on_train_begin(ctx.args, TrainerState(), TrainerControl(), model=model, optimizer=optimizer)
        # A dry run holds a few models of different depths; the optimizer is later built for each.
        self._models = [*self._models[-7:], model]
        return model

    def _loss(self) -> Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]:
        from thrifty.planner.step import outputs_loss

        wrappers = self.recipe.using("wrap_loss")
        if not wrappers:
            return outputs_loss
        ctx = self.context()

        def chain(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            return outputs_loss(model, inputs)

        for method in reversed(wrappers):
            chain = method.wrap_loss(chain, ctx)
        return chain

    def build_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer that the recipe or `optim` asks for."""
        from transformers import Trainer

        ctx = self.context()
        groups = self._groups(parameters, ctx)
        owner = self.recipe.owner("optimizer")
        if owner is not None:
            return self._adjusted(owner.build_optimizer(groups, ctx), ctx)
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(ctx.args)
        if self._dialect == "cuda" and cls.__module__.startswith("torch.optim") and not kwargs.get("fused"):
            # On CUDA torch takes the multi-tensor form by default; fake tensors look like a CPU's.
            kwargs = {**kwargs, "foreach": True}
        return self._adjusted(cls([{k: v for k, v in g.items() if k != "names"} for g in groups], **kwargs), ctx)

    def _adjusted(self, optimizer: torch.optim.Optimizer, ctx: Any) -> torch.optim.Optimizer:
        for method in self.recipe.using("adjust_optimizer"):
            method.adjust_optimizer(optimizer, ctx)
        return optimizer

    def _groups(self, parameters: list[nn.Parameter], ctx: Any) -> list[dict[str, Any]]:
        """The parameter groups that training would make, or one group where the parameters are of no dry-run model."""
        from transformers import Trainer

        from thrifty.trainer import decay_groups

        wanted = {id(p) for p in parameters}
        for model in reversed(self._models):
            if wanted != {id(p) for p in model.parameters() if p.requires_grad}:
                continue
            ctx._model = model
            spared = self.recipe.no_decay()
            names = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
            decay = [name for name in names if not any(part in name for part in spared)]
            groups = decay_groups(model, decay, ctx.args.weight_decay)
            for method in self.recipe.using("adjust_groups"):
                groups = method.adjust_groups(groups, ctx)
            return [group for group in groups if group["params"]]
        ctx._model = self._models[-1] if self._models else None
        return [{"params": parameters, "names": [f"p{i}" for i in range(len(parameters))], "weight_decay": 0.0}]

    def _units(self, step: Step) -> Mapping[str, int]:
        """The period of each count of blocks, with what the methods did to single blocks."""
        from torch import nn

        counts = {
            name: min(full, max(_PROBE_BLOCKS, 2 * step.units.get(name, 1))) for name, full in step.layers.items()
        }
        counts = {
            n: c - (c - step.layers[n]) % step.units.get(n, 1) if c < step.layers[n] else c for n, c in counts.items()
        }
        model = step.prepared_model(counts)
        longest = 1
        if any(getattr(block, "checkpoint_position", None) == "whole" for block in model.modules()):
            return dict(step.layers)  # what is done to a block depends on all of them: the full depth is traced
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and len(module) > 1:
                longest = max(longest, _period([_signature(block) for block in module]))
        return {name: max(unit, longest) for name, unit in {n: step.units.get(n, 1) for n in step.layers}.items()}


def compile_all(structures: Sequence[Structure], processes: int = 2) -> list[Compiled | InputError]:
    """Compiles several classes, on several cores where many are new; what cannot work is returned as its error.

    A fault in the dry run of the first class, the user's own, is raised; that of another one only rules it out.
    """
    from thrifty.planner.fit import compile_many

    missing = list({s.key: s for s in structures if not s.is_stored()}.values())

    def fill(structure: Structure) -> Callable[[], Any]:
        def run() -> None:
            # What fails here fails again, and is answered, when the class is compiled in this process.
            with contextlib.suppress(Exception):
                structure.compile()

        return run

    if len(missing) > 2 and processes > 1:
        compile_many([fill(structure) for structure in missing], processes)
    found: list[Compiled | InputError] = []
    for index, structure in enumerate(structures):
        try:
            found.append(structure.compile())
        except InputError as error:
            found.append(error)
        except Exception as error:
            if index == 0:
                raise
            text = f"the dry run of {structure.names} failed: {type(error).__name__}: {error}"
            found.append(InputError(text, key="methods"))
    return found


_GRAPH_ARGUMENTS = (
    "bf16", "fp16", "tf32", "optim", "optim_args", "optim_target_modules", "max_grad_norm", "torch_compile",
    "gradient_checkpointing", "activation_checkpointing", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon",
    "weight_decay", "label_smoothing_factor",
)  # fmt: skip
# Of these, what a micro-batch sees; the others concern the update.
_PASS_ARGUMENTS = (
    "bf16",
    "fp16",
    "gradient_checkpointing",
    "activation_checkpointing",
    "checkpointing",
    "label_smoothing_factor",
)
_PASS_HOOKS = ("prepare_model", "wrap_loss", "wrap_training_step", "on_train_begin")
_PASSES: dict[str, StepModel] = {}
"""Compiled passes of this process, shared by classes that differ in the optimizer only."""
_MOST_PASSES = 256
_PLAIN: dict[type, Any] = {}


def _plain_arguments(cls: type) -> Any:
    if cls not in _PLAIN:
        _PLAIN[cls] = cls(output_dir="unused", use_cpu=True, report_to=[])
    return _PLAIN[cls]


def _signature(block: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((n, tuple(p.shape), p.requires_grad) for n, p in block.named_parameters())
    kinds = tuple(type(m).__name__ for m in block.modules())
    return kinds, shapes, getattr(block, "gradient_checkpointing", None), getattr(block, "checkpoint_position", None)


def _period(values: list[Any]) -> int:
    for unit in range(1, len(values)):
        if all(values[i] == values[i - unit] for i in range(unit, len(values))):
            return unit
    return max(1, len(values))


def _changes_pass(method: Method) -> bool:
    """Whether a method can change what a micro-batch runs, other than through training arguments."""
    return any(overrides(method, hook) for hook in _PASS_HOOKS)


def _crossed(first: Sequence[Phase], second: Sequence[Phase]) -> list[Phase]:
    """Two divisions of the same run as one: shares are multiplied."""
    from thrifty.method import Phase

    if not first or not second:
        return list(first or second)
    ends = [list(itertools.accumulate(p.steps for p in phases)) for phases in (first, second)]
    bounds = sorted({0, *ends[0], *ends[1]})
    merged = []
    for start, stop in itertools.pairwise(bounds):
        a, b = (
            phases[min(bisect.bisect_right(end, start), len(phases) - 1)]
            for phases, end in zip((first, second), ends, strict=True)
        )
        shares = {key: getattr(a, key) * getattr(b, key) for key in ("depth", "length", "batch")}
        merged.append(Phase(steps=stop - start, description=f"{a.description}, {b.description}", **shares))
    return merged


def _hash(content: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


@functools.cache
def _own_version() -> list[Any]:
    """Of this package: the version, and the sizes and times of its sources, so that a changed method is run anew."""
    import thrifty

    folder = Path(thrifty.__file__).parent
    states = [path.stat() for path in sorted(folder.rglob("*.py"))]
    return [thrifty.__version__, len(states), sum(s.st_size for s in states), max(s.st_mtime_ns for s in states)]


def _cache_folder() -> Path:
    root = os.environ.get("THRIFTY_CACHE") or Path.home() / ".cache" / "thrifty"
    return Path(root) / "planner"


def _write(save: Callable[[Path], Any], path: Path) -> None:
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp.npz")
    save(temporary)
    os.replace(temporary, path)


_ROW_SETS = ("rows", "accumulating_rows")


def _save_rows(model: StepModel, path: Path) -> None:
    """Keeps the pruned moments beside the programs: finding them takes longer than reading them."""
    arrays = {
        f"{name}/{which}/{part.name}": getattr(getattr(program, which), part.name)
        for name, program in model.programs.items()
        for which in _ROW_SETS
        for part in fields(Rows)
    }
    _write(lambda file: np.savez(file, **arrays), path)  # type: ignore[arg-type]


def _load_rows(model: StepModel, path: Path) -> None:
    with np.load(path, allow_pickle=False) as archive:
        for name, program in model.programs.items():
            for which in _ROW_SETS:
                # Fills the cached property.
                program.__dict__[which] = Rows(**{p.name: archive[f"{name}/{which}/{p.name}"] for p in fields(Rows)})
