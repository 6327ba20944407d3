"""Runs a schedule of recomputation over the blocks of a model, whoever calls them.

The blocks are called by the model's own loop. What autograd saves inside them is dropped, and found again when the
backward pass asks for it: the schedule is then followed up to that block. So nothing about the model has to be known:
other arguments of a block (masks, an encoder's output) stay what they were.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import get_device_states, set_device_states
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from thrifty.methods.checkpointing._chain import Chain, Op, Schedule, forward_length, periodic

Planner = Callable[[Chain], Schedule]


class Meter:
    """Counts the living bytes of the storages that it was shown; each once, until it is freed."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.bytes -= nbytes


class _Keep(torch.autograd.Function):
    """Saves a tensor for backward, so that hooks around the model (compression, offloading) see it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dummy: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty((0,))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing flows through a kept tensor")


class _Kept:
    """A tensor that is held until this object goes."""

    def __init__(self, tensor: Tensor) -> None:
        with torch.enable_grad():
            bare = tensor.detach().requires_grad_(tensor.requires_grad)  # hooks go by it
            self._node: Any = _Keep.apply(bare, torch.empty((0,), requires_grad=True)).grad_fn

    def get(self) -> Tensor:
        return self._node.saved_tensors[0]


class _Enough(Exception):
    """Everything that the backward pass needs has been computed again."""


class _Flops(TorchDispatchMode):
    """Counts the floating-point operations of matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.total += sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
        elif func.overloadpacket in flop_registry:
            self.total += int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
        return out


@dataclass
class _Stage:
    """One call of a block in one forward pass."""

    call: Callable[..., Any]
    rest: tuple[Any, ...]
    modes: list[tuple[str, bool, torch.dtype, bool]]
    requires_grad: bool
    random: Any
    beside: set[int]
    count: int = 0
    found: dict[int, Tensor] | None = None


@dataclass
class _Measured:
    """What the first pass learned of each stage."""

    flops: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    output: int = 0
    sources: set[int] = field(default_factory=set)

    def chain(self, costs: str, bandwidth: float, link: float | None) -> Chain:
        times = tuple(self.seconds if costs == "measured" else [max(f, 1.0) for f in self.flops])
        if costs != "measured":
            # Bytes in the time of one operation.
            bandwidth = bandwidth * sum(self.seconds) / sum(times) if link is None else link
        sizes = (*self.inputs, self.output)
        return Chain(
            forward=times, backward=tuple(2 * t for t in times), inputs=sizes, saved=tuple(self.saved),
            gradients=sizes, sources=frozenset(self.sources), bandwidth=bandwidth,
        )  # fmt: skip


