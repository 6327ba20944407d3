"""Running a stretch of an encoder's blocks on some of the tokens: short sequences, not masks."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.architecture import main_blocks
from thrifty.method import NotApplicable


def require_task(model: nn.Module, ctx: Any, who: str, *allowed: str) -> None:
    """Raises `NotApplicable` (for the method `who`) where the model is not of one of the allowed tasks."""
    from thrifty import tasks

    task = ctx.task if ctx.task is not None else tasks.infer(model)
    if task.name not in allowed:
        raise NotApplicable(
            f"{who} works on {' and '.join(allowed)}, and {type(model).__name__} does {task.name}",
            fix=f"remove {who}, or train a model of that task",
        )


def gather_rows(hidden: Tensor, index: Tensor) -> Tensor:
    """Takes tokens out of (batch, length, width) by `index` (batch, kept)."""
    return hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[2]))


def scatter_rows(full: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Puts tokens back: `full` with `rows` (batch, kept, width) at `index` (batch, kept)."""
    return full.scatter(1, index[..., None].expand(-1, -1, full.shape[2]), rows.to(full.dtype))


def gather_mask(mask: Tensor, index: Tensor) -> Tensor:
    """The attention mask of the kept tokens: from (batch, length), or (batch or 1, heads or 1, queries or 1, keys)."""
    if mask.dim() == 2:
        return mask.gather(1, index)
    batch, kept = index.shape
    mask = mask.expand(batch, -1, -1, -1)
    mask = mask.gather(3, index[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1))
    if mask.shape[2] == 1:
        return mask
    return mask.gather(2, index[:, None, :, None].expand(-1, mask.shape[1], -1, kept))


class ShortBlocks:
    """Lets a stretch of a model's blocks see some of the tokens, while `keeping` is on.

    The states of the other tokens wait at the beginning of the stretch and join again, unchanged, at its end. Positions
    are those of the embeddings, and rotary ones are taken along.

    Args:
        model: An encoder.
        stretch: From the number of blocks to the first block that is short and the first one that is whole again.
        who: The method, for messages.

    Raises:
        NotApplicable: The model has no stack of blocks, or `stretch` is empty.
    """

    def __init__(self, model: nn.Module, stretch: Callable[[int], tuple[int, int]], who: str) -> None:
        self.stretch, self.who = stretch, who
        self.index: Tensor | None = None
        self._full: Tensor | None = None
        self._handles: list[Any] = []
        self.attach(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShortBlocks:
        return self  # the hooks of a copied block are served by the same object

    def attach(self, model: nn.Module) -> None:
        """Serves this model too (a dry run looks at several)."""
        blocks = list(main_blocks(model, self.who))
        first, last = self.stretch(len(blocks))
        if not 0 <= first < last < len(blocks):
            raise NotApplicable(
                f"{self.who}: of {len(blocks)} blocks none lies between the first {first} and the last "
                f"{len(blocks) - last} that see all tokens",
                fix="a deeper model, or other settings",
            )
        for number in range(first, last + 1):
            names = list(inspect.signature(type(blocks[number]).forward).parameters)[1:]
            hook = functools.partial(self._enter, names, number == first, number == last)
            self._handles.append(blocks[number].register_forward_pre_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def keeping(self, index: Tensor | None) -> Iterator[None]:
        """Inside, the stretch sees the tokens at `index` (batch, kept), ascending in each row; None: all."""
        self.index = index
        try:
            yield
        finally:
            self.index = None
            self._full = None

    def _enter(self, names: list[str], begins: bool, ends: bool, block: nn.Module, args: Any, kwargs: Any) -> Any:
        index = self.index
        if index is None:
            return None
        given = dict(zip(names, args, strict=False))
        call = {**given, **kwargs}
        hidden = call["hidden_states"]
        if ends:
            assert self._full is not None
            changed = {"hidden_states": scatter_rows(self._full, index, hidden)}
        else:
            changed = self._shortened(call, index, begins)
        args = tuple(changed.get(name, value) for name, value in given.items())
        kwargs = {name: changed.get(name, value) for name, value in kwargs.items()}
        return args, kwargs

    def _shortened(self, call: dict[str, Any], index: Tensor, begins: bool) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        if begins:
            full = self._full = call["hidden_states"]
            changed["hidden_states"] = gather_rows(full, index)
        mask, rotary = call.get("attention_mask"), call.get("position_embeddings")
        if isinstance(mask, Tensor):
            changed["attention_mask"] = gather_mask(mask, index)
        elif mask is not None:
            raise NotApplicable(
                f"{self.who} cannot shorten an attention mask of the class {type(mask).__name__}",
                key="attn_implementation",
                fix="sdpa or eager",
            )
        if isinstance(rotary, tuple):
            changed["position_embeddings"] = tuple(gather_rows(r.expand(len(index), -1, -1), index) for r in rotary)
        if isinstance(call.get("position_ids"), Tensor):
            ids = call["position_ids"]
            changed["position_ids"] = ids.expand(len(index), -1).gather(1, index)
        return changed


def keep_best(scores: Tensor, kept: int) -> Tensor:
    """Indices (batch, kept), ascending, of each row's largest scores (batch, length); of equal ones the first."""
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    return order[:, :kept].sort(dim=1).values
