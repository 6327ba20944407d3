"""Hooks that put something else in the place of the tensors that autograd saves for the backward pass.

Weights, buffers, whole numbers and small tensors stay as they are. A storage that several operations save, or save
views of, is replaced once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# A micro-batch that is worth offloading, and an image in it.
_USUAL_TOKENS, _IMAGE_TOKENS = 4096, 197


class _Replaced:
    """What stands for one storage, or for one view where the storage is much larger."""

    def __init__(self, payload: Any) -> None:
        self.payload = payload
        self.loaded: weakref.ref[Tensor] | None = None


class _Handle:
    """What autograd keeps: which replacement, and how the tensor lay in it."""

    def __init__(self, replaced: _Replaced, tensor: Tensor, whole: bool) -> None:
        self.replaced = replaced
        self.size = tensor.shape
        self.geometry = (tensor.stride(), tensor.storage_offset()) if whole else None


class SavedTensors:
    """Base of what offloads or compresses activations.

    Args:
        least: Tensors with fewer elements are left alone.
    """

    def __init__(self, least: int = 1024) -> None:
        self.least = least
        self._known: dict[int, dict[Any, weakref.ref[_Replaced]]] = {}
        self._fixed: set[int] = set()
        self._usual: tuple[int, int] | None = None

    def count_as_usual(self, inputs: Mapping[str, Any]) -> None:
        """For a dry run, whose shapes are not the run's: tensors are as large as they would be in a usual micro-batch.

        So it depends on their width alone which are replaced, and neither on the batch nor on the length.
        """
        first = next(iter(inputs.values()))
        self._usual = (first.shape[0], first.shape[1] if "input_ids" in inputs else _IMAGE_TOKENS)

    def _elements(self, tensor: Tensor) -> float:
        """Elements of a tensor, in a dry run those that a usual micro-batch of one sample would give it."""
        if self._usual is None or not tensor.ndim:
            return tensor.numel()
        batch, tokens = self._usual
        # What all samples share (angles of positions) does not grow with the batch.
        samples = batch if tensor.shape[0] % batch == 0 else 1
        return tensor.numel() / samples / tokens * _USUAL_TOKENS

    def store(self, tensor: Tensor) -> Any:
        """What is kept in place of a contiguous tensor."""
        raise NotImplementedError

    def load(self, payload: Any) -> Tensor:
        """The contiguous tensor again."""
        raise NotImplementedError

    def accepts(self, tensor: Tensor) -> bool:
        """Whether a tensor is replaced."""
        return (
            tensor.is_floating_point()
            and self._elements(tensor) >= self.least
            and type(tensor) is not nn.Parameter
            and tensor.untyped_storage()._cdata not in self._fixed
        )

    @contextlib.contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """What the model saves inside is replaced."""
        # Views of weights (a transposed matrix) are not parameters, but share their storage.
        self._fixed = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        if not self.accepts(tensor):
            return tensor
        storage = tensor.untyped_storage()
        elements = storage.nbytes() // tensor.element_size()
        # Parts of a fused projection: together they fill the storage.
        whole = elements <= 4 * tensor.numel()
        geometry = None if whole else (tensor.shape, tensor.stride(), tensor.storage_offset())
        versions = self._known.get(storage._cdata)
        if versions is None:
            versions = self._known[storage._cdata] = {}
            weakref.finalize(storage, self._known.pop, storage._cdata, None)
        key = (tensor._version, tensor.dtype, geometry)
        found = versions.get(key)
        replaced = found() if found is not None else None
        if replaced is None or not self.suits(replaced.payload):
            bare = tensor.detach()
            flat = bare.as_strided((elements,), (1,), 0) if whole else bare.contiguous().view(-1)
            replaced = _Replaced(self.store(flat))
            versions[key] = weakref.ref(replaced)
        return _Handle(replaced, tensor, whole)

    def suits(self, payload: Any) -> bool:
        """Whether what stands for a storage already is good enough for another operation that saves it."""
        return True

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Handle):
            return packed
        replaced = packed.replaced
        flat = replaced.loaded() if replaced.loaded is not None else None
        if flat is None:
            flat = self.load(replaced.payload)
            replaced.loaded = weakref.ref(flat)
        if packed.geometry is None:
            return flat.view(packed.size)
        return flat.as_strided(packed.size, *packed.geometry)
