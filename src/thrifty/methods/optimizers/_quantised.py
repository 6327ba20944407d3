"""Optimizer states in 8 or 4 bits: blocks that are scaled by their largest entry and mapped to a code book.

The code books and the rounding are those of bitsandbytes (8 bits) and torchao (4 bits, fp8), so that a run may change
between this form, which runs anywhere, and the libraries' kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty.errors import NotApplicable
from thrifty.method import Method
from thrifty.methods.optimizers._adam import ByParameter, adam_direction, adamw_step
from thrifty.methods.optimizers._groups import refuse_sharding, split

Implementation = Literal["auto", "library", "torch"]
PIECE = 2**18
"""Elements whose states are in float32 at a time."""


@functools.cache
def dynamic_map(signed: bool, exponent_bits: int = 7, bits: int = 8) -> tuple[float, ...]:
    """The dynamic code book: values between 0 (or -1) and 1 whose relative precision falls with their size.

    A code's leading zeros give the power of ten, and what is left of it the fraction between 0.1 and 1.

    Returns:
        2^bits values in rising order; 0 and 1 are among them.

    >>> [round(v, 4) for v in dynamic_map(True, 3, 4)][:8]
    [-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0.0]
    """
    values = [0.0, 1.0]
    for exponent in range(exponent_bits):
        # The sign of unsigned values is a further bit of the fraction.
        count = 2 ** (exponent + bits - 1 - exponent_bits + (0 if signed else 1))
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float32)
        means = (10 ** (exponent - exponent_bits + 1) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += means
        if signed:
            values += [-v for v in means]
    return tuple(sorted(values))


@functools.cache
def linear_map(bits: int = 4) -> tuple[float, ...]:
    """Evenly spaced values up to 1, without zero: for second moments, whose root is divided by.

    >>> linear_map()[0], linear_map()[-1], len(linear_map())
    (0.0625, 1.0, 16)
    """
    return tuple((i + 1) / 2**bits for i in range(2**bits))


def scaled_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """x flattened to (blocks, block) and divided by each block's largest magnitude; and those, shape (blocks,)."""
    flat = x.detach().float().flatten()
    flat = nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    scale = flat.abs().amax(dim=1)
    return flat / scale.clamp_min(1e-12)[:, None], scale


@dataclass(frozen=True)
class Codec:
    """How a state is stored.

    Args:
        bits: 8 or 4; with kind fp8, 8.
        block: Elements that share a scale.
        kind: `map` looks up a code book, `fp8` stores float8 (e4m3).
    """

    bits: int
    block: int
    kind: Literal["map", "fp8"] = "map"

    def book(self, signed: bool, device: torch.device) -> Tensor:
        """The code book: shape (2^bits,), rising."""
        if self.bits == 8:
            return torch.tensor(dynamic_map(signed), device=device)
        return torch.tensor(dynamic_map(True, 3, 4) if signed else linear_map(), device=device)

    def encode(self, x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
        """Codes and scales of a tensor: the nearest entry of the code book for each element."""
        values, scale = scaled_blocks(x, self.block)
        if self.kind == "fp8":
            largest = torch.finfo(torch.float8_e4m3fn).max
            return (values * largest).to(torch.float8_e4m3fn).view(torch.uint8), scale
        book = self.book(signed, x.device)
        codes = torch.bucketize(values, (book[:-1] + book[1:]) / 2, out_int32=True, right=True).to(torch.uint8)
        if self.bits == 4:
            codes = (codes[:, ::2] << 4) | codes[:, 1::2]
        return codes, scale

    def decode(self, codes: Tensor, scale: Tensor, shape: torch.Size, signed: bool) -> Tensor:
        """The tensor that codes and scales stand for, in float32."""
        if self.kind == "fp8":
            largest = torch.finfo(torch.float8_e4m3fn).max
            values = codes.view(torch.float8_e4m3fn).float() / largest
        else:
            if self.bits == 4:
                codes = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1)
            # Plain indexing would make a copy of the codes in 64 bits.
            values = self.book(signed, codes.device).index_select(0, codes.int().flatten()).view(codes.shape)
        return (values * scale[:, None]).flatten()[: shape.numel()].view(shape)


