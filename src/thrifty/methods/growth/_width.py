"""What the growing methods share: which axis of which parameter holds which units, and maps from new units to old."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from thrifty.architecture import find_blocks
from thrifty.method import NotApplicable

FUSED_THREE = "c_attn"  # query, key and value side by side
Pair = tuple[int, int]
"""Old and new size of an axis. Axes of the same pair hold the same kind of units, or kinds that grow alike."""


@dataclass(frozen=True)
class UnitMap:
    """Which old unit each new one is taken from.

    Args:
        index: Shape (new,), the old unit of each new one; the first `old` are the units themselves.
        old: Number of old units.
    """

    index: Tensor
    old: int

    @property
    def copies(self) -> Tensor:
        """Shape (new,): how many new units share the old unit of each."""
        return torch.bincount(self.index, minlength=self.old)[self.index]

    @property
    def is_even(self) -> bool:
        """Is every old unit taken equally often?"""
        return len(set(self.copies.tolist())) == 1


@dataclass(frozen=True)
class Axis:
    """One axis of a parameter that grows.

    Args:
        pair: Its old and new number of units.
        incoming: Does the layer sum over it?
        parts: Equal parts that stand side by side.
    """

    pair: Pair
    incoming: bool
    parts: int = 1


def narrowed(config: Any, width: float, layers: int, who: str) -> Any:
    """A configuration with a share of the hidden size, heads and feed-forward units, and with fewer blocks.

    The size of a head stays, and with it the scale of attention.

    Raises:
        NotApplicable: The share does not give whole heads.
    """
    small = copy.deepcopy(config)
    share = Fraction(width).limit_denominator(1000)
    sizes = {key: getattr(small, key, None) for key in _WIDTHS}
    for key, size in sizes.items():
        # One group of keys for all heads stays one.
        if isinstance(size, int) and not (key == "num_key_value_heads" and size == 1):
            scaled = size * share
            if scaled.denominator != 1 or scaled < 1:
                raise NotApplicable(
                    f"{who}: {size} {key} cannot be cut to a share of {width:g}",
                    key=f"methods.{who}.width",
                    value=width,
                    fix=f"one of {_shares(config)}",
                )
            setattr(small, key, int(scaled))
    old = small.num_hidden_layers
    small.num_hidden_layers = layers
    for key, value in vars(small).items():
        if isinstance(value, list) and len(value) == old and key.endswith(("layer_types", "_layers", "_pattern")):
            setattr(small, key, value[:layers])
    return small


_WIDTHS = ("hidden_size", "intermediate_size", "n_inner", "num_attention_heads", "num_key_value_heads")


def _shares(config: Any) -> list[float]:
    sizes = [getattr(config, key, None) for key in _WIDTHS]
    counts = [s for s in sizes if isinstance(s, int) and s > 1]
    return [1 / n for n in range(1, min(counts) + 1) if all(c % n == 0 for c in counts)]


def unit_maps(small: Any, full: Any, rng: torch.Generator) -> dict[Pair, UnitMap]:
    """Maps for all kinds of units, from two configurations. Whole heads are copied.

    Units are repeated in order where the new number is a multiple of the old one, and drawn at random for the rest.
    """
    head = getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads
    maps: dict[Pair, UnitMap] = {}

    def choose(old: int, new: int) -> Tensor:
        whole = torch.arange(old).repeat(new // old)
        return torch.cat([whole, torch.randint(old, (new - len(whole),), generator=rng)])

    def add(old: int, new: int, block: int = 1, units: Tensor | None = None) -> None:
        if old == new or (old * block, new * block) in maps:
            return
        units = choose(old, new) if units is None else units
        index = (units[:, None] * block + torch.arange(block)).flatten()
        maps[(old * block, new * block)] = UnitMap(index, old * block)

    heads, groups = small.num_attention_heads, getattr(small, "num_key_value_heads", None)
    if groups and groups < heads and groups != full.num_key_value_heads:
        # Heads that share keys and values are copied together with them.
        units = choose(groups, full.num_key_value_heads)
        add(groups, full.num_key_value_heads, head, units)
        add(groups, full.num_key_value_heads, head * (heads // groups), units)
    add(heads, full.num_attention_heads, head)
    add(small.hidden_size, full.hidden_size)
    add(_feed_forward(small), _feed_forward(full))
    return maps


def _feed_forward(config: Any) -> int:
    for key in ("intermediate_size", "n_inner"):
        if isinstance(getattr(config, key, None), int):
            return getattr(config, key)
    return 4 * config.hidden_size


def growing_axes(small: nn.Module, full: nn.Module, who: str) -> dict[str, tuple[Axis | None, ...]]:
    """For each parameter of `full` (one block of each stack stands for all) the axes that grow.

    Raises:
        NotApplicable: A parameter grows whose axes are not understood.
    """
    old_shapes = {n: p.shape for n, p in small.named_parameters()}
    found: dict[str, tuple[Axis | None, ...]] = {}
    kinds = dict(full.named_modules())
    for name, p in full.named_parameters():
        if name not in old_shapes:
            continue  # a block beyond the small model's
        old = old_shapes[name]
        owner = kinds[name.rpartition(".")[0]]
        incoming = {nn.Linear: 1, Conv1D: 0}.get(type(owner)) if name.endswith("weight") else None  # type: ignore[call-overload]
        parts = 3 if name.split(".")[-2:-1] == [FUSED_THREE] else 1
        axes: list[Axis | None] = []
        for axis, (before, after) in enumerate(zip(old, p.shape, strict=True)):
            count = parts if axis != incoming else 1
            known = isinstance(owner, nn.Linear | Conv1D | nn.Embedding | nn.Conv2d) or _is_norm(owner)
            if before != after and not known and p.shape[0] != 1 and p.ndim > 1:
                raise NotApplicable(
                    f"{who}: it is not known how {name} in {type(owner).__name__} grows",
                    fix="use a model family with plain Transformer blocks (Llama, GPT-2, BERT, ViT, ...)",
                )
            pair = (before // count, after // count)
            axes.append(Axis(pair, axis == incoming, count) if before != after else None)
        found[name] = tuple(axes)
    return found


def expand(
    tensor: Tensor,
    axes: tuple[Axis | None, ...],
    maps: Mapping[Pair, UnitMap],
    *,
    following: Tensor | None = None,
    noise: float = 0.0,
    rng: torch.Generator | None = None,
) -> Tensor:
    """A parameter for more units. What is summed over is divided by the number of copies.

    Args:
        tensor: The old parameter.
        axes: What its axes are, as from `growing_axes`.
        maps: For each pair of sizes where the new units come from.
        following: The same parameter of the next block: the added outgoing units are taken from it (AKI).
        noise: Standard deviation, relative to that of the tensor, of what is added to the weights of copied units
            without changing their sum.
        rng: For the noise.
    """
    for axis, kind in enumerate(axes):
        if kind is None or not kind.incoming:
            continue
        units = _lookup(maps, kind)
        old = tensor
        tensor = _pick(tensor, axis, kind, units) / _along(units.copies, tensor.ndim, axis).to(tensor)
        if following is not None:
            following = _pick(following, axis, kind, units) / _along(units.copies, tensor.ndim, axis).to(tensor)
        if noise and old.numel() > 1:
            added = torch.randn(tensor.shape, generator=rng).to(tensor) * old.std() * noise
            sums = torch.zeros_like(old).index_add_(axis, units.index.to(tensor.device), added)
            added = added - _pick(sums, axis, kind, units) / _along(units.copies, tensor.ndim, axis).to(tensor)
            tensor = tensor + added
    for axis, kind in enumerate(axes):
        if kind is None or kind.incoming:
            continue
        units = _lookup(maps, kind)
        tensor = _pick(tensor, axis, kind, units)
        if following is not None:
            following = _pick(following, axis, kind, units)
            is_new = (torch.arange(len(units.index)) >= units.old).repeat(kind.parts)
            tensor = torch.where(_along(is_new, tensor.ndim, axis).to(tensor.device), following, tensor)
    return tensor


def check_maps(axes: Mapping[str, tuple[Axis | None, ...]], maps: Mapping[Pair, UnitMap]) -> None:
    """Raises `NotApplicable` where an axis grows for which there is no map."""
    for kind in (axis for found in axes.values() for axis in found if axis is not None):
        _lookup(maps, kind)


def _lookup(maps: Mapping[Pair, UnitMap], kind: Axis) -> UnitMap:
    if kind.pair not in maps:
        raise NotApplicable(
            f"growth: an axis grows from {kind.pair[0]} to {kind.pair[1]}, which is neither hidden size, heads nor "
            "feed-forward units",
            fix="use a model family with plain Transformer blocks (Llama, GPT-2, BERT, ViT, ...)",
        )
    return maps[kind.pair]


def _pick(tensor: Tensor, axis: int, kind: Axis, units: UnitMap) -> Tensor:
    index = torch.cat([units.index + part * units.old for part in range(kind.parts)])
    return tensor.index_select(axis, index.to(tensor.device))


def _along(values: Tensor, dims: int, axis: int) -> Tensor:
    return values.view([-1 if i == axis else 1 for i in range(dims)])


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def last_norm(model: nn.Module) -> str | None:
    """Name of the last normalisation that is not inside a block: what a tied head reads."""
    prefixes = tuple(f"{blocks.prefix}." for blocks in find_blocks(model))
    names = [n for n, m in model.named_modules() if _is_norm(m) and not n.startswith(prefixes)]
    return names[-1] if names else None


def is_tied(model: Any) -> bool:
    """Is the head the same tensor as the embedding?"""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head is not None and head.weight is model.get_input_embeddings().weight
