"""Offloading of activations.

What it does: moves what the backward pass needs to the host's memory during the forward pass, and back in time for it:
copies run on a stream of their own, and the next ones are fetched while the present ones are used.

Helps: long sequences and large batches on a device with a fast link to the host, where recomputation would cost more.
Does not help: when weights, optimizer states or the logits are the peak, or the link is slow.
Limits: the host needs the memory, pinned. On a CPU there is no other memory to move to: the copies are made
(emulated), and nothing is saved. Weights, whole numbers and small tensors stay. Under gradient checkpointing only the
inputs of the blocks are there to be moved.
Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design", 2016.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import Method, Paper, register
from thrifty.methods._saved_tensors import SavedTensors
from thrifty.methods.offload._transfers import to_device, to_host


class _Moved:
    """A tensor on the host, and on the device where it was fetched."""

    def __init__(self, host: Tensor, device: torch.device, event: Any) -> None:
        self.host, self.device, self.event = host, device, event
        self.fetched: Tensor | None = None


class HostActivations(SavedTensors):
    """Saved tensors live on the host: `with HostActivations().around(model): loss = model(**batch).loss`.

    Args:
        least: Tensors with fewer elements stay on the device.
        prefetch: How many tensors are fetched ahead in the backward pass.
        forget: For a dry run: the host's memory is not counted, so nothing is kept but what was moved.
    """

    def __init__(self, least: int = 16384, *, prefetch: int = 2, forget: bool = False) -> None:
        super().__init__(least)
        self.prefetch, self.forget = prefetch, forget
        self.moved_bytes = 0
        self._order: deque[Any] = deque()
        self._streams: dict[torch.device, Any] = {}

    def store(self, tensor: Tensor) -> Any:
        self.moved_bytes += tensor.nbytes
        if self.forget:
            return to_host(tensor), tensor.shape, tensor.dtype
        if not tensor.is_cuda:
            return _Moved(tensor.clone(), tensor.device, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        side = self._stream(tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)  # its memory is not given away before the copy is done
        moved = _Moved(host, tensor.device, side.record_event())
        self._order.append(moved)
        return moved

    def load(self, payload: Any) -> Tensor:
        if self.forget:
            return to_device(*payload)
        if payload.event is None:
            return payload.host.clone()
        self._fetch(payload)
        while self._order and self._order[-1] is not payload:
            self._order.pop()  # never asked for
        if self._order:
            self._order.pop()
        for following in list(self._order)[-self.prefetch :][::-1] if self.prefetch else ():
            self._fetch(following)
        current = torch.cuda.current_stream(payload.device)
        current.wait_event(payload.event)
        tensor, payload.fetched = payload.fetched, None
        tensor.record_stream(current)
        return tensor

    def _fetch(self, moved: _Moved) -> None:
        if moved.fetched is not None:
            return
        side = self._stream(moved.device)
        with torch.cuda.stream(side):
            side.wait_event(moved.event)
            moved.fetched = moved.host.to(moved.device, non_blocking=True)
            moved.event = side.record_event()

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def begin(self) -> None:
        """A new forward pass: what an earlier one left is forgotten."""
        self._order.clear()
        self.moved_bytes = 0


@register(
    "activation-offload",
    title="Activation offloading",
    section="offload",
    sources=[Paper("Rhu et al.", 2016, "arXiv:1602.08124")],
    exact=True,
    preset={"least": 8},
    conflicts_with={"activation-compression": "both replace what autograd saves; only one can"},
    choices={"accelerator": [{}]},
    bench_order=46,
    emulated={"cpu": "the host is the device: copies are made, and nothing is saved"},
)
@dataclass(kw_only=True)
class ActivationOffload(Method):
    """Keeps activations on the host until the backward pass needs them."""

    least: int = 16384
    """Tensors with fewer elements stay on the device."""
    prefetch: int = 2
    """How many tensors are fetched ahead of their use."""

    host: HostActivations | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.least < 1:
            raise ValueError(f"least must be at least 1, got {self.least}")
        if self.prefetch < 0:
            raise ValueError(f"prefetch must not be negative, got {self.prefetch}")

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        if self.host is None:
            forget = ctx.planning and ctx.device_kind != "cpu"
            self.host = HostActivations(self.least, prefetch=self.prefetch, forget=forget)
        host = self.host

        def offloaded(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            host.begin()
            if ctx.planning:
                host.count_as_usual(inputs)
            with host.around(model):
                return compute_loss(model, inputs, num_items_in_batch)

        return offloaded
