"""What the update of a single parameter takes for a moment, where updates run inside the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from thrifty.planner._private import FakeTensor, no_modes, storage_key, tree_leaves
from thrifty.planner.trace import ALLOC, FREE, Recorder
from thrifty.planner.tracer import StepCounts


class HeldByUpdates:
    """Answers `bytes_of_update` for the parameters of the models of a dry run, for equal ones once.

    Args:
        build: Makes the optimizer of a model's trainable parameters.
        cuda: As for `bytes_of_update`.
    """

    def __init__(self, build: Callable[[list[nn.Parameter]], Any], *, cuda: bool) -> None:
        self.build, self.cuda = build, cuda
        self._optimizers: dict[int, tuple[nn.Module, Any]] = {}
        self._known: dict[Any, int] = {}

    def __call__(self, models: Iterable[nn.Module], parameter: torch.Tensor) -> int:
        """The bytes for a parameter of one of the models."""
        model = next(m for m in models if any(p is parameter for p in m.parameters()))
        if id(model) not in self._optimizers:
            # The model is kept, so that no other one takes its identity.
            self._optimizers[id(model)] = (model, self.build([p for p in model.parameters() if p.requires_grad]))
        optimizer = self._optimizers[id(model)][1]
        number = next(n for n, g in enumerate(optimizer.param_groups) if any(p is parameter for p in g["params"]))
        key = (number, tuple(parameter.shape), parameter.dtype, parameter.is_meta)
        if key not in self._known:
            try:
                self._known[key] = bytes_of_update(optimizer, parameter, cuda=self.cuda)
            except RuntimeError as error:
                # Reading a value of a fake tensor; the exception's class is private to torch.
                if type(error).__name__ != "DataDependentOutputException":
                    raise
                self._known[key] = parameter.nbytes  # as `measured_form` has it
        return self._known[key]


def bytes_of_update(optimizer: Any, parameter: torch.Tensor, *, cuda: bool) -> int:
    """The most that a step allocates beyond weights, gradient and states, if `parameter` alone has a gradient.

    Args:
        optimizer: Of the model; it gets a state for the parameter.
        parameter: A fake or `meta` tensor with a gradient.
        cuda: As for `Recorder`.
    """
    gradient = parameter.grad
    mode = parameter.fake_mode if isinstance(parameter, FakeTensor) else None
    with no_modes(), mode or contextlib.nullcontext():
        _step(optimizer, parameter, gradient)  # the first one makes the states
        recorder = Recorder(cuda=cuda, mode=mode)
        known = [parameter, gradient, *tree_leaves(dict(optimizer.state[parameter]))]
        for tensor in known:
            if isinstance(tensor, torch.Tensor):
                recorder.living[storage_key(tensor.untyped_storage())] = -1
        with recorder:
            _step(optimizer, parameter, gradient)
        parameter.grad = gradient
    kind, sizes = np.array(recorder.log.kind), np.array(recorder.nbytes, np.int64)
    signs = (kind == ALLOC).astype(np.int64) - (kind == FREE)
    changes = np.array([signs[i] * sizes[ident] for i, ident in enumerate(recorder.log.ident) if signs[i]], np.int64)
    return int(np.cumsum(changes).max(initial=0))


def _step(optimizer: Any, parameter: torch.Tensor, gradient: Any) -> None:
    parameter.grad = gradient
    with StepCounts():
        type(optimizer).step(optimizer)
