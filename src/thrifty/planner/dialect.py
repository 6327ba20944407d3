"""The CUDA dialect: makes a step on fake CPU tensors run the operations that CUDA would run.

Fake CPU tensors take CPU kernels: float dropout masks, another attention kernel, another list of operations that
autocast keeps in float32. This function mode replaces those calls by what CUDA does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from thrifty.planner._private import device_constructors, run_backward
from thrifty.planner.step import Attention

aten = torch.ops.aten

# What torch/csrc autocast for CUDA runs in float32 and autocast for CPU does not. By name, since each has several entry
# points (torch.exp, Tensor.exp, F.softmax, ...).
_FP32_ON_CUDA = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan",
    "pow", "__pow__", "__rpow__",
    "softplus", "layer_norm", "group_norm", "norm", "softmax", "log_softmax", "softmin",
    "cumsum", "cumprod", "prod", "sum", "nll_loss", "cross_entropy", "cosine_similarity", "cosine_embedding_loss",
    "poisson_nll_loss", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
}  # fmt: skip
# What autocast runs in lower precision, on every device.
_LOWER_PRECISION = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "einsum",
    "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention",
}  # fmt: skip
# What autocast runs in the widest type among the inputs.
_WIDEST = {"cat", "stack"}
# What autocast for the CPU runs in float32.
_FP32_ON_CPU = {
    "binary_cross_entropy", "prod", "mse_loss", "cosine_embedding_loss", "nll_loss", "cross_entropy", "kl_div",
    "l1_loss",
    "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "hinge_embedding_loss", "margin_ranking_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss", "poisson_nll_loss",
    "cdist",
}  # fmt: skip
_HALF = (torch.float16, torch.bfloat16)
# The memory-efficient kernel reads its bias in rows of this many elements.
_BIAS_ALIGNMENT = 16


class Dialect(TorchFunctionMode):
    """What the dialects share: the way into the autograd engine, and autocast for tensors on `meta`.

    Args:
        meta: Whether tensors are on `meta`, where PyTorch's autocast does nothing, so that its casts must be made here.
            New tensors without a named device are made there.
    """

    def __init__(self, *, meta: bool = False) -> None:
        super().__init__()
        self.meta = meta
        self._casts: dict[int, torch.Tensor] = {}
        self._constructors = device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            # The handler runs with the mode popped; recomputed forward code must see it again.
            with self:
                return run_backward(args[0], args[1] if len(args) > 1 else kwargs.get("gradient"))
        autocast = torch.is_autocast_enabled("cpu")
        name = getattr(func, "__name__", "")
        if self.meta and func in self._constructors and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        # Code under no_grad (rotary tables) switches autocast off by a way that does not reach `meta`.
        if self.meta and autocast and name in _LOWER_PRECISION and torch.is_grad_enabled():
            # Last argument first, as the compiled call evaluates them.
            kwargs = dict(reversed([(key, self._lower(value)) for key, value in reversed(kwargs.items())]))
            args = tuple(reversed([self._lower(value) for value in reversed(args)]))
        if self.meta and autocast and name in _WIDEST and any(t.dtype == torch.float32 for t in args[0]):
            args = ([_to_float32(t) for t in args[0]], *args[1:])
        return self.replace(func, name, args, kwargs, autocast)

    def replace(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], autocast: bool) -> Any:
        """Runs `func`, or what the device would run in its place."""
        raise NotImplementedError

    def _lower(self, value: Any) -> Any:
        """Casts one argument as autocast does, which casts each weight once."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._lower, value))
        dtype = torch.get_autocast_dtype("cpu")
        if (
            not isinstance(value, torch.Tensor)
            or not value.is_floating_point()
            or value.dtype in (dtype, torch.float64)
        ):
            return value
        if value.dtype != torch.float32 or not value.requires_grad or not value.is_leaf or value._is_view():
            return value.to(dtype)
        if id(value) not in self._casts:
            self._casts[id(value)] = value.to(dtype)
        return self._casts[id(value)]

    @contextlib.contextmanager
    def cache(self) -> Iterator[None]:
        """Forgets the cast weights when autocast ends, as PyTorch does."""
        clear = torch.clear_autocast_cache

        def cleared() -> None:
            clear()
            self._casts.clear()

        torch.clear_autocast_cache = cleared
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear
            self._casts.clear()


