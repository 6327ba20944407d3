"""One step on the longest batch before training: what does not fit is found in seconds, and nothing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from thrifty.safety.oom import rng_snapshot


def longest_indices(lengths: Sequence[int], count: int) -> list[int]:
    """Returns the indices of the `count` longest samples, longest first, ties in order.

    >>> longest_indices([3, 9, 1, 9], 3)
    [1, 3, 0]
    """
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))[:count]


def trial_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Mapping[str, Any],
    forward_backward: Callable[[Mapping[str, Any]], Any],
) -> None:
    """Runs forward, backward, optimizer step, and forward and backward again with the optimizer's state in place.

    Afterwards weights, buffers, optimizer state and groups, random state, gradients and training modes are bitwise as
    before, also when it fails. Weights that train are copied to host memory for the time of the trial.

    Args:
        model: The model, on its device.
        optimizer: Its optimizer; where it already has state (resume) that is kept.
        inputs: The longest batch.
        forward_backward: Runs the batch, through a `MicroBatcher` if smaller pieces are wanted; accumulates gradients.

    Raises:
        Whatever `forward_backward` raises, an out-of-memory among it.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper would move the fp16 scale
    restore_rng = rng_snapshot()
    modes = [(module, module.training) for module in model.modules()]
    kept = [(p, p.detach().to("cpu", copy=True)) for p in model.parameters() if p.requires_grad]
    kept += [(b, b.detach().to("cpu", copy=True)) for b in model.buffers()]
    had_state = len(optimizer.state) > 0
    state = copy.deepcopy(_to_host(optimizer.state_dict())) if had_state else None
    groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        forward_backward(inputs)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        forward_backward(inputs)
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for target, value in kept:
                target.copy_(value)
        optimizer.state.clear()
        if state is not None:
            optimizer.load_state_dict(state)
        for group, old in zip(optimizer.param_groups, groups, strict=True):
            for key in [k for k in group if k != "params" and k not in old]:
                del group[key]
            group.update(old)
        for module, mode in modes:
            module.training = mode
        restore_rng()


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: _to_host(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_to_host(v) for v in value]
    return value
