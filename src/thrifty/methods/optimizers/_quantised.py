"""Optimizer states in 8 or 4 bits: blocks that are scaled by their largest entry and mapped to a code book.

The code books and the rounding are those of bitsandbytes (8 bits) and torchao (4 bits, fp8), so that a run may change
between this form, which runs anywhere, and the libraries' kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty.errors import NotApplicable
from thrifty.method import Method
from thrifty.methods.optimizers._adam import ByParameter, adam_direction
from thrifty.methods.optimizers._groups import refuse_sharding, split

Implementation = Literal["auto", "library", "torch"]


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
            values = self.book(signed, codes.device)[codes.int()]
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

    def read(self, p: Tensor, key: str, signed: bool) -> Tensor:
        """A state in float32; zeros before the first step."""
        state = self.state[p]
        if f"{key}_codes" not in state:
            return torch.zeros_like(p, dtype=torch.float32)
        return self.codec.decode(state[f"{key}_codes"], state[f"{key}_scale"], p.shape, signed)

    def write(self, p: Tensor, key: str, value: Tensor, signed: bool) -> None:
        """Stores a state."""
        state = self.state[p]
        state[f"{key}_codes"], state[f"{key}_scale"] = self.codec.encode(value, signed)


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
        gradient = gradient.float()
        stored = self.state[p]
        state: dict[str, Any] = stored
        quantised = self.is_quantised(p, group)
        if quantised:
            state = {
                "step": stored.get("step", 0),
                "exp_avg": self.read(p, "exp_avg", True),
                "exp_avg_sq": self.read(p, "exp_avg_sq", False),
            }
        direction = adam_direction(state, gradient, group["betas"], group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction.to(p.dtype), alpha=-group["lr"])
        if quantised:
            stored["step"] = state["step"]
            self.write(p, "exp_avg", state["exp_avg"], True)
            self.write(p, "exp_avg_sq", state["exp_avg_sq"], False)


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
        gradient, state, (beta1, beta2) = gradient.float(), self.state[p], group["betas"]
        quantised = self.is_quantised(p, group)
        if quantised:
            momentum = self.read(p, "exp_avg", True)
        else:
            momentum = state.setdefault("exp_avg", torch.zeros_like(p, dtype=torch.float32))
        sign = momentum.lerp(gradient, 1 - beta1).sign_()
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(sign.to(p.dtype), alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - beta2)
        if quantised:
            self.write(p, "exp_avg", momentum, True)


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