class _Pass:
    """One forward pass through the blocks, and what its backward pass needs. Lives as long as the graph does."""

    def __init__(self, owner: ScheduledBlocks, ops: Schedule | None, measure: _Measured | None) -> None:
        self.meter, self.ops, self.measure = owner.meter, ops, measure
        self.host, self._holder = owner.host, owner.model
        self.stages: list[_Stage] = []
        self.held: dict[int, _Kept] = {}
        self._last: Callable[[], Tensor | None] = lambda: None
        self._passing: Tensor | None = None
        self.pointer = forward_length(ops) if ops else 0
        first = (ops or [])[: self.pointer]
        self._saves = {op.stage for op in first if op.kind == "save"}
        self._holds = {op.stage for op in first if op.kind == "hold"}
        self._outs = {op.stage for op in first if op.kind == "out"}

    # --- forward ---

    def run(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs the next block."""
        x, *rest = args
        number = len(self.stages)
        is_source = x is not self._last()
        beside = {t.untyped_storage()._cdata for t in _tensors((rest, getattr(call, "keywords", {})))}
        stage = _Stage(call, tuple(rest), _autocast(x), x.requires_grad, _random_state(x), beside)
        self.stages.append(stage)
        self._see(x)
        if number in self._saves:
            if is_source or number in self._holds:
                self.held[number] = _Kept(x)
            away = self.host.around(self._holder) if number in self._outs else self._watched(stage)
            with away:
                out = call(x, *rest)
        else:
            if self.ops is None or is_source or number in self._holds:
                self.held[number] = _Kept(x)
            with self._dropped(stage, number, x, is_source):
                out = call(x, *rest)
        hidden = out[0] if isinstance(out, tuple) else out
        self._see(hidden)
        self._last = weakref.ref(hidden)
        if self.measure is not None:
            self.measure.output = hidden.untyped_storage().nbytes()
        return out

    @contextlib.contextmanager
    def _watched(self, stage: _Stage) -> Iterator[None]:
        """A block that keeps its tensors; only where bytes are counted does anybody look."""
        if self.meter is None:
            yield
            return

        def pack(tensor: Tensor) -> Tensor:
            self._see_saved(tensor, stage)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    @contextlib.contextmanager
    def _dropped(self, stage: _Stage, number: int, x: Tensor, is_source: bool) -> Iterator[None]:
        measure = self.measure
        sizes: dict[int, Tensor] = {}  # held, lest an address come back for another tensor
        beside = {x.untyped_storage()._cdata, *stage.beside}

        def pack(tensor: Tensor) -> tuple[int, int]:
            if measure is not None and not _is_weight(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in beside:
                    sizes[storage._cdata] = tensor.detach()
            stage.count += 1
            return number, stage.count - 1

        counter = _Flops() if measure is not None else contextlib.nullcontext()
        begin = _now(x) if measure is not None else 0.0
        with saved_tensors_hooks(pack, self._unpack), counter:
            yield
        if measure is not None:
            measure.seconds.append(_now(x) - begin)
            measure.flops.append(counter.total if isinstance(counter, _Flops) else 0.0)
            measure.inputs.append(x.untyped_storage().nbytes())
            measure.saved.append(sum(t.untyped_storage().nbytes() for t in sizes.values()))
            if is_source and number:
                measure.sources.add(number)

    # --- backward ---

    def _unpack(self, handle: tuple[int, int]) -> Tensor:
        number, index = handle
        if self.ops is None:
            self.ops = periodic(len(self.stages), 1)
            self.pointer = forward_length(self.ops)
        if self.stages[number].found is None:
            self._follow(number)
        found = self.stages[number].found
        if found is None or index not in found:
            raise RuntimeError(
                "the backward pass reached a block twice or out of order, which a schedule of recomputation does not "
                "allow: use the policies full or every-n for it"
            )
        return found.pop(index)

    def _follow(self, number: int) -> None:
        """Executes the schedule until the tensors of a stage are there and nothing but its backward pass is due."""
        assert self.ops is not None
        while self.pointer < len(self.ops):
            op = self.ops[self.pointer]
            if op == Op("back", number):
                return
            self.pointer += 1
            if op.stage < len(self.stages):
                self._execute(op)

    def _execute(self, op: Op) -> None:
        kind, i = op
        stage = self.stages[i]
        if kind == "run":
            self._passing = self._again(i, keep=False, whole=True)
        elif kind == "save":
            assert self.ops is not None
            whole = self.pointer < len(self.ops) and self.ops[self.pointer] != Op("back", i)
            self._passing = self._again(i, keep=True, whole=whole)
        elif kind == "hold" and i not in self.held:
            assert self._passing is not None
            self.held[i] = _Kept(self._passing)
        elif kind == "back":
            self._passing, stage.found = None, None
            self.held.pop(i, None)
        elif kind == "drop":
            self.held.pop(i, None)

    def _again(self, number: int, *, keep: bool, whole: bool) -> Tensor | None:
        """Runs a stage again; keeps what it saves (`keep`), and stops early unless its output is wanted (`whole`)."""
        stage = self.stages[number]
        kept = self.held.get(number)
        x = self._passing if kept is None else kept.get()
        assert x is not None
        self._passing = None
        found: dict[int, Tensor] = {}
        seen = 0

        def pack(tensor: Tensor) -> None:
            nonlocal seen
            if keep:
                found[seen] = tensor.detach()
                self._see_saved(tensor, stage)
            seen += 1
            if not whole and seen == stage.count:
                raise _Enough

        begin = _now(x) if self.measure is not None else 0.0
        out: Any = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(_replayed(x, stage))
            stack.enter_context(saved_tensors_hooks(pack, _never))
            stack.enter_context(contextlib.suppress(_Enough))
            out = stage.call(x.detach().requires_grad_(stage.requires_grad), *stage.rest)
        if self.measure is not None:
            self.measure.seconds[number] = min(self.measure.seconds[number], _now(x) - begin)
        if keep:
            if stage.count and seen != stage.count:
                raise RuntimeError(
                    f"block {number} saved {stage.count} tensors in the forward pass and {seen} when it was computed "
                    "again: it is not deterministic, and cannot be checkpointed"
                )
            stage.found = found
        if out is None:
            return None
        hidden = (out[0] if isinstance(out, tuple) else out).detach()
        self._see(hidden)
        return hidden

    def _see_saved(self, tensor: Tensor, stage: _Stage) -> None:
        if not _is_weight(tensor) and tensor.untyped_storage()._cdata not in stage.beside:
            self._see(tensor)

    def _see(self, tensor: Tensor) -> None:
        if self.meter is not None:
            self.meter.add(tensor)


class ScheduledBlocks:
    """Makes blocks keep, drop and recompute their activations after a schedule.

    Args:
        model: A forward pass of it is one pass through the schedule.
        blocks: Its blocks, in the order in which they are called.
        schedule: What to do, or a function that plans it from the costs that the first pass measures. Until then only
            inputs of blocks are kept.
        costs: In what the function is given times: floating-point operations (`planned`: the same on all processes) or
            seconds (`measured`).
        bandwidth: Bytes a second to the host, for functions that offload.
        link: In its place, with planned costs: bytes in the time of one floating-point operation.
        host: Where what a stage saved goes when the schedule sends it out (`SavedTensors`).
        meter: Counts the bytes of held and saved tensors.
        replan: Whether a batch larger than any before is measured again.

    Gradients are those of the plain model to the bit: random states, autocast and all arguments of a block are
    restored.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        schedule: Schedule | Planner,
        *,
        costs: str = "planned",
        bandwidth: float = 0.0,
        link: float | None = None,
        host: Any = None,
        meter: Meter | None = None,
        replan: bool = True,
    ) -> None:
        self.replan, self.link = replan, link
        self.model, self.blocks, self.costs, self.bandwidth = model, list(blocks), costs, bandwidth
        self.host, self.meter = host, meter
        self.schedule: Schedule | None = None if callable(schedule) else schedule
        self._planner: Planner | None = schedule if callable(schedule) else None
        self.chain: Chain | None = None
        self._measured: _Measured | None = None
        self._largest = 0
        self._pass: _Pass | None = None
        # Between forward passes only the graph holds what its backward pass needs, and lets it go with itself.
        self._handles = [model.register_forward_pre_hook(self._forget), model.register_forward_hook(self._forget)]
        for block in self.blocks:
            _attach(block, self)

    def _forget(self, *args: Any) -> None:
        self._pass = None

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        """Runs one block: what Hugging Face models call in place of `torch.utils.checkpoint.checkpoint`."""
        if not torch.is_grad_enabled():
            return call(*args)
        call, args = _positional(call, args)
        if self._pass is None:
            self._pass = self._new_pass(args[0])
        return self._pass.run(call, args)

    def _new_pass(self, x: Tensor) -> _Pass:
        size = x.numel()
        if self.host is not None:
            self.host.begin()
        if self._planner is not None:
            if self._measured is not None and self._measured.seconds:
                self.chain = self._measured.chain(self.costs, self.bandwidth, self.link)
                self.schedule, self._measured = self._planner(self.chain), None
            if self.schedule is None or (self.replan and size > self._largest):
                # A batch larger than any before: its costs are other ones.
                self._largest, self._measured = size, _Measured()
                return _Pass(self, None, self._measured)
        return _Pass(self, self.schedule, None)

    def __deepcopy__(self, memo: Any) -> ScheduledBlocks:
        return self  # a block that is copied (growth) is under the same schedule

    def remove(self) -> None:
        """Gives the blocks their own `forward` back."""
        for handle in self._handles:
            handle.remove()
        for block in self.blocks:
            _detach(block)


