"""Offloading of the optimizer to disk.

What it does: keeps AdamW's states, and float32 weights where training has others, in memory-mapped files. An update
goes through them in pieces: while one is updated on the host, the next is read and the one before is written.

Helps: when neither the device nor the host has memory for the states, and there is a fast disk (NVMe).
Does not help: on a slow disk: every step reads and writes 8 to 12 bytes a parameter.
Limits: AdamW only. The files are gone with the process; checkpoints hold the states as usual. On a CPU in tests any
disk stands for an NVMe (emulated).
Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", SC 2021.
Library: torch.from_file; torch.optim's fused AdamW, on the host.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thrifty.errors import InputError
from thrifty.method import Method, Paper, register
from thrifty.methods.offload._host_adamw import NothingOnDevice, update_
from thrifty.methods.optimizers._groups import clean

Piece = tuple[dict[str, Any], list[Tensor]]


def mapped(folder: Path, shape: torch.Size) -> Tensor:
    """A float32 tensor of zeros whose memory is a file in `folder`; the file has no name and ends with the tensor."""
    handle, path = tempfile.mkstemp(dir=folder, suffix=".state")
    try:
        os.truncate(handle, max(4, 4 * shape.numel()))
        return torch.from_file(path, shared=True, size=max(1, shape.numel()), dtype=torch.float32)[
            : shape.numel()
        ].view(shape)
    finally:
        os.close(handle)
        os.unlink(path)


class DiskAdamW(torch.optim.Optimizer):
    """AdamW whose states are files.

    Args:
        params: Parameters or groups.
        folder: Where the files are; None keeps plain tensors and no threads (a dry run).
        lr: Learning rate.
        betas: Decay of the running means.
        eps: Added to the denominator.
        weight_decay: Decoupled decay.
        piece: Elements that are in memory at a time, twice; a larger parameter is a piece of its own.
    """

    keeps_low_bits = True  # of 16-bit weights, in float32 masters

    def __init__(
        self,
        params: Iterable[Any],
        folder: Path | None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        piece: int = 1 << 24,
    ) -> None:
        self.folder, self.piece = folder, piece
        self._pool = ThreadPoolExecutor(2) if folder is not None else None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _begin(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            names = ["exp_avg", "exp_avg_sq"]
            if p.device.type != "cpu" or p.dtype != torch.float32:
                names.append("master")
            for name in names:
                state[name] = torch.zeros(p.shape) if self.folder is None else mapped(self.folder, p.shape)
            if "master" in state:
                state["master"].copy_(p.detach())
        return state

    def _pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        for group in self.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            room = 0
            for p in group["params"]:
                if p.grad is None:
                    continue
                self._begin(p)
                if room < p.numel():
                    pieces.append((settings, []))
                    room = max(self.piece, p.numel())
                pieces[-1][1].append(p)
                room -= p.numel()
        return pieces

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update: read, compute and write overlap, over two buffers."""
        loss = closure() if closure is not None else None
        pieces = self._pieces()
        if not pieces:
            return loss
        masters = any("master" in self.state[p] for _, some in pieces for p in some)
        largest = max(sum(p.numel() for p in some) for _, some in pieces)
        rows = 3 if masters else 2
        buffers = [torch.empty(rows, largest) for _ in range(min(2, len(pieces)))]
        reading: Future[Any] | None = self._submit(self._read, pieces[0][1], buffers[0])
        writing: list[Future[Any] | None] = [None, None]
        for number, (settings, some) in enumerate(pieces):
            _wait(reading)
            if number + 1 < len(pieces):
                following = (number + 1) % 2
                _wait(writing[following])  # its buffer is free when it is on disk
                reading = self._submit(self._read, pieces[number + 1][1], buffers[following])
            self._update(settings, some, buffers[number % 2])
            writing[number % 2] = self._submit(self._write, some, buffers[number % 2])
        for future in writing:
            _wait(future)
        return loss

    def _submit(self, function: Callable[..., Any], *args: Any) -> Future[Any] | None:
        if self._pool is None:
            function(*args)
            return None
        return self._pool.submit(function, *args)

    def _parts(self, some: list[Tensor], buffer: Tensor) -> Iterable[tuple[Tensor, str, Tensor]]:
        start = 0
        for p in some:
            for row, name in enumerate(("exp_avg", "exp_avg_sq", "master")):
                if name in self.state[p]:
                    yield p, name, buffer[row, start : start + p.numel()].view(p.shape)
            start += p.numel()

    @torch.no_grad()
    def _read(self, some: list[Tensor], buffer: Tensor) -> None:
        for p, name, part in self._parts(some, buffer):
            part.copy_(self.state[p][name])

    @torch.no_grad()
    def _write(self, some: list[Tensor], buffer: Tensor) -> None:
        for p, name, part in self._parts(some, buffer):
            self.state[p][name].copy_(part)

    def _update(self, settings: dict[str, Any], some: list[Tensor], buffer: Tensor) -> None:
        views: dict[int, dict[str, Tensor]] = {id(p): {"step": self.state[p]["step"]} for p in some}
        for p, name, part in self._parts(some, buffer):
            views[id(p)][name] = part
        states = [views[id(p)] for p in some]
        weights = [state.get("master", p.detach()) for p, state in zip(some, states, strict=True)]
        gradients = [p.grad.to("cpu", torch.float32) for p in some]  # type: ignore[union-attr]
        update_(weights, gradients, states, settings)
        for p, state in zip(some, states, strict=True):
            if "master" in state:
                p.copy_(state["master"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the parent's, but states go into the files."""
        saved = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        order = [p for group in self.param_groups for p in group["params"]]
        for index, p in enumerate(order):
            if index in saved:
                state = self._begin(p)
                for name, value in saved[index].items():
                    state[name].copy_(value)


def _wait(future: Future[Any] | None) -> None:
    if future is not None:
        future.result()


@register(
    "nvme-offload",
    title="Optimizer states on disk",
    section="offload",
    sources=[Paper("Rajbhandari et al.", 2021, "arXiv:2104.07857")],
    exact=True,
    claims=("optimizer",),
    preset={"piece": 256},
    library="torch.optim",
    bench_order=48,
    emulated={"cpu": "any disk stands for an NVMe, so its speed is not that of one"},
)
@dataclass(kw_only=True)
class NvmeOffload(Method):
    """AdamW with its states in memory-mapped files."""

    path: str | None = None
    """A folder on the disk to use; default the run's output folder."""
    piece: int = 1 << 24
    """Elements that are in memory at a time, twice."""

    def __post_init__(self) -> None:
        if self.piece < 1:
            raise ValueError(f"piece must be at least 1, got {self.piece}")

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        if ctx.planning and ctx.device_kind != "cpu":
            return NothingOnDevice(clean(groups), lr=ctx.args.learning_rate)
        return DiskAdamW(
            clean(groups),
            None if ctx.planning else self._folder(ctx),
            lr=ctx.args.learning_rate,
            betas=(ctx.args.adam_beta1, ctx.args.adam_beta2),
            eps=ctx.args.adam_epsilon,
            piece=self.piece,
        )

    def _folder(self, ctx: Any) -> Path:
        folder = Path(self.path or ctx.args.output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            raise InputError(
                f"no file can be made there: {error.strerror}",
                key="methods.nvme-offload.path",
                value=str(folder),
                fix="name a folder on a disk that you may write to",
            ) from error
