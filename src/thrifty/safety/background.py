"""Checkpoints written beside training: what is to be saved is copied in memory, and a thread writes the copies.

`put_off` makes `torch.save` and safetensors' `save_file` take copies instead of writing; the writes it collects run
later with the very same functions, so that the files are the same to the byte. What cannot be copied (unusual objects,
no memory) is written at once. `BackgroundSave` is the thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers.modeling_utils as modeling

from thrifty.safety.oom import is_oom

Write = Callable[[], None]
_RESERVE = 0.05
"""Share of the host's memory that a copy leaves free."""
_PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device)


class CannotCopy(Exception):
    """An object that is not made of plain containers, plain values and ordinary tensors."""


class BackgroundSave:
    """One checkpoint on its way to the disk.

    Args:
        writes: What is to be written.
        sealing: Entered already; its exit makes the checkpoint visible, or cleans up after an error.
        then: Called in the thread once the checkpoint is there.
    """

    def __init__(self, writes: list[Write], sealing: contextlib.ExitStack, then: Callable[[], Any]) -> None:
        self._writes, self._sealing, self._then = writes, sealing, then
        self._error: BaseException | None = None
        # Not a daemon: an interpreter that ends waits for the checkpoint.
        self._thread = threading.Thread(target=self._run, name="thrifty-save")
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is complete; raises what went wrong with it."""
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        try:
            with self._sealing:
                while self._writes:
                    self._writes.pop(0)()  # each copy is freed as soon as it is written
            self._then()
        except BaseException as error:
            self._error = error


@contextlib.contextmanager
def put_off(folder: Path) -> Iterator[list[Write]]:
    """Inside, this thread's `torch.save` and `save_file` below `folder` copy; yields the list that the writes go to."""
    writes: list[Write] = []
    owner = threading.get_ident()

    def instead_of(write: Callable[..., Any]) -> Callable[..., Any]:
        def copy(what: Any, where: Any, *args: Any, **kwargs: Any) -> Any:
            inside = isinstance(where, str | os.PathLike) and folder in Path(where).parents
            if threading.get_ident() != owner or not inside:
                return write(what, where, *args, **kwargs)
            try:
                copied = copy_of(what)
            except Exception as error:
                if not isinstance(error, CannotCopy) and not is_oom(error):
                    raise
                copied = None
            if copied is None:
                return write(what, where, *args, **kwargs)
            writes.append(lambda: write(copied, where, *args, **kwargs))
            return None

        return copy

    places: tuple[tuple[Any, str], ...] = (
        (torch, "save"),
        (safetensors.torch, "save_file"),
        (modeling, "safe_save_file"),
    )
    originals = [getattr(module, name) for module, name in places]
    try:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, instead_of(original))
        yield writes
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def copy_of(value: Any) -> Any:
    """Copies tensors in nested plain containers to host memory; what shared storage or was one object still is.

    Raises:
        CannotCopy: Something in it is of another kind.
    """
    return _copy(value, {}, {})


def _copy(value: Any, seen: dict[int, Any], storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if id(value) in seen:
        return seen[id(value)]
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        made: Any = _copied_tensor(value, storages)
    elif kind is dict:
        made = seen[id(value)] = {}
        made.update((_copy(key, seen, storages), _copy(item, seen, storages)) for key, item in value.items())
    elif kind is list:
        made = seen[id(value)] = []
        made.extend(_copy(item, seen, storages) for item in value)
    elif kind is tuple:
        made = tuple(_copy(item, seen, storages) for item in value)
    else:
        raise CannotCopy(kind.__name__)
    seen[id(value)] = made
    return made


def _copied_tensor(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    if odd or (tensor.requires_grad and type(tensor) is not torch.nn.Parameter) or tensor.device.type == "meta":
        raise CannotCopy("tensor")
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
    return torch.nn.Parameter(made, tensor.requires_grad) if type(tensor) is torch.nn.Parameter else made


def fits_on_host(size: int) -> bool:
    """Is there room for so many bytes also at the moment in a step when the process holds the most?"""
    import psutil

    from thrifty.hardware.detect import detect
    from thrifty.report.metrics import _peak_resident_bytes

    host = detect(use_cpu=True)
    to_come = max(0, _peak_resident_bytes() - psutil.Process().memory_info().rss)
    return size + to_come + _RESERVE * host.memory_bytes < host.free_bytes
