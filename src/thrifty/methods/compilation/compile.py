"""Compiled model.

What it does: lets torch.compile turn the Transformer blocks (or the whole model) into fused kernels, in training only:
evaluation runs as it is written. Batches may be padded to multiples of a length, so that few shapes are compiled. The
recompilations and graph breaks are counted and reported; too many end the run.

Helps: GPUs, where most of a small or medium model's time goes into elementwise operations and launches.
Does not help: short runs, which do not earn back the minutes of compilation; batches of ever new shapes.
Limits: the back end `inductor` needs a C++ compiler on a CPU and Triton on a GPU. The last bits of the result differ.
Source: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation", ASPLOS 2024.
Library: torch.compile.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty.architecture import find_blocks
from thrifty.errors import InputError, did_you_mean
from thrifty.method import Batch, Method, NotApplicable, Paper, TrainingData, register

IGNORED = -100
PARTITIONING = ("inductor", "aot_eager_decomp_partition")
"""Back ends that decide what the backward pass finds and what it computes again."""


def compile_in_training(
    model: nn.Module,
    *,
    backend: str = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    scope: Literal["blocks", "model"] = "blocks",
) -> int:
    """Compiles a model in place, for one's own loop: names of parameters stay, evaluation is left as it is.

    Args:
        model: Any model; without repeated blocks it is compiled as a whole.
        backend: As for `torch.compile`; also for the next two.
        mode: The same.
        dynamic: The same.
        scope: `blocks` compiles one block for all, in seconds; `model` everything, in minutes.

    Returns:
        How many modules were compiled.
    """
    targets = list(_targets(model, scope))
    for module in targets:
        module._compiled_call_impl = _Switch(  # type: ignore[assignment]
            module, torch.compile(module._call_impl, backend=backend, mode=mode, dynamic=dynamic)
        )
    return len(targets)


def undo(model: nn.Module) -> None:
    """Makes a compiled model run as it is written again."""
    for module in model.modules():
        module._compiled_call_impl = None


class _Switch:
    """Runs the compiled form in training, and the written one otherwise."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self.module, self.compiled = module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.compiled if self.module.training else self.module._call_impl
        return run(*args, **kwargs)


def _targets(model: nn.Module, scope: str) -> Iterator[nn.Module]:
    stacks = find_blocks(model) if scope == "blocks" else []
    if not stacks:
        yield model
    for blocks in stacks:
        yield from blocks


class CompileCounts:
    """What dynamo has done since this object was made."""

    def __init__(self) -> None:
        from torch._dynamo.utils import counters

        self._counters = counters
        self._start = self._now()
        self._seen = max((entry.start_time_us or 0 for entry in _compilations()), default=0)
        self.per_code: dict[tuple[Any, ...], int] = {}
        """How often each piece of code was compiled."""
        self.reason = ""
        """Of the last recompilation."""

    def read(self) -> dict[str, int]:
        """Numbers of compiled graphs, of recompilations among them, and of graph breaks. Call it often: dynamo keeps
        the last 64 compilations only."""
        new = [entry for entry in _compilations() if (entry.start_time_us or 0) > self._seen]
        for entry in new:
            code = (entry.co_filename, entry.co_name, entry.co_firstlineno)
            # What was compiled for another run before has a reason too, and is no recompilation of this one.
            if code in self.per_code and entry.recompile_reason:
                self.reason = entry.recompile_reason.partition("\n")[0]
            self.per_code[code] = self.per_code.get(code, 0) + 1
        self._seen = max((entry.start_time_us or 0 for entry in new), default=self._seen)
        graphs, breaks = (now - before for now, before in zip(self._now(), self._start, strict=True))
        again = sum(self.per_code.values()) - len(self.per_code)
        return {"graphs": graphs, "recompiles": again, "graph_breaks": breaks}

    def _now(self) -> tuple[int, int]:
        return self._counters["frames"]["ok"], sum(self._counters["graph_break"].values())


def _compilations() -> list[Any]:
    from torch._dynamo.utils import get_compilation_metrics

    return [entry for entry in get_compilation_metrics() if entry.co_name is not None]