class QuantisedOptimizer(ByParameter):
    """Base of the optimizers below: which tensors are quantised, and how states are read and written.

    Args:
        params: Parameters or groups; in a group with `quantise=False` all states stay float32.
        codec: How states are stored.
        min_size: Smaller tensors keep float32 states.
        defaults: Settings of the groups.
    """

    def __init__(self, params: Iterable[Any], codec: Codec, min_size: int, defaults: dict[str, Any]) -> None:
        self.codec, self.min_size = codec, min_size
        super().__init__(params, {**defaults, "quantise": True})

    def is_quantised(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Are this parameter's states stored in few bits?"""
        return bool(group["quantise"]) and p.numel() >= self.min_size

    def pieces(
        self, p: Tensor, gradient: Tensor, signed: dict[str, bool]
    ) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Walks through a parameter, so that what is computed in float32 is small, whatever the parameter's size.

        Args:
            p: The parameter.
            gradient: Its gradient.
            signed: The names of its quantised states, and whether each has a sign.

        Yields:
            A piece of the flat weights, to be changed in place; its gradient in float32; its states in float32, which
            are stored as they are when the next piece is asked for.
        """
        state, block, size = self.state[p], self.codec.block, p.numel()
        blocks = -(-size // block)
        for key in signed:
            if f"{key}_codes" not in state:
                shape = (blocks, block * self.codec.bits // 8)
                state[f"{key}_codes"] = torch.zeros(shape, dtype=torch.uint8, device=p.device)
                state[f"{key}_scale"] = torch.zeros(blocks, device=p.device)
        flat, gradients = p.reshape(-1), gradient.reshape(-1)
        rows = max(1, PIECE // block)
        for start in range(0, blocks, rows):
            part, some = slice(start * block, min((start + rows) * block, size)), slice(start, start + rows)
            weights = flat[part]
            stored = {key: (state[f"{key}_codes"][some], state[f"{key}_scale"][some]) for key in signed}
            values = {k: self.codec.decode(*both, weights.shape, signed[k]) for k, both in stored.items()}
            yield weights, gradients[part].float(), values
            for key, (codes, scale) in stored.items():
                for place, new in zip((codes, scale), self.codec.encode(values.pop(key), signed[key]), strict=True):
                    place.copy_(new)
        if not p.is_contiguous():
            p.copy_(flat.view(p.shape))  # its memory has gaps, and the flat form was a copy


class QuantisedAdamW(QuantisedOptimizer):
    """AdamW whose running means are stored in few bits.

    Args:
        params: Parameters or groups; in a group with `quantise=False` all states stay float32.
        codec: How states are stored.
        lr: Learning rate.
        betas: Decay of the running means.
        eps: Added to the denominator.
        weight_decay: Decoupled decay.
        min_size: Smaller tensors keep float32 states.
    """

    def __init__(
        self,
        params: Iterable[Any],
        codec: Codec,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        min_size: int = 4096,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, codec, min_size, defaults)

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        if not self.is_quantised(p, group):
            adamw_step(p, gradient.float(), self.state[p], group)
            return
        step, decay = self.state[p].get("step", 0), 1 - group["lr"] * group["weight_decay"]
        for weights, part, values in self.pieces(p, gradient, {"exp_avg": True, "exp_avg_sq": False}):
            direction = adam_direction({"step": step, **values}, part, group["betas"], group["eps"])
            weights.mul_(decay).add_(direction.to(p.dtype), alpha=-group["lr"])
        self.state[p]["step"] = step + 1


class QuantisedLion(QuantisedOptimizer):
    """Lion whose momentum is stored in few bits. Arguments as for `QuantisedAdamW`."""

    def __init__(
        self,
        params: Iterable[Any],
        codec: Codec,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        min_size: int = 4096,
    ) -> None:
        super().__init__(params, codec, min_size, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        if self.is_quantised(p, group):
            for weights, part, values in self.pieces(p, gradient, {"exp_avg": True}):
                self._lion(weights, part, values["exp_avg"], group)
            return
        momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p, dtype=torch.float32))
        self._lion(p, gradient.float(), momentum, group)

    def _lion(self, weights: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        sign = momentum.lerp(gradient, 1 - beta1).sign_()
        weights.mul_(1 - group["lr"] * group["weight_decay"]).add_(sign.to(weights.dtype), alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - beta2)


@dataclass(kw_only=True)
class SmallStates(Method):
    """What the methods with small optimizer states share."""

    min_size: int = 4096
    """Tensors with fewer elements keep 32-bit states."""

    def __post_init__(self) -> None:
        if self.min_size < 0:
            raise ValueError(f"min_size must not be negative, got {self.min_size}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        refuse_sharding(self.name, args)
        return {}

    def adamw(self, groups: list[dict[str, Any]], codec: Codec, ctx: Any) -> QuantisedAdamW:
        """AdamW with states of that form, and the run's own settings."""
        parts = quantised_groups(groups, ctx.model)
        return QuantisedAdamW(parts, codec, min_size=self.min_size, **adam_settings(ctx))


def adam_settings(ctx: Any) -> dict[str, Any]:
    """Learning rate, betas and epsilon of the run."""
    args = ctx.args
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def quantised_groups(groups: list[dict[str, Any]], model: nn.Module | None) -> list[dict[str, Any]]:
    """Splits the trainer's groups, so that embeddings (whose gradients are sparse and uneven) keep float32 states."""
    modules = () if model is None else model.modules()
    embeddings = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
    parts = split(groups, lambda name, p: id(p) not in embeddings)
    for part in parts:
        part["quantise"] = part.pop("chosen")
        del part["names"]
    return parts


def use_library(implementation: Implementation, name: str, library: str, ctx: Any) -> bool:
    """Shall the library's kernels run? `auto` takes them on CUDA.

    Raises:
        NotApplicable: They are wanted, and the library is not installed.
    """
    if implementation == "torch" or (implementation == "auto" and (ctx.planning or ctx.device.type != "cuda")):
        return False
    import importlib.util

    if importlib.util.find_spec(library) is None:
        raise NotApplicable(
            f"{name}: it runs on kernels of {library}, which is not installed",
            key=f"methods.{name}.implementation",
            value=implementation,
            fix="pip install 'thrifty[quant]', or set it to torch, which is slower",
        )
    return True


def bitsandbytes_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups for bitsandbytes, which is told of each embedding that its states stay in 32 bits."""
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    for group in groups:
        if not group["quantise"]:
            manager.override_config(group["params"], "optim_bits", 32)
    return [{key: value for key, value in group.items() if key != "quantise"} for group in groups]
