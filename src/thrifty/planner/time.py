"""How long a step takes: a roofline over the operations of the dry run.

Every operation takes the longer of computing and moving its data, at the rates of the device profile. On a calibrated
device the rates are those measured for that kind of kernel at that size; otherwise they are shares of the data-sheet
peaks, less the loss in partial tiles and waves of matrix products. In eager mode on an accelerator the host must also
have issued all operations, whichever is slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from thrifty.hardware.devices import Device

# Shares of the data-sheet peak that well-shaped vendor kernels reach. They are round figures from the vendors' own
# performance guides, not fitted to any training run; a calibration replaces them.
MATRIX_SHARE = 0.75
ATTENTION_SHARE = {"flash": 0.5, "efficient": 0.35}
BANDWIDTH_SHARE = 0.8

_TRANSFERS = ("to_host", "to_device", "on_host")
HOST_MEMORY_BANDWIDTH = 40e9
"""Bytes a second that a host updates an optimizer with: two channels of DDR4, a low figure for a server."""

_HUGE_BLOCK = 32 * 1024**2
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "int8": "int8"}

# Which measured kernel stands for an operation that was not measured itself.
_LIKE = {
    "copy_": "clone", "cat": "clone", "stack": "clone", "constant_pad_nd": "clone", "slice_backward": "clone",
    "select_backward": "clone", "index": "embedding", "index_select": "embedding", "gather": "embedding",
    "index_put_": "embedding_dense_backward", "index_put": "embedding_dense_backward", "_to_copy": "clone",
    "index_add_": "embedding_dense_backward", "index_add": "embedding_dense_backward",
    "scatter_add": "embedding_dense_backward", "scatter": "clone", "zero_": "fill", "zeros_like": "fill",
    "zeros": "fill",
    "new_zeros": "fill", "fill_": "fill", "full": "fill", "full_like": "fill", "ones_like": "fill", "ones": "fill",
    "scalar_tensor": "fill", "arange": "fill", "add_": "mul_", "sub_": "mul_", "div_": "mul_", "clamp_": "mul_",
    "relu": "mul_", "threshold_backward": "add", "sigmoid": "silu", "sigmoid_backward": "tanh_backward", "erf": "exp",
    "cos": "exp", "sin": "exp", "log": "exp", "sqrt": "rsqrt", "native_dropout": "bernoulli_",
    "bernoulli": "bernoulli_",
    "var_mean": "mean", "amax": "sum", "max": "sum", "norm": "sum", "linalg_vector_norm": "sum",
    "nll_loss_forward": "embedding",
    "_fused_adam_": "_fused_adamw_", "native_dropout_backward": "add", "topk": "_softmax", "sort": "_softmax",
    "cumsum": "_softmax", "_foreach_norm": "_foreach_norm",
}  # fmt: skip


@dataclass(frozen=True)
class StepTime:
    """Seconds and operations of one micro-batch, or of one update, for each batch size: shape (batches,)."""

    seconds: np.ndarray
    kernel_seconds: np.ndarray
    issue_seconds: np.ndarray
    """What the host needs to issue all operations."""
    backward_seconds: np.ndarray
    """Share of the kernels that run in the backward pass, which communication can hide behind."""
    flops: np.ndarray
    recomputed_flops: np.ndarray

    @property
    def launch_bound(self) -> np.ndarray:
        """Whether the host is the slower one."""
        return self.issue_seconds > self.kernel_seconds

    def at(self, rows: np.ndarray) -> StepTime:
        """Those of some of the batch sizes."""
        return StepTime(*(getattr(self, f.name)[rows] for f in fields(self)))

    def scaled(self, factor: float) -> StepTime:
        """All of it `factor` times."""
        return StepTime(*(getattr(self, f.name) * factor for f in fields(self)))


def mean_time(parts: Sequence[tuple[float, StepTime]]) -> StepTime:
    """The mean of step times, each with its weight."""
    total = sum(weight for weight, _ in parts)
    names = [f.name for f in fields(StepTime)]
    return StepTime(*(np.stack([w * getattr(t, name) for w, t in parts]).sum(0) / total for name in names))


class TimeModel:
    """Times operations on one device.

    Args:
        device: Profile, with its calibration where there is one.
        tf32: Whether fp32 matrix products run on the TF32 units.
        causal: Whether fused attention skips the masked half; the traced operation count does not say.
    """

    def __init__(self, device: Device, *, tf32: bool = False, causal: bool = False) -> None:
        self.device, self.tf32, self.causal = device, tf32, causal
        self.measured: Mapping[str, Any] | None = device.calibration

    def step(self, ops: np.ndarray, *, fused: bool = False) -> StepTime:
        """Times the operations of a step.

        Args:
            ops: What runs, (operations,) or (batches, operations) of `OP_TYPE`: name, phase, dtype, count, `OP_FIELDS`.
            fused: Whether a compiler fuses chains of element-wise operations. Each then costs what it writes, as its
            input
                comes from its neighbour, and the chain is issued at once.
        """
        ops = np.atleast_2d(ops)
        names, phases, counts = ops["name"][0], ops["phase"][0], ops["count"][0]
        pointwise = np.array([fused and short_name(n) in POINTWISE for n in names], bool)
        each = self.kernels(ops, pointwise) * counts * self.in_step
        kernel = each.sum(-1)
        # A fused chain of about four operations is one launch.
        launches = np.where(pointwise, 0.25, 1.0) * counts
        again = phases == "recompute"
        waits = launches[~again].sum() * self.overhead + launches[again].sum() * self.overhead_again
        issue = np.full(len(ops), float(waits) * self.in_step)
        late = np.isin(phases, ("backward", "recompute"))
        # Copies between host and device run beside the computation of their pass.
        moving = np.array([short_name(n) in _TRANSFERS for n in names], bool)
        if moving.any():
            kernel = np.zeros(len(ops))
            for part in (late, ~late):
                kernel += np.maximum(each[:, part & ~moving].sum(-1), each[:, part & moving].sum(-1))
        # One thread of a CPU issues and then computes; an accelerator computes while the host issues the next.
        seconds = kernel + issue if self.device.kind == "cpu" else np.maximum(kernel, issue)
        flops = ops["flops"] * counts
        return StepTime(
            seconds, kernel, issue, each[:, late].sum(-1), flops.sum(-1), flops[:, phases == "recompute"].sum(-1)
        )

    @property
    def overhead(self) -> float:
        """Host seconds for one operation."""
        if self.measured is not None:
            return float(self.measured["overhead_seconds"])
        return self.device.launch_seconds

    @property
    def overhead_again(self) -> float:
        """Host seconds for one operation that is computed again in the backward pass, checkpointing itself included."""
        return self.overhead if self.measured is None else float(self.measured["overhead_again_seconds"])

    @property
    def micro_batch(self) -> float:
        """Seconds of the trainer for each micro-batch: the loader, the count of its tokens, the callbacks. An
        accelerator computes meanwhile."""
        if self.measured is None or self.device.kind != "cpu":
            return 0.0
        return float(self.measured["micro_batch_seconds"]) * self.in_step

    @property
    def in_step(self) -> float:
        """How many times longer an operation takes inside a step than when it was measured alone."""
        return 1.0 if self.measured is None else float(self.measured["in_step"])

    def kernels(self, ops: np.ndarray, pointwise: np.ndarray | None = None) -> np.ndarray:
        """Seconds of one run of each operation on the device, in the shape of `ops` (batches, operations)."""
        read = ops["read"] if pointwise is None else np.where(pointwise, 0.0, ops["read"])
        moved = read + ops["written"]
        out = np.zeros(ops.shape)
        groups: dict[tuple[str, str], list[int]] = {}
        for column, (name, dtype) in enumerate(zip(ops["name"][0].tolist(), ops["dtype"][0].tolist(), strict=True)):
            groups.setdefault((short_name(name), dtype), []).append(column)
        for (short, dtype), columns in groups.items():
            some, bytes_moved = ops[:, columns], moved[:, columns]
            if short in _TRANSFERS:
                out[:, columns] = self._transfer(short, ops[:, columns])
            elif "attention" in short and some["flops"].any():
                out[:, columns] = self._attention(short, dtype, some, bytes_moved)
            elif some["flops"].any():
                out[:, columns] = self._product(dtype, some, bytes_moved)
            else:
                out[:, columns] = self._moving(short, dtype, some, bytes_moved)
        return out

    def _transfer(self, short: str, ops: np.ndarray) -> np.ndarray:
        if short == "on_host":
            return ops["k"] / HOST_MEMORY_BANDWIDTH
        link = (self.measured or {}).get("host_bandwidth") or self.device.host_bandwidth
        return (ops["read"] if short == "to_host" else ops["written"]) / link

    def _precision(self, dtype: str) -> str:
        found = _DTYPES.get(dtype, "fp32")
        return "tf32" if found == "fp32" and self.tf32 and self.device.supports_tf32 else found

    def _product(self, dtype: str, ops: np.ndarray, moved: np.ndarray) -> np.ndarray:
        if self.measured is not None:
            products = self.measured["products"]
            return ops["flops"] / _product_rate(products.get(dtype) or products["float32"], ops) + self._fresh(ops)
        rate = self.device.peak(self._precision(dtype)) * MATRIX_SHARE * tile_share(ops, self.device.processors)
        return np.maximum(ops["flops"] / rate, moved / (self.device.bandwidth * BANDWIDTH_SHARE))

    def _attention(self, short: str, dtype: str, ops: np.ndarray, moved: np.ndarray) -> np.ndarray:
        if self.measured is not None:
            table = self.measured["attention"]
            points = (table.get(dtype) or table["float32"])["backward" if "backward" in short else "forward"]
            seconds = _interpolate(points, ops["flops"])
            # The measurement is causal; without a mask twice as much is left to do.
            return seconds if self.causal else 2 * seconds
        share = ATTENTION_SHARE["efficient" if "efficient" in short else "flash"]
        rate = self.device.peak(self._precision(dtype)) * share * (2 if self.causal else 1)
        return np.maximum(ops["flops"] / rate, moved / (self.device.bandwidth * BANDWIDTH_SHARE))

    def _moving(self, short: str, dtype: str, ops: np.ndarray, moved: np.ndarray) -> np.ndarray:
        if self.measured is None:
            return moved / (self.device.bandwidth * BANDWIDTH_SHARE)
        kernels = self.measured["kernels"]
        table = kernels.get(short) or kernels.get(_LIKE.get(short, "add")) or kernels["add"]
        points = table.get(dtype) or table.get("float32") or next(iter(table.values()))
        return _interpolate(points, moved) + self._fresh(ops)

    def _fresh(self, ops: np.ndarray) -> np.ndarray:
        """Mapping new pages under a large result, which the allocator returns to the system each time."""
        assert self.measured is not None
        return np.where(ops["written"] > _HUGE_BLOCK, ops["written"] * self.measured["fresh_page_seconds"], 0.0)


def short_name(name: str) -> str:
    """`mm` of `aten.mm`."""
    return name.rsplit(".", 1)[-1]


POINTWISE = {
    "add", "sub", "mul", "div", "neg", "pow", "exp", "tanh", "rsqrt", "sqrt", "sigmoid", "silu", "gelu", "relu",
    "cos", "sin",
    "where", "masked_fill", "_to_copy", "copy_", "clone", "add_", "mul_", "div_", "sub_", "silu_backward",
    "gelu_backward",
    "tanh_backward", "sigmoid_backward", "threshold_backward", "native_dropout", "native_dropout_backward", "eq",
    "ne", "lt",
    "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_not", "logical_not", "expand", "mean", "cat", "fill_",
    "zeros_like",
}  # fmt: skip


def tile_share(ops: np.ndarray, processors: int) -> np.ndarray:
    """Share of a matrix unit's peak that is left after partial tiles and waves: shape of `ops`.

    Tiles are 256 x 128, or smaller where that fills the device better; a library chooses.

    Args:
        ops: Array with the fields `b`, `m`, `n`, `k`; zeros where the sizes of the product are unknown.
        processors: Of the device.
    """
    batch, m, n = (np.maximum(ops[name], 1.0) for name in ("b", "m", "n"))

    def share(rows: int, columns: int, peak: float) -> np.ndarray:
        grid = np.ceil(m / rows) * np.ceil(n / columns)
        waves = np.ceil(batch * grid / processors)
        return peak * (m * n / (grid * rows * columns)) * batch * grid / (waves * processors)

    # Smaller tiles reuse less of what they load.
    best = np.maximum(np.maximum(share(256, 128, 1.0), share(128, 128, 0.95)), share(64, 64, 0.75))
    return np.where(ops["k"] > 0, np.clip(best, 0.01, 1.0), 1.0)


def _product_rate(points: Sequence[Sequence[float]], ops: np.ndarray) -> np.ndarray:
    """Operations per second of matrix products, from the measured ones nearest in shape (in logarithms)."""
    table = np.asarray(points, float)
    known = np.log(table[:, :3])
    rates = np.log(2 * table[:, 0] * table[:, 1] * table[:, 2] / table[:, 3])
    sizes = np.stack([ops["m"], ops["n"], ops["k"]], axis=-1)
    # A product without recorded sizes (a convolution) counts as a cube of as many operations.
    side = np.cbrt(np.maximum(ops["flops"] / 2, 1.0))[..., None]
    wanted = np.log(np.where(sizes > 0, np.maximum(sizes, 1.0), side))
    distance = ((wanted[..., None, :] - known) ** 2).sum(-1)
    weight = 1.0 / (distance + 0.05)
    return np.exp((weight * rates).sum(-1) / weight.sum(-1))


def _interpolate(points: Sequence[Sequence[float]], sizes: np.ndarray) -> np.ndarray:
    """Seconds by size: linear in logarithms between measured points, proportional beyond the last, constant before."""
    table = np.asarray(points, float)
    table = table[np.argsort(table[:, 0])]
    x, y = np.log(table[:, 0]), np.log(table[:, 1])
    wanted = np.log(np.maximum(sizes, 1.0))
    inside = np.exp(np.interp(wanted, x, y))
    return np.where(wanted > x[-1], np.exp(y[-1]) * sizes / table[-1, 0], inside)


def model_flops_utilisation(model_flops: float, seconds: float, device: Device, precision: str) -> float:
    """MFU: the operations that the model needs (no recomputation) over what the device could do in that time."""
    return model_flops / (seconds * device.peak(precision))