class PadToMultiple:
    """Wraps a collator: token batches become as long as the next multiple, at the end of the rows.

    Args:
        collate: Makes batches of tensors (rows, length).
        multiple: Of which the length becomes a multiple.
        pad_token_id: Fills `input_ids`.
    """

    def __init__(self, collate: Callable[[list[Batch]], Batch], multiple: int, pad_token_id: int = 0) -> None:
        self.collate, self.multiple, self.pad_token_id = collate, multiple, pad_token_id

    def __call__(self, samples: list[Batch]) -> Batch:
        batch = self.collate(samples)
        length = batch["input_ids"].shape[1]
        room = -length % self.multiple
        if room == 0:
            return batch
        fillers = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return {key: self._padded(key, value, length, room, fillers) for key, value in batch.items()}

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to a collator that wants to know it."""
        if hasattr(self.collate, "set_epoch"):
            self.collate.set_epoch(epoch)  # type: ignore[attr-defined]

    def _padded(self, key: str, value: Any, length: int, room: int, fillers: dict[str, int]) -> Any:
        if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[1] != length:
            return value
        if key == "position_ids":  # packed rows: the padding is a sample of its own
            return torch.cat([value, torch.arange(room).expand(len(value), -1)], dim=1)
        return nn.functional.pad(value, (0, room), value=fillers.get(key, 0))


@register(
    "compile",
    title="Compiled model",
    section="compilation",
    sources=[Paper("Ansel et al.", 2024, "doi:10.1145/3620665.3640366")],
    exact=True,
    library="torch.compile",
    preset={"backend": "eager", "pad_to_multiple_of": 16},
    choices={"allow": [{}]},
    bench_order=20,
)
@dataclass(kw_only=True)
class Compile(Method):
    """torch.compile in training."""

    backend: str = "inductor"
    """One of `torch._dynamo.list_backends(exclude_tags=())`."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Of the back end `inductor`."""
    dynamic: bool | None = None
    """Compile for all shapes at once (true), for each (false), or for all from the second on (None); with
    `pad_to_multiple_of`, None means false."""
    scope: Literal["blocks", "model"] = "blocks"
    """Compile one block for all of them, in seconds, or the whole model, in minutes."""
    pad_to_multiple_of: int | None = None
    """Pad training batches to multiples of so many tokens, so that few lengths occur."""
    most_graphs: int = 32
    """So often one piece of code may be compiled; beyond it the run ends, since it would go on slowly."""

    counts: CompileCounts | None = field(default=None, init=False, repr=False)
    compiled: int = field(default=0, init=False, repr=False)
    _planning: bool = field(default=False, init=False, repr=False)
    _regions: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of must be at least 1, got {self.pad_to_multiple_of}")
        if self.most_graphs < 1:
            raise ValueError(f"most_graphs must be at least 1, got {self.most_graphs}")
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"mode is for the backend inductor only, got backend {self.backend}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        self._planning, self._regions = ctx.planning, ctx.regions
        if args.torch_compile:
            raise InputError("is set twice: by you and by the method 'compile'", key="torch_compile", fix="remove it")
        if ctx.planning:
            return {"torch_compile": True}
        known = torch._dynamo.list_backends(exclude_tags=())
        if self.backend not in known:
            raise InputError(
                f"no such back end{did_you_mean(self.backend, known)}",
                key="methods.compile.backend",
                value=self.backend,
                fix="one of " + ", ".join(torch._dynamo.list_backends()),
            )
        if self.backend == "inductor":
            _check_inductor(ctx.device)
        return {}

    def prepare_data(self, data: TrainingData, ctx: Any) -> TrainingData:
        if self.pad_to_multiple_of is None:
            return data
        sample = data.train_dataset[0] if hasattr(data.train_dataset, "__getitem__") else {}
        if "input_ids" not in sample:
            raise NotApplicable(
                "compile: the samples have no input_ids that could be padded",
                key="methods.compile.pad_to_multiple_of",
                value=self.pad_to_multiple_of,
                fix="remove it",
            )
        pad = getattr(ctx.processing_class, "pad_token_id", None) or 0
        return TrainingData(
            train_dataset=data.train_dataset,
            eval_dataset=data.eval_dataset,
            data_collator=PadToMultiple(data.data_collator, self.pad_to_multiple_of, pad),
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if self._planning:
            if self.backend in PARTITIONING:
                from thrifty.planner.regions import compile_regions

                compile_regions(_targets(kw["model"], "blocks"), self._regions)
            return
        # Beyond its limit dynamo would go on uncompiled with a warning.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, self.most_graphs + 1)
        self.counts = CompileCounts()
        self._compile(kw["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if self.counts is None:
            return
        self.counts.read()
        if max(self.counts.per_code.values(), default=0) > self.most_graphs:
            raise InputError(
                f"compile: the same code was compiled {self.most_graphs} times and again: {self.counts.reason}",
                key="methods.compile.most_graphs",
                value=self.most_graphs,
                fix="set pad_to_multiple_of (e.g. 64) or dynamic: true, or raise it",
            )

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        self._compile(model)

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        undo(model)
        return model

    def facts(self) -> dict[str, Any]:
        if self.counts is None:
            return {}
        found: dict[str, Any] = {"compiled modules": self.compiled, **self.counts.read()}
        if self.counts.reason:
            found["last reason"] = self.counts.reason
        return {key.replace("_", " "): value for key, value in found.items()}

    def _compile(self, model: nn.Module) -> None:
        dynamic = False if self.dynamic is None and self.pad_to_multiple_of else self.dynamic
        self.compiled = compile_in_training(
            model, backend=self.backend, mode=self.mode, dynamic=dynamic, scope=self.scope
        )


def _check_inductor(device: torch.device) -> None:
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++", "cl")):
        raise NotApplicable(
            "compile: the back end inductor needs a C++ compiler on a CPU, and there is none",
            key="methods.compile.backend",
            value="inductor",
            fix="install g++, or use backend: aot_eager",
        )
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise NotApplicable(
                "compile: the back end inductor needs Triton and a GPU from NVIDIA Volta on",
                key="methods.compile.backend",
                value="inductor",
                fix="install triton, or remove compile from the methods",
            )
