"""Out of memory in the middle of a run: the same micro-batch is split, and nothing else changes.

`MicroBatcher.run` calls a forward-and-backward function on a micro-batch. When memory runs out it drops the graph,
*leaves the `except` block* (a live traceback holds every activation), returns freed memory to the device, restores the
random state and goes on with halves. The global batch, the step and the data order stay; with dropout off the gradients
equal, to rounding, those of a run that had used the smaller micro-batch from the start.

Gradients: a backward that fails half way has already added to some `.grad`. Keeping a copy of them would cost a model's
worth of memory just when there is none, so finished micro-batches are remembered by reference (the batch and a few
kilobytes of random state, no activations), gradients go back to zero, and the accumulation is computed again. That
happens once for each new size.
"""

from __future__ import annotations

import ctypes
import gc
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from thrifty.errors import InputError

_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",  # Linux and macOS
    "DefaultCPUAllocator: not enough memory",  # Windows
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",  # Intel XPU, from oneAPI
    "PT_DEVMEM Allocation failed",  # Gaudi
)


class CannotSplit(InputError):
    """A micro-batch cannot be made smaller."""


def is_oom(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on any device.

    Accelerators raise `torch.OutOfMemoryError`; the CPU allocator and vendor libraries a plain RuntimeError, known by
    its text.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def rows_of(inputs: Mapping[str, Any]) -> int:
    """Returns the batch dimension that all tensors of a collated batch share.

    Raises:
        CannotSplit: There is no tensor, or the tensors disagree (flattened images, packed offsets).
    """
    sizes = {key: value.shape[0] for key, value in inputs.items() if hasattr(value, "shape") and len(value.shape) > 0}
    if len(set(sizes.values())) != 1:
        raise CannotSplit(f"the batch has no common first dimension to split along ({sizes})")
    return next(iter(sizes.values()))


def split_batch(inputs: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
    """Splits a collated batch along its first dimension.

    Args:
        inputs: Tensors or arrays of shape (rows, ...); lists and tuples of `rows` items are split too; everything else
            (numbers, strings, None, 0-d tensors) goes into each part as it is.
        parts: At least 1; at most `rows` parts come back, sizes differing by at most one, larger first.

    Returns:
        The parts, in order; tensors are views.

    Raises:
        CannotSplit: There is a single row, or no common first dimension.
    """
    rows = rows_of(inputs)
    if rows == 1 and parts > 1:
        raise CannotSplit("the batch holds a single sample and cannot be split")
    parts = min(parts, rows)
    bounds = [(rows * i + parts - 1) // parts for i in range(parts + 1)]
    return [{k: _rows(v, a, b, rows) for k, v in inputs.items()} for a, b in pairwise(bounds)]


def _rows(value: Any, start: int, stop: int, rows: int) -> Any:
    if hasattr(value, "shape"):
        return value[start:stop] if len(value.shape) > 0 else value
    if isinstance(value, (list, tuple)) and len(value) == rows:
        return value[start:stop]
    return value


def release_memory() -> None:
    """Gives freed memory back: cycles, the accelerator's cache, and on Linux the C library's heap.

    glibc serves tensors from its heap once some of their size have been freed, and a fragmented heap never shrinks. A
    fixed threshold of 64 KiB makes later tensors mappings of their own, which return at once. Set from the first
    out-of-memory on (and not from the start, as `MALLOC_MMAP_THRESHOLD_` would: that makes every step slower, 1.3 times
    on a small model).
    """
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(ctypes.c_int(-3), ctypes.c_int(65536))  # M_MMAP_THRESHOLD
        libc.malloc_trim(ctypes.c_size_t(0))
    except (AttributeError, OSError, TypeError):
        return  # not glibc


@dataclass(eq=False)
class _Piece:
    """A part of a micro-batch: its share of the rows, whether its loss counts, where its randomness began."""

    inputs: Mapping[str, Any]
    share: float
    counts: bool = True
    rng: Callable[[], None] | None = None
    retried: bool = False


class MicroBatcher:
    """Runs micro-batches, in smaller pieces where memory does not allow more.

    Args:
        model: Its gradients are dropped and recomputed after a failure.
        report: Gets one line for each new size.
        advise: Called with the batch and the error's text when a single sample does not fit; returns what would make it
            fit (`thrifty.safety.advice.advisor`, or the planner).
        cannot_recover: Says after a failure why it cannot be undone here (an optimizer inside backward, an exchange
            with other processes that had begun); such a failure is raised, with the reason. None where it can.
        limit: (rows, length) known to fit, from a trial step or a checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        report: Callable[[str], None] = print,
        advise: Callable[[Mapping[str, Any], str], Iterable[str]] = lambda inputs, message: (),
        cannot_recover: Callable[[], str | None] = lambda: None,
        limit: tuple[int, int] | None = None,
    ) -> None:
        self.model, self.cannot_recover = model, cannot_recover
        self.limits: dict[str, tuple[int, int] | None] = {"training": limit, "evaluation": None}
        self._report, self._advise = report, advise
        self.closing, self.retrying = True, False
        """Whether the piece at hand ends its micro-batch, and whether it runs for the second time."""
        self._done: list[_Piece] = []
        self._foreign_gradients = False
        self._parameters = list(model.parameters())  # walking the modules every step would cost more than all the rest
        self._norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]

    def begin_step(self) -> None:
        """Call before the first micro-batch of every optimizer step."""
        self._done.clear()
        self._foreign_gradients = any(p.grad is not None for p in self._parameters)

    def run(
        self, inputs: Mapping[str, Any], forward_backward: Callable[[Mapping[str, Any], float], torch.Tensor]
    ) -> torch.Tensor:
        """Runs one micro-batch, in one piece where it fits.

        Args:
            inputs: The collated micro-batch.
            forward_backward: Takes a piece and its share of the rows (1.0 for the whole); accumulates gradients;
                returns the detached loss, which must add up over pieces: a mean is to be multiplied by the share, a
                sum that is divided by `num_items_in_batch` is not.

        Returns:
            The sum of the losses of the pieces.

        Raises:
            InputError: A single sample does not fit, or the failure cannot be undone.
        """
        pending = deque(self._pieces(inputs, "training"))
        self.retrying = False
        losses: list[torch.Tensor] = []
        while pending:
            piece = self._next(pending, "training")
            if piece.rng is not None:
                piece.rng()
            else:
                piece.rng = self._state()
            self.closing = not pending
            loss, failure = _attempt(forward_backward, piece)
            if failure is None:
                assert loss is not None
                self._done.append(piece)
                if piece.counts:
                    losses.append(loss)
                continue
            del loss
            self.retrying |= self.closing
            halves = self._halves(piece, failure, "training")
            # Finished pieces of earlier micro-batches run again for their gradients, not for their losses.
            pending.extendleft(reversed([*self._done, *halves]))
            self._done.clear()
            losses.clear()
            self.model.zero_grad(set_to_none=True)
            release_memory()
        for piece in self._done:
            piece.counts = False
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def evaluate(
        self, inputs: Mapping[str, Any], forward: Callable[[Mapping[str, Any]], Any]
    ) -> list[tuple[float, Any]]:
        """Runs a forward function without gradients, in pieces where needed.

        Returns:
            For each piece its share of the rows and what `forward` returned, in order.
        """
        pending, results = deque(self._pieces(inputs, "evaluation")), []
        while pending:
            piece = self._next(pending, "evaluation")
            value, failure = _attempt(lambda part, share: forward(part), piece)
            if failure is None:
                results.append((piece.share, value))
                continue
            pending.extendleft(reversed(self._halves(piece, failure, "evaluation")))
            release_memory()
        return results

    def state_dict(self) -> dict[str, Any]:
        """The sizes (rows, length) that are known to fit; None where nothing failed."""
        return {where: list(limit) if limit is not None else None for where, limit in self.limits.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the sizes that are known to fit."""
        self.limits = {where: (limit[0], limit[1]) if limit is not None else None for where, limit in state.items()}

    def _pieces(self, inputs: Mapping[str, Any], where: str) -> list[_Piece]:
        limit = self.limits[where]
        rows = _rows_or_one(inputs)
        allowed = rows if limit is None else max(1, limit[0] * limit[1] // _length(inputs))
        if rows <= allowed:
            return [_Piece(inputs, 1.0)]
        return [_Piece(part, rows_of(part) / rows) for part in split_batch(inputs, -(-rows // allowed))]

    def _next(self, pending: deque[_Piece], where: str) -> _Piece:
        """Takes the next piece; one that is too large, as an earlier one has shown since, is split without a try."""
        piece = pending.popleft()
        smaller = self._pieces(piece.inputs, where) if self.limits[where] is not None and piece.rng is None else [piece]
        if len(smaller) == 1:
            return piece
        parts = [_Piece(part.inputs, piece.share * part.share, piece.counts) for part in smaller]
        pending.extendleft(reversed(parts[1:]))
        return parts[0]

    def _halves(self, piece: _Piece, failure: str, where: str) -> list[_Piece]:
        """Returns what to run instead of a piece that did not fit; the first inherits its random state."""
        key = "per_device_train_batch_size" if where == "training" else "per_device_eval_batch_size"
        reason = self.cannot_recover() if where == "training" else None
        if where == "training" and self._foreign_gradients:
            reason = reason or "gradients of an earlier step were kept, and part of this one is mixed in now"
        if reason is not None:
            fix = (
                _listed(self._advise(piece.inputs, failure))
                or "use a smaller micro-batch and more gradient_accumulation_steps"
            )
            raise InputError(f"out of memory, and the step cannot be undone: {reason} ({failure})", key=key, fix=fix)
        rows, length = _rows_or_one(piece.inputs), _length(piece.inputs)
        if rows == 1 and not piece.retried:
            # Fragments and another process's peak pass; a sample that is really too long fails twice.
            return [_Piece(piece.inputs, piece.share, piece.counts, piece.rng, retried=True)]
        if rows == 1:
            fix = _listed(self._advise(piece.inputs, failure)) or "use a shorter max_length"
            raise InputError(f"a batch of one sample, length {length}, does not fit ({failure})", key=key, fix=fix)
        halves = split_batch(piece.inputs, 2)
        fitting = rows_of(halves[0])
        self.limits[where] = (fitting, length)
        self._report(
            f"out of memory in {where} with {rows} x {length}: micro-batches of {fitting} rows of this length from now "
            "on; global batch, step and data order are unchanged"
        )
        parts = [_Piece(half, piece.share * rows_of(half) / rows, piece.counts) for half in halves]
        parts[0].rng = piece.rng
        return parts

    def _state(self) -> Callable[[], None]:
        """Takes what a forward pass changes besides gradients: random generators, batch norm's running statistics."""
        restore_rng = rng_snapshot()
        norms = [(b, b.clone()) for norm in self._norms for b in norm.buffers()]
        if not norms:
            return restore_rng

        def restore() -> None:
            restore_rng()
            for buffer, value in norms:
                buffer.copy_(value)

        return restore


def rng_snapshot() -> Callable[[], None]:
    """Takes the state of Python's, numpy's, torch's and the accelerator's generator; call the answer to go back.

    No device synchronisation: an accelerator's generator keeps its seed and offset on the host.
    """
    python, array, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = torch.get_device_module(device) if device is not None else None
    accelerator = module.get_rng_state() if module is not None else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(host)
        if module is not None:
            module.set_rng_state(accelerator)

    return restore


def _attempt(function: Callable[..., Any], piece: _Piece) -> tuple[Any, str | None]:
    """Returns the result, or the failure's first line: only text leaves, so that no traceback keeps the graph alive."""
    try:
        return function(piece.inputs, piece.share), None
    except Exception as error:
        if not is_oom(error):
            raise
        failure = str(error).strip() or type(error).__name__
    return None, failure.splitlines()[0]


def _rows_or_one(inputs: Mapping[str, Any]) -> int:
    """A batch that cannot be split (packed offsets, flattened images) is treated as one sample."""
    try:
        return rows_of(inputs)
    except CannotSplit:
        return 1


def _length(inputs: Mapping[str, Any]) -> int:
    ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
    return int(ids.shape[1]) if ids is not None and len(ids.shape) > 1 else 1


def _listed(lines: Iterable[str]) -> str:
    return "; ".join(f"({i}) {line}" for i, line in enumerate(lines, 1))
