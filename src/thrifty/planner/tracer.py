"""Builds a model without memory, runs its training step on it, and hands out the record.

Models are built on `meta` and run there, or on fake CPU tensors, which take the paths of real ones at three times the
cost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

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
from thrifty.planner.dialect import CpuDialect, CudaDialect, Dialect
from thrifty.planner.step import Batch, Step
from thrifty.planner.trace import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    START,
    UPDATE,
    Recorder,
    Trace,
)


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
                vars(new).update(vars(parameter))
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                    new.register_post_accumulate_grad_hook(hook)
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
        meta: Whether to run on `meta` tensors instead of fake CPU ones. That is some three times faster, but some steps
            take
            other paths there, so compare before trusting it.
    """

    def __init__(self, step: Step, counts: Mapping[str, int], *, meta: bool = False) -> None:
        self.step, self.meta = step, meta
        model = step.prepared_model(counts)
        with self._mode() or contextlib.nullcontext():
            self.model = model if meta else fakeify(model)
        if step.autocast is not None and step.fp32_outputs:
            _convert_outputs(self.model, step.autocast)
        self._recorder, self._warm = Recorder(), False
        _follow(self.model, lambda: self._recorder)
        self.parameters = [
            (tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad) for p in self.model.parameters()
        ]

    def signature(self) -> list[list[object]]:
        """All that an optimizer can know of the parameters: names, shapes, types, decay, and marks of methods."""
        from transformers import Trainer

        decayed = set(Trainer.get_decay_parameter_names(None, self.model))  # type: ignore[arg-type]
        return [
            [name, list(p.shape), str(p.dtype), p.requires_grad, name in decayed, sorted(vars(p))]
            for name, p in self.model.named_parameters()
        ]

    def _mode(self) -> FakeTensorMode | None:
        if self.meta:
            return None  # the dialect makes new tensors on `meta`
        if not hasattr(self, "_fake"):
            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        return self._fake

    def _new_recorder(self) -> Recorder:
        return Recorder(cuda=self.step.dialect == "cuda", mode=self._mode())

    def _dialect(self) -> Dialect:
        if self.step.dialect == "cuda":
            return CudaDialect(self.step.attention, meta=self.meta)
        return CpuDialect(meta=self.meta)

    def forward_backward(self, batch: int, seq: int) -> Trace:
        """Runs one micro-batch, forward and backward, with no gradients at the start."""
        step, model = self.step, self.model
        cuda = step.dialect == "cuda"
        recorder = self._recorder = self._new_recorder()
        random = contextlib.nullcontext() if cuda else _random_state(recorder)
        dialect = self._dialect()
        with self._mode() or contextlib.nullcontext(), real_masks(padded=step.padded), random, dialect.cache(), dialect:
            if step.warm_up and not self._warm:
                # The very first pass may differ from all others (a method measures it), so nobody records it.
                recorder.enabled = False
                self._run(self._new_recorder(), step.build_batch(batch, seq))
                model.zero_grad(set_to_none=True)
                recorder.enabled = self._warm = True
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
        recorder = self._new_recorder()
        with self._mode() or contextlib.nullcontext():
            for parameter in trainable:
                parameter.grad = torch.empty_like(parameter)
            known = [*self.model.parameters(), *(p.grad for p in trainable if p.grad is not None)]
            optimizer = step.build_optimizer(trainable)
            with StepCounts():
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
                with StepCounts():
                    optimizer.step()
            recorder.enabled = False
            for parameter in trainable:
                parameter.grad = None
        return recorder.trace(start, self.parameters)


class StepCounts(TorchDispatchMode):
    """Answers an optimizer that reads a number from a tensor: what it reads is its count of steps, here 2."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return 2.0 if dtype.is_floating_point else dtype != torch.bool and 2
        return func(*args, **(kwargs or {}))


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
    """Records the states of the random generator that checkpointing keeps, which no dispatched operation makes."""
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
