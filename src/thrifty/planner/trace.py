"""Runs a training step on fake tensors and records every allocation, free and operation in order.

Nothing is computed and no memory is taken: tensors have shapes, types and lifetimes only. The order of allocations and frees
is that of the real step, since the very same Python and C++ code decides it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from thrifty.planner._private import (
    FakeTensorMode,
    TorchDispatchMode,
    real_masks,
    run_backward,
    storage_key,
    tree_leaves,
)
from thrifty.planner.dialect import CpuDialect, CudaDialect, Dialect, dispatch
from thrifty.planner.opcost import OP_FIELDS, OpCoster, Record
from thrifty.planner.scratch import scratch_bytes
from thrifty.planner.step import Batch, Step

ALLOC, FREE, OP, ACCUMULATED = 0, 1, 2, 3
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "other")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, OTHER = range(6)
DIRECTIONS = ("start", "forward", "recompute", "backward", "optimizer")
START, FORWARD, RECOMPUTE, BACKWARD, UPDATE = range(5)


@dataclass
class Trace:
    """The record of one step.

    Attributes:
        kind: (events,) ALLOC, FREE, OP or ACCUMULATED (a gradient reached its parameter).
        ident: (events,) index of the allocation or of the operation.
        direction: (events,) index into `DIRECTIONS`.
        place: (events,) index into `places`.
        places: Names of modules, as a reader of the model knows them.
        nbytes: (allocations,) requested bytes, not rounded.
        category: (allocations,) index into `CATEGORIES`.
        source: (allocations,) name of the operation that allocated.
        op_names: (operations,) `aten.mm` and the like.
        op_dtypes: (operations,) data type of the first tensor.
        op_numbers: (operations, len(OP_FIELDS)) floating-point operations, bytes and matrix sizes.
        op_reads: (reads,) bytes read of each input of each operation.
        op_of_read: (reads,) to which operation an input belongs.
        start: Index of the first event of the step; the events before it are what lives when it starts.
        parameters: Shape, data type, whether trainable, of each parameter in order.
    """

    kind: np.ndarray
    ident: np.ndarray
    direction: np.ndarray
    place: np.ndarray
    places: list[str]
    nbytes: np.ndarray
    category: np.ndarray
    source: list[str]
    op_names: list[str]
    op_dtypes: list[str]
    op_numbers: np.ndarray
    op_reads: np.ndarray
    op_of_read: np.ndarray
    start: int
    parameters: list[tuple[tuple[int, ...], str, bool]]


@dataclass
class _Log:
    kind: list[int] = field(default_factory=list)
    ident: list[int] = field(default_factory=list)
    direction: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Logs allocations and frees of storages, and operations, while it is the active dispatch mode.

    Args:
        cuda: Whether to give outputs the types that CUDA gives them; otherwise what CPU kernels allocate inside themselves is
            measured and logged too.
    """

    def __init__(self, *, cuda: bool = True) -> None:
        super().__init__()
        self.log = _Log()
        self._cuda = cuda
        self.direction, self.place = START, 0
        self.places: list[str] = [""]
        self._place_ids: dict[str, int] = {"": 0}
        self.living: dict[int, int] = {}
        self.nbytes: list[int] = []
        self.source: list[str] = []
        self.category: dict[int, int] = {}
        self.ops: list[Record] = []
        self.enabled = True
        self._coster = OpCoster()

    def at(self, direction: int, name: str) -> None:
        """Says where in the step the following events happen."""
        self.direction = direction
        if name not in self._place_ids:
            self._place_ids[name] = len(self.places)
            self.places.append(name)
        self.place = self._place_ids[name]

    def _write(self, kind: int, ident: int) -> None:
        log = self.log
        log.kind.append(kind)
        log.ident.append(ident)
        log.direction.append(self.direction)
        log.place.append(self.place)

    def _freed(self, key: int, ident: int) -> None:
        if self.living.get(key) == ident:
            del self.living[key]
            if self.enabled:
                self._write(FREE, ident)

    def track(self, tensor: torch.Tensor, source: str, category: int | None = None) -> int:
        """Records the storage of `tensor` as allocated now, unless it is known; returns the index of the allocation."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        ident = self.living.get(key)
        if ident is None:
            ident = self.living[key] = len(self.nbytes)
            self.nbytes.append(storage.nbytes())
            self.source.append(source)
            self._write(ALLOC, ident)
            weakref.finalize(storage, self._freed, key, ident)
        if category is not None:
            self.category[ident] = category
        return ident

    def mark_accumulated(self, parameter: torch.Tensor) -> None:
        """Records that the gradient of `parameter` has been added to its `.grad`."""
        if parameter.grad is not None:
            self._write(ACCUMULATED, self.track(parameter.grad, "accumulate"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = dispatch(func, args, kwargs, cuda=self._cuda)
        if not self.enabled:
            return out
        if self.direction == BACKWARD or self.direction == RECOMPUTE:
            # Backward formulas run without gradients; recomputed forward code runs with them.
            self.direction = RECOMPUTE if torch.is_grad_enabled() else BACKWARD
        record = self._coster(func, args, kwargs, out)
        if record is not None:
            self._write(OP, len(self.ops))
            self.ops.append(record)
        source = record[0] if record is not None else str(func)
        if isinstance(out, torch.Tensor):
            self.track(out, source)
        elif isinstance(out, (list, tuple)):
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.track(leaf, source)
        if not self._cuda and record is not None:
            self._log_scratch(scratch_bytes(func, args, kwargs, record[2][0]), source)
        return out

    def _log_scratch(self, nbytes: int, source: str) -> None:
        if nbytes:
            self.nbytes.append(nbytes)
            self.source.append(f"{source} scratch")
            self._write(ALLOC, len(self.nbytes) - 1)
            self._write(FREE, len(self.nbytes) - 1)

    def clear(self) -> None:
        """Forgets the history: what lives now is what the step starts from, in the order of its allocation."""
        alive = sorted(self.living.values())
        self.log = _Log()
        self.direction, self.place = START, 0
        for ident in alive:
            self._write(ALLOC, ident)

    def trace(self, start: int, parameters: list[tuple[tuple[int, ...], str, bool]]) -> Trace:
        """Returns what has been recorded. Allocations without a known category are activations if they were made by forward
        code and freed by the backward pass, else temporaries."""
        kind = np.array(self.log.kind, np.int8)
        ident = np.array(self.log.ident, np.int32)
        direction = np.array(self.log.direction, np.int8)
        _order_frees(kind, ident, direction)
        born = np.full(len(self.nbytes), START, np.int8)
        died = np.full(len(self.nbytes), START, np.int8)
        born[ident[kind == ALLOC]] = direction[kind == ALLOC]
        died[ident[kind == FREE]] = direction[kind == FREE]
        forward = (born == FORWARD) | (born == RECOMPUTE)
        category = np.where(forward & (died == BACKWARD), ACTIVATIONS, TEMPORARIES)
        category[born == START] = OTHER
        for key, value in self.category.items():
            category[key] = value
        return Trace(
            kind=kind,
            ident=ident,
            direction=direction,
            place=np.array(self.log.place, np.int16),
            places=list(self.places),
            nbytes=np.array(self.nbytes, np.float64),
            category=category.astype(np.int8),
            source=list(self.source),
            op_names=[name for name, _, _, _ in self.ops],
            op_dtypes=[dtype for _, dtype, _, _ in self.ops],
            op_numbers=np.array([numbers for _, _, numbers, _ in self.ops], np.float64).reshape(-1, len(OP_FIELDS)),
            op_reads=np.array([read for _, _, _, reads in self.ops for read in reads], np.float64),
            op_of_read=np.array([at for at, (_, _, _, reads) in enumerate(self.ops) for _ in reads], np.int64),
            start=start,
            parameters=parameters,
        )


def _order_frees(kind: np.ndarray, ident: np.ndarray, direction: np.ndarray) -> None:
    """Puts neighbouring frees into the order of their allocation, in place.

    Where many tensors die at once (the cache of autocast) their order is that of a hash table, which says nothing.
    """
    same = (kind[1:] == FREE) & (kind[:-1] == FREE) & (direction[1:] == direction[:-1])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        ident[start : stop + 1].sort()


def fakeify(model: nn.Module) -> nn.Module:
    """Replaces parameters and buffers of a model built on `meta` by fake CPU tensors. Tied ones stay tied.

    Must be called inside a `FakeTensorMode`.
    """
    memo: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            memo[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return memo[id(tensor)]

    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in parameters:
                new = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
                new.__dict__.update(parameter.__dict__)
                parameters[id(parameter)] = new
            module._parameters[name] = parameters[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = fake(buffer)
    return model


class StepTracer:
    """Traces one step for several batch shapes on one fake model.

    Args:
        step: What to run.
        counts: The numbers of repeated blocks to build.
        meta: Whether to run on `meta` tensors instead of fake CPU ones. That is some three times faster, but some steps take
            other paths there, so compare before trusting it.
    """

    def __init__(self, step: Step, counts: Mapping[str, int], *, meta: bool = False) -> None:
        self.step, self.meta = step, meta
        model = step.prepared_model(counts)
        with self._mode():
            self.model = model if meta else fakeify(model)
        if step.autocast is not None and step.fp32_outputs:
            _convert_outputs(self.model, step.autocast)
        self._recorder = Recorder()
        _follow(self.model, lambda: self._recorder)
        self.parameters = [
            (tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad) for p in self.model.parameters()
        ]

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        if self.meta:
            return torch.device("meta")
        if not hasattr(self, "_fake"):
            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        return self._fake

    def _dialect(self) -> Dialect:
        if self.step.dialect == "cuda":
            return CudaDialect(self.step.attention, meta=self.meta)
        return CpuDialect(meta=self.meta)

    def forward_backward(self, batch: int, seq: int) -> Trace:
        """Runs one micro-batch, forward and backward, with no gradients at the start."""
        step, model = self.step, self.model
        cuda = step.dialect == "cuda"
        recorder = self._recorder = Recorder(cuda=cuda)
        random = contextlib.nullcontext() if cuda else _random_state(recorder)
        dialect = self._dialect()
        with self._mode(), real_masks(padded=step.padded), random, dialect.cache(), dialect:
            if step.warm_up:
                inputs = step.build_batch(batch, seq)
                with recorder:
                    self._run(recorder, inputs)
                model.zero_grad(set_to_none=True)
                del inputs
                recorder.clear()
            for parameter in model.parameters():
                recorder.track(parameter, "parameter", PARAMETERS)
            for buffer in model.buffers():
                recorder.track(buffer, "buffer", OTHER)
            inputs = step.build_batch(batch, seq)
            for value in inputs.values():
                recorder.track(value, "batch", OTHER)
            start = len(recorder.log.kind)
            with recorder:
                self._run(recorder, inputs)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    recorder.track(parameter.grad, "gradient", GRADIENTS)
            recorder.enabled = False
            model.zero_grad(set_to_none=True)
        return recorder.trace(start, self.parameters)

    def _run(self, recorder: Recorder, inputs: Batch) -> None:
        hooks = [
            parameter.register_post_accumulate_grad_hook(recorder.mark_accumulated)
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]
        recorder.at(FORWARD, "inputs")
        loss = forward_loss(self.step, self.model, inputs)
        recorder.at(BACKWARD, "loss")
        run_backward(loss)
        recorder.at(BACKWARD, "end")
        del loss
        for hook in hooks:
            hook.remove()

    def optimizer_step(self, step: Step) -> Trace:
        """Runs one optimizer step (the second: its state exists) with gradients at hand, and drops the gradients.

        Args:
            step: Whose `build_optimizer` and `clip_grad_norm` to use, on this tracer's model.

        Raises:
            ValueError: The step has no `build_optimizer`.
        """
        if step.build_optimizer is None:
            raise ValueError("this step has no build_optimizer")
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        recorder = Recorder(cuda=step.dialect == "cuda")
        with self._mode():
            for parameter in trainable:
                parameter.grad = torch.empty_like(parameter)
            known = [*self.model.parameters(), *(p.grad for p in trainable if p.grad is not None)]
            optimizer = step.build_optimizer(trainable)
            optimizer.step()
            # Parameters and gradients are counted by the forward and backward trace.
            for tensor in known:
                recorder.living[storage_key(tensor.untyped_storage())] = -1
            for state in optimizer.state.values():
                for value in tree_leaves(state):
                    if isinstance(value, torch.Tensor):
                        recorder.track(value, "state", OPTIMIZER)
            start = len(recorder.log.kind)
            recorder.at(UPDATE, "clipping")
            with recorder:
                if step.clip_grad_norm is not None:
                    norm = nn.utils.clip_grad_norm_(trainable, step.clip_grad_norm)
                    del norm
                recorder.at(UPDATE, "step")
                optimizer.step()
            recorder.enabled = False
            for parameter in trainable:
                parameter.grad = None
        return recorder.trace(start, self.parameters)


def forward_loss(step: Step, model: nn.Module, inputs: Batch) -> torch.Tensor:
    """Computes the loss as training would, under autocast if the step asks for it."""
    if step.autocast is None or step.fp32_outputs:
        return step.compute_loss(model, inputs)
    with torch.autocast("cpu", dtype=step.autocast):
        return step.compute_loss(model, inputs)


def _convert_outputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Wraps `forward` as accelerate does: autocast inside, and every output in float32."""
    from accelerate.utils import convert_to_fp32

    forward = model.forward

    def converted(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            outputs = forward(*args, **kwargs)
        return convert_to_fp32(outputs)

    model.forward = converted


@contextlib.contextmanager
def _random_state(recorder: Recorder) -> Iterator[None]:
    """Records the states of the random generator that checkpointing keeps: CPU memory that no dispatched operation makes."""
    original, fork = torch.get_rng_state, torch.random.fork_rng

    def get_rng_state() -> torch.Tensor:
        state = original()
        if recorder.enabled:
            recorder.track(state, "get_rng_state")
        return state

    def fork_rng(*args: Any, device_type: str = "cuda", **kwargs: Any) -> Any:
        # For `meta` nothing would be kept.
        return fork(*args, device_type="cuda" if device_type == "meta" else device_type, **kwargs)

    torch.get_rng_state, torch.random.fork_rng = get_rng_state, fork_rng
    try:
        yield
    finally:
        torch.get_rng_state, torch.random.fork_rng = original, fork


def _follow(model: nn.Module, recorder: Callable[[], Recorder]) -> None:
    """Registers hooks that tell the recorder which module is at work, forward and backward."""
    for module, name in _landmarks(model):
        after = "loss" if _is_head(model, module) else f"after {name}"

        def before_forward(module: nn.Module, args: Any, name: str = name) -> None:
            active = recorder()
            if active.direction in (START, FORWARD):
                active.at(FORWARD, name)

        def after_forward(module: nn.Module, args: Any, output: Any, name: str = name, after: str = after) -> None:
            active = recorder()
            if active.direction != FORWARD:
                return
            active.at(FORWARD, after)
            first = next((leaf for leaf in _tensors(output) if leaf.requires_grad), None)
            if first is not None:
                first.register_hook(lambda gradient: recorder().at(BACKWARD, name))

        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)


def _landmarks(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The repeated blocks, and outside of them the modules that own parameters, with names free of adapter wrappers."""
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(block) for block in blocks):
            continue
        short = name.removeprefix("base_model.model.")
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1:
            blocks.append(name + ".")
            for index, child in enumerate(module):
                yield child, f"{short}[{index}]"
        elif next(module.parameters(recurse=False), None) is not None:
            yield module, short or type(module).__name__


def _is_head(model: nn.Module, module: nn.Module) -> bool:
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if getter is not None else None
    return module is head or any(module is getattr(model, name, None) for name in ("classifier", "score", "lm_head"))


def _tensors(output: Any) -> Iterable[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return (output,)
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    return (value for value in values if isinstance(value, torch.Tensor))
