"""Structural classes: configurations that run the same graph, so that one dry run serves them all.

Methods, data type, attention and task decide the graph; micro-batch, accumulation, number of devices and the way their
states are divided do not. A class is compiled once and kept on disk by the hash of everything that decides it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError, NotApplicable
from thrifty.method import overrides
from thrifty.planner.arguments import GRAPH_ARGUMENTS, PASS_ARGUMENTS, plain_arguments
from thrifty.planner.compiled import CLOSED_FORMS, Compiled, measured_form
from thrifty.planner.periods import block_signature, common_units, crossed, period
from thrifty.planner.program import features
from thrifty.planner.store import (
    CACHE_FORMAT,
    PASSES,
    REGIONS,
    UPDATES,
    cache_folder,
    content_hash,
    load_facts,
    load_step,
    load_update,
    own_version,
    remember,
    save_step,
    save_update,
    write,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from thrifty.hardware.devices import Device
    from thrifty.method import Method, Phase
    from thrifty.planner.memory import OptimizerModel, StepModel
    from thrifty.planner.replay import ClosedForm
    from thrifty.planner.step import Step
    from thrifty.planner.workload import Workload
    from thrifty.recipe import Recipe

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
        self._held: Any = None
        self.parts: list[Structure] = []
        """Classes that each have one of this one's additions: what holds for each of them holds for all together."""

    @cached_property
    def key(self) -> str:
        """Hash of everything that decides the graph of a micro-batch. The optimizer does not."""
        arguments = {k: v for k, v in self.arguments.items() if k in PASS_ARGUMENTS}
        inside = [entry for entry, m in zip(self.recipe.to_config(), self.recipe, strict=True) if _changes_pass(m)]
        update = [self.optimizer_key] if self._updates_inside else []
        return content_hash([*self._common, self.workload.padded, self.workload.attn_implementation, self._attention,
                             self._seq_regime, inside, arguments, *update])  # fmt: skip

    @cached_property
    def optimizer_key(self) -> str:
        """Hash of everything but the parameters that decides the graph of an update."""
        config = zip(self.recipe.to_config(), self.recipe, strict=True)
        owner = self.recipe.owner("optimizer")
        inside = [entry for entry, m in config if m is owner or any(overrides(m, hook) for hook in _UPDATE_HOOKS)]
        arguments = {k: v for k, v in self.arguments.items() if k not in PASS_ARGUMENTS and k != _KWARGS}
        written = content_hash([*self._common, inside, arguments])
        if written not in _OPTIMIZERS:
            _OPTIMIZERS[written] = self._plain_optimizer(owner, len(inside), arguments) or written
        return _OPTIMIZERS[written]

    def _plain_optimizer(self, owner: Method | None, methods: int, arguments: Mapping[str, Any]) -> str | None:
        """What an optimizer of torch is whoever builds it, so that two ways to the same one are known to be the same.

        None where other methods have a say, or it is not one of torch's.
        """
        import torch

        others = methods - (owner is not None)
        if others or (owner is not None and (overrides(owner, "phases") or overrides(owner, "held_bytes"))):
            return None
        optim = str(getattr(arguments["optim"], "value", arguments["optim"]))
        if owner is None and optim in CLOSED_FORMS:
            return None
        try:
            built = self.build_optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
        except (InputError, RuntimeError, ValueError, AttributeError, ImportError):
            return None  # It needs the model, or cannot be had here: the dry run will say so.
        if not type(built).__module__.startswith("torch.optim") or "step" in vars(built):
            return None
        clipped = bool(arguments.get("max_grad_norm"))
        decayed = bool(arguments.get("weight_decay"))
        defaults = sorted((name, repr(value)) for name, value in built.defaults.items())
        return content_hash([*self._common, type(built).__qualname__, defaults, clipped, decayed])

    @cached_property
    def identity(self) -> str:
        """Equal for classes that cost the same."""
        config = zip(self.recipe.to_config(), self.recipe, strict=True)
        rest = [entry for entry, m in config if not _changes_pass(m) and m is not self.recipe.owner("optimizer")]
        arguments = {k: v for k, v in self.arguments.items() if k in ("tf32", "torch_compile", _ACCUMULATION)}
        return content_hash([self.key, self.optimizer_key, self.precision, rest, arguments])

    def update_key(self, step: StepModel) -> str:
        """Hash of everything that decides the graph of an update of the parameters of a compiled pass."""
        return content_hash([self.optimizer_key, step.signature])

    @cached_property
    def _common(self) -> list[Any]:
        import torch
        import transformers

        versions = [CACHE_FORMAT, torch.__version__, transformers.__version__, own_version()]
        return [*versions, self.workload.fingerprint, self._dialect]

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
        step = self.compile_pass()
        update = self.compile_update(step)
        trainable = step.parameter_count(trainable=True)
        groups = [(group, count) for group, count in step.parameter_counts() if group.trainable]
        itemsize = sum(group.nbytes * count for group, count in groups) / max(1, trainable)
        held = sum(method.held_bytes(trainable, itemsize, self.device.kind) for method in self.recipe)
        return Compiled(
            step, update, self._precision_of(step), bool(self.arguments["torch_compile"]), self.key, held,
            accumulation=self._accumulation, phases=self._phases(), updates_inside=self._updates_inside,
        )  # fmt: skip

    def _precision_of(self, step: StepModel) -> str:
        """Of matrix products as they run: methods may hold the weights in another type than the workload's."""
        if self.precision in ("bf16", "fp16"):
            return self.precision
        program = next(iter(step.programs.values()))
        flops: dict[str, float] = {}
        for (_, dtype), numbers in zip(program.ops, program.op_numbers @ features(2, 128), strict=True):
            flops[dtype] = flops.get(dtype, 0.0) + float(numbers[0])
        most = max(flops, key=lambda dtype: flops[dtype], default="")
        return {"bfloat16": "bf16", "float16": "fp16"}.get(most, self.precision)

    @property
    def _accumulation(self) -> int | None:
        """Micro-batches a step where the methods leave no choice."""
        asked = self.arguments.get(_ACCUMULATION)
        alone = any("gradient-accumulation" in method.spec.conflicts_with for method in self.recipe)
        return 1 if asked is None and alone else asked

    def _phases(self) -> tuple[Phase, ...]:
        """The stretches of the run in which a step is cheaper; those of several methods apply one after another."""
        total = self.context().total_steps
        found: list[Phase] = []
        for method in self.recipe.using("phases"):
            found = crossed(found, method.phases(self.workload.config, total) or [])
        return tuple(found)

    @property
    def _updates_inside(self) -> bool:
        return any(getattr(method, "updates_inside", False) for method in self.recipe)

    def _update_bytes(self, parameter: torch.Tensor) -> int:
        from thrifty.planner.update import HeldByUpdates

        if self._closed_form is not None:
            return 0 if self._closed_form.temporary == "none" else parameter.nbytes
        self._held = self._held or HeldByUpdates(self.build_optimizer, cuda=self._dialect == "cuda")
        return self._held(reversed(self._models), parameter)

    @property
    def names(self) -> str:
        """The methods, for people."""
        return ", ".join(m.name for m in self.recipe) or "no methods"

    def is_stored(self) -> bool:
        """Whether the dry run of the micro-batch is at hand."""
        return self.key in PASSES or self._pass_path.exists()

    def is_answered(self) -> bool:
        """Whether the dry run of the micro-batch, or that there can be none, is known."""
        return self.is_stored() or self._failure_path.exists()

    def update_is_stored(self, step: StepModel) -> bool:
        """Whether the dry run of the update is at hand, or none is needed."""
        key = self.update_key(step)
        return self._closed_form is not None or key in UPDATES or self._update_path(key).exists()

    @property
    def _pass_path(self) -> Path:
        return cache_folder() / f"{self.key}.step"

    @property
    def _failure_path(self) -> Path:
        """Why the class cannot be dry-run, so that the next search does not try again."""
        return cache_folder() / f"{self.key}.no"

    def _update_path(self, key: str) -> Path:
        return cache_folder() / f"{key}.update"

    def compile_pass(self) -> StepModel:
        """Dry-runs a micro-batch, or reads an earlier dry run. Raises as `compile`."""
        from thrifty.planner.events import TraceMismatch

        self.check_device()
        if self.key in PASSES:
            return PASSES[self.key]
        if self._failure_path.exists():
            raise self._no_dry_run(self._failure_path.read_text("utf-8"))
        if self._pass_path.exists():
            model = load_step(self._pass_path)
        else:
            try:
                model = self._dry_run()
            except TraceMismatch as error:
                why = str(error)
                write(lambda file: file.write_text(why, "utf-8"), self._failure_path)
                raise self._no_dry_run(why) from error
            save_step(model, self._pass_path)
        return remember(PASSES, self.key, model)

    def _dry_run(self) -> StepModel:
        """Runs the micro-batch on tensors without values, the cheapest way first."""
        from thrifty.planner.events import TraceMismatch
        from thrifty.planner.fit import compile_step

        seq = self.workload.seq_len
        facts = [load_facts(part._pass_path) for part in self.parts]
        known = [fact for fact in facts if fact is not None] if facts and None not in facts else []
        step = self.step(known)
        meta = True if known and all(fact["meta"] for fact in known) else None
        try:
            return compile_step(step, seq=seq, meta=meta)
        except (TraceMismatch, RuntimeError, TypeError, ValueError):
            # Blocks that share weights: only a middle one adds to a gradient that others will add to. And what runs
            # alone on `meta` may not run there together.
            step = dataclasses.replace(self.step(), least_blocks=3)
            return compile_step(step, seq=seq)

    def _no_dry_run(self, why: str) -> InputError:
        return InputError(f"cannot be dry-run with {self.names}: {why}", key="model", value=self.workload.name)

    @property
    def _closed_form(self) -> ClosedForm | None:
        optim = str(getattr(self.arguments["optim"], "value", self.arguments["optim"]))
        return CLOSED_FORMS.get(optim) if self.recipe.owner("optimizer") is None else None

    def compile_update(self, step: StepModel) -> OptimizerModel | ClosedForm:
        """Dry-runs the update after a compiled pass, or reads an earlier dry run. Raises as `compile`."""
        from thrifty.planner.fit import compile_optimizer

        if self._closed_form is not None:
            return self._closed_form
        key = self.update_key(step)
        if key in UPDATES:
            return UPDATES[key]
        path = self._update_path(key)
        if path.exists():
            return remember(UPDATES, key, load_update(path))
        try:
            model = compile_optimizer(self.step())
        except RuntimeError as error:
            # Reading a value of a fake tensor; the exception's class is private to torch.
            if type(error).__name__ != "DataDependentOutputException":
                raise
            return remember(UPDATES, key, measured_form(self.build_optimizer))
        save_update(model, path)
        return remember(UPDATES, key, model)

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
        values = {key: getattr(ctx.args, key) for key in GRAPH_ARGUMENTS if hasattr(ctx.args, key)}
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

        args = copy.copy(plain_arguments(TrainingArguments))
        for key, value in self.workload.arguments.items():
            if key in GRAPH_ARGUMENTS:
                object.__setattr__(args, key, value)
        object.__setattr__(args, "max_steps", self.workload.arguments.get("max_steps") or 1000)
        from thrifty import tasks

        ctx = Context(
            args=args, task=tasks.get(self.workload.task), planning=True, total_steps=args.max_steps,
            device_kind=self.device.kind, model_config=self.workload.config,
        )  # fmt: skip
        ctx.update_bytes = self._update_bytes
        ctx.regions = REGIONS.setdefault(content_hash([*self._common, self._attention]), {})
        return ctx

    def step(self, known: Sequence[Mapping[str, Any]] = ()) -> Step:
        """The training step as the tracer runs it.

        Args:
            known: What was found out about the parts of this class.
        """
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
        units = common_units(step, known) if known else self._units(step)
        return dataclasses.replace(step, units=units, warm_up=any(m.warms_up for m in self.recipe))

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

    def model_loss(self, model: nn.Module, inputs: Any) -> Any:
        """The loss before the methods have their say."""
        from thrifty.planner.step import outputs_loss

        return outputs_loss(model, inputs)

    def _loss(self) -> Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]:
        ctx = self.context()

        def chain(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            return self.model_loss(model, inputs)

        for method in reversed(self.recipe.using("wrap_loss")):
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
        if any(getattr(module, "traced_whole", False) for module in model.modules()):
            return dict(step.layers)  # what is done to a block depends on all of them: the full depth is traced
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and len(module) > 1:
                longest = max(longest, period([block_signature(block) for block in module]))
        return {name: max(unit, longest) for name, unit in {n: step.units.get(n, 1) for n in step.layers}.items()}


_PASS_HOOKS = ("prepare_model", "wrap_loss", "wrap_training_step", "on_train_begin")
_UPDATE_HOOKS = ("build_optimizer", "adjust_groups", "adjust_optimizer", "no_decay")
_KWARGS, _ACCUMULATION = "checkpointing_kwargs", "gradient_accumulation_steps"
_OPTIMIZERS: dict[str, str] = {}


def _changes_pass(method: Method) -> bool:
    """Whether a method can change what a micro-batch runs, other than through training arguments."""
    return any(overrides(method, hook) for hook in _PASS_HOOKS)