def _attach(block: Any, owner: ScheduledBlocks) -> None:
    if hasattr(block, "gradient_checkpointing"):
        block.gradient_checkpointing, block._gradient_checkpointing_func = True, owner
        return
    inner = block.forward
    block.forward = lambda *args, **kwargs: (
        owner(_Bound(inner, kwargs), *args) if block.training else inner(*args, **kwargs)
    )


def _detach(block: Any) -> None:
    if hasattr(block, "gradient_checkpointing"):
        block.gradient_checkpointing = False
    else:
        del block.forward


class _Bound:
    """A call with keyword arguments, which a block's first argument may be among."""

    def __init__(self, func: Callable[..., Any], keywords: dict[str, Any]) -> None:
        self.func, self.keywords, self.args = func, keywords, ()

    def __call__(self, *args: Any) -> Any:
        return self.func(*args, **self.keywords)


def _positional(call: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The call with the hidden states as first positional argument, however the model passes them."""
    if args:
        return call, args
    keywords = dict(call.keywords)
    name = next(key for key, value in keywords.items() if isinstance(value, Tensor) and value.is_floating_point())
    hidden = keywords.pop(name)
    func, bound = call.func, call.args

    def named(x: Tensor) -> Any:
        return func(*bound, **{name: x}, **keywords)

    return named, (hidden,)


def _is_weight(tensor: Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, nn.Parameter) or (base is not None and base.is_leaf and base.requires_grad)


def _tensors(tree: Any) -> Iterator[Tensor]:
    from torch.utils._pytree import tree_leaves

    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _never(packed: Any) -> Tensor:
    raise AssertionError("the recomputed graph has no backward pass")


def _now(x: Tensor) -> float:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def _random_state(x: Tensor) -> tuple[Tensor, Any, str]:
    kind = x.device.type
    return torch.get_rng_state(), get_device_states(x) if kind not in ("cpu", "meta") else ([], []), kind


def _autocast(x: Tensor) -> list[tuple[str, bool, torch.dtype, bool]]:
    cache = torch.is_autocast_cache_enabled()
    kinds = dict.fromkeys(["cpu", x.device.type if x.device.type != "meta" else "cpu"])
    return [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), cache) for k in kinds]


@contextlib.contextmanager
def _replayed(x: Tensor, stage: _Stage) -> Iterator[None]:
    """Random state and autocast of the forward pass; with gradients, as then: kernels are chosen by it."""
    state, (devices, states), kind = stage.random
    with contextlib.ExitStack() as stack:
        if kind in ("cpu", "meta"):
            stack.enter_context(torch.random.fork_rng(devices=[]))
        else:
            stack.enter_context(torch.random.fork_rng(devices=devices, device_type=kind))
            set_device_states(devices, states, device_type=kind)
        torch.set_rng_state(state)
        for device, enabled, dtype, cache in stage.modes:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        stack.enter_context(torch.enable_grad())
        yield