class CudaDialect(Dialect):
    """While active, attention, dropout and autocast take the form they have on a CUDA device.

    Args:
        attention: The kernel that SDPA chooses there: `flash` (where the inputs allow it, else efficient), `efficient`,
            `math`.
        meta: Whether tensors are on `meta`.
    """

    def __init__(self, attention: Attention = "flash", *, meta: bool = False) -> None:
        super().__init__(meta=meta)
        self.attention = attention

    def replace(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], autocast: bool) -> Any:
        """Runs what CUDA would run in the place of `func`."""
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if autocast and name in _FP32_ON_CUDA:
            with torch.autocast("cpu", enabled=False):
                return func(*map(_to_float32, args), **{key: _to_float32(value) for key, value in kwargs.items()})
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            value, key, query = value.to(dtype), key.to(dtype), query.to(dtype)
            if attn_mask is not None and attn_mask.dtype != torch.bool:
                attn_mask = attn_mask.to(dtype)
        flash = self.attention == "flash" and attn_mask is None and query.dtype in _HALF and query.shape[-1] <= 256
        if enable_gqa and key.shape[1] != query.shape[1] and not flash:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if flash:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if self.attention == "math":
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale
            )[0]
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        needs_logsumexp = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_logsumexp, dropout_p, is_causal, scale=scale
        )[0]


class CpuDialect(Dialect):
    """Gives tensors on `meta` the attention kernel and the casts that CPU tensors get; all else is alike."""

    def replace(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], autocast: bool) -> Any:
        """Runs what the CPU would run in the place of `func`."""
        if func is F.scaled_dot_product_attention:
            return _attend_on_cpu(*args, **kwargs) if self.meta else func(*args, **kwargs)
        if self.meta and autocast and name in _FP32_ON_CPU:
            with torch.autocast("cpu", enabled=False):
                return func(*map(_to_float32, args), **{key: _to_float32(value) for key, value in kwargs.items()})
        return func(*args, **kwargs)


def _attend_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, cuda: bool) -> Any:
    """Runs a dispatched operation without values, where needed with the output that the device's kernel makes."""
    if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        return _grouped_product(args[0], args[1], kwargs.get("offs", args[2] if len(args) > 2 else None))
    out = func(*args, **kwargs)
    if cuda and func is aten.native_layer_norm.default and args[0].dtype in _HALF:
        # CUDA keeps the statistics in float32, the CPU in the data type of the input.
        return out[0], *(statistic.to(torch.float32) for statistic in out[1:])
    return out


def _grouped_product(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """Makes the output of `torch._grouped_mm` for types that its shape function refuses and its kernels accept.

    Shapes: (rows, k) x (groups, k, n) gives (rows, n); (m, rows) x (rows, n) with offsets gives (groups, m, n); rows of
    the output are padded to 16 bytes.
    """
    if left.dim() == 2 and right.dim() == 2:
        assert offsets is not None
        shape = [offsets.shape[0], left.shape[0], right.shape[1]]
    elif left.dim() == 2:
        shape = [left.shape[0], right.shape[2]]
    elif right.dim() == 2:
        shape = [left.shape[1], right.shape[1]]
    else:
        shape = [left.shape[0], left.shape[1], right.shape[2]]
    grain = 16 // left.element_size()
    row = -(-shape[-1] // grain) * grain
    strides = [row, 1] if len(shape) == 2 else [shape[1] * row, row, 1]
    return left.new_empty_strided(shape, strides)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    # The kernel takes head sizes in multiples of 8; SDPA pads and slices around it.
    size = query.shape[-1]
    if size % 8:
        scale = scale if scale is not None else size**-0.5
        query, key, value = (F.pad(t, (0, 8 - size % 8)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return out[..., :size] if size % 8 else out


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What SDPA makes of a mask for the efficient kernel: an additive bias, in aligned rows, seen by all heads."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    length = mask.shape[-1]
    if length % _BIAS_ALIGNMENT:
        mask = F.pad(mask, (0, _BIAS_ALIGNMENT - length % _BIAS_ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    # CUDA keeps a mask of one byte an element; the CPU one of the data type.
    if not training or p == 0:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value
