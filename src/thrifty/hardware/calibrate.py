"""Measures how fast this machine runs the kernels that a training step is made of, in about 20 seconds.

Matrix products in several shapes and both floating-point widths, the usual element-wise, normalising and reducing
kernels in several sizes, attention forward and backward, optimizer kernels, the cost of fresh memory pages, what the
framework itself spends on each operation, and how much longer everything takes inside a pass. Each number is the
median of several repeats, since a step meets the machine as it usually is; what the framework spends is taken off the
kernels, so that it counts once.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError

if TYPE_CHECKING:
    import torch

FORMAT = 3
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

# (rows, columns, inner): what the projections, MLPs and heads of small and middling models multiply.
_PRODUCTS = (
    (64, 512, 512), (256, 128, 512), (512, 256, 256), (512, 768, 768), (512, 3072, 768), (512, 768, 3072), (768, 768,
    512),
    (1024, 2048, 512), (1024, 512, 1408), (2048, 256, 1024), (256, 8192, 256), (8192, 256, 512), (2048, 1024, 1024),
)  # fmt: skip
_ELEMENTS = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
_WIDTH = 512
# (batch x heads, sequence, head size); smaller than the smallest nothing is known to take less time.
_ATTENTION = ((4, 16, 32), (8, 64, 32), (32, 64, 64), (32, 128, 64), (16, 512, 64), (8, 1024, 64))


def calibrate(device: str = "cpu", *, seconds: float = 20.0, save: bool = True) -> dict[str, Any]:
    """Measures the machine and stores the result where `get_device` finds it.

    Args:
        device: A torch device: `cpu`, or `cuda`, whose profile is found by its name.
        seconds: Roughly how long to measure.
        save: Whether to store the result.

    Returns:
        Plain data: `products` (dtype to a list of [m, n, k, seconds]), `kernels` (operation to dtype to a list of
        [bytes, seconds]), `attention` (dtype to {forward, backward: list of [operations, seconds]}),
        `fresh_page_seconds`
        (per byte), what `probes.framework` returns, `in_step` (how many times longer all of that takes inside a
        pass), `peak_flops`, and where and when.

    Raises:
        InputError: The device is not present, or no profile fits its name.
    """
    import torch

    from thrifty.hardware import probes

    if device not in ("cpu", "cuda"):
        raise InputError("can be measured: cpu, cuda", key="device", value=device)
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "no CUDA device is present", key="device", value=device, fix="calibrate the cpu, or use a GPU machine"
        )
    identity = "cpu" if device == "cpu" else _profile_of(torch.cuda.get_device_name())
    clock = _Clock(device, seconds)
    if device == "cpu":  # an accelerator runs while the host calls
        nothing = torch.zeros(8)
        clock.learn_call(lambda: torch.ops.aten.add.Tensor(nothing, nothing))
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device == "cuda" else [])
    products = {_name(d): [[*s, _measure_product(clock, s, d, device)] for s in _PRODUCTS] for d in dtypes}
    kernels: dict[str, dict[str, list[list[float]]]] = {}
    for dtype in dtypes:
        for elements in _ELEMENTS:
            for operation, moved, run in _kernels(elements, dtype, device):
                table = kernels.setdefault(operation, {}).setdefault(_name(dtype), [])
                table.append([float(moved), clock.kernel(run)])
    attention = {_name(d): _measure_attention(clock, d, device) for d in dtypes}
    result = {
        "format": FORMAT,
        "device": identity,
        "name": torch.cuda.get_device_name() if device == "cuda" else _processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "peak_flops": {
            _DTYPES[name]: max(2 * m * n * k / t for m, n, k, t in table) for name, table in products.items()
        },
        "products": products,
        "kernels": kernels,
        "attention": attention,
        "fresh_page_seconds": _fresh_pages(clock) if device == "cpu" else 0.0,
        **probes.framework(clock.typical, device),
        "host_bandwidth": _host_bandwidth(clock) if device == "cuda" else None,
    }
    # An accelerator's large kernels come from its memory, alone or not.
    result["in_step"] = probes.in_step(clock.typical, result) if device == "cpu" else 1.0
    result["seconds"] = round(clock.elapsed(), 1)
    if save:
        path = _path(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(result))
        os.replace(temporary, path)
        # What was measured beside predictions of the old calibration says nothing of the new ones.
        from thrifty.planner.residuals import forget_residuals

        forget_residuals(identity)
    return result


def stored_calibration(identity: str) -> Mapping[str, Any] | None:
    """The stored measurement of a device, or None where there is none of the current format."""
    path = _path(identity)
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"damaged calibration: {error}", key=str(path), fix="run `thrifty calibrate` again") from None
    return data if data.get("format") == FORMAT else None


def forget_calibration(identity: str) -> bool:
    """Removes a stored measurement; says whether there was one."""
    path = _path(identity)
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


class _Clock:
    """Shares the time among about 550 measurements and times a callable by its median repeat."""

    def __init__(self, device: str, seconds: float) -> None:
        import torch

        self._call = 0.0
        self._wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
        self._share = seconds / 550
        self._start = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def kernel(self, run: Callable[[], Any]) -> float:
        """Seconds of one call without what calling costs, which the overhead of an operation contains."""
        return max(self.typical(run) - self._call, 1e-9)

    def learn_call(self, run: Callable[[], Any]) -> None:
        """What calling costs: the time of a kernel with nothing to do.

        The least of several tries: it is taken off every kernel, so that one try in a bad moment would leave kernels
        that take no time at all.
        """
        self._call = min(self.typical(run) for _ in range(10))

    def typical(self, run: Callable[[], Any], least: int = 3) -> float:
        """Seconds of one call: the median over repeats, each long enough for the clock."""
        run()
        self._wait()
        once = self._once(run, 1)
        # Short bursts: the longer one lasts, the likelier another process gets in between.
        loops = max(1, min(1000, round(1e-4 / max(once, 1e-7))))
        times = []
        stop = time.perf_counter() + self._share
        while len(times) < least or time.perf_counter() < stop:
            times.append(self._once(run, loops))
        return statistics.median(times)

    def _once(self, run: Callable[[], Any], loops: int) -> float:
        start = time.perf_counter()
        for _ in range(loops):
            run()
        self._wait()
        return (time.perf_counter() - start) / loops


def _measure_product(clock: _Clock, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> float:
    """Mean seconds of the three products of a linear layer: output, gradient of the input, gradient of the weight."""
    import torch

    m, n, k = shape
    x, w, y = (torch.randn(s, device=device).to(dtype) for s in ((m, k), (n, k), (m, n)))
    runs = (lambda: torch.mm(x, w.t()), lambda: torch.mm(y, w), lambda: torch.mm(y.t(), x))
    return sum(clock.kernel(run) for run in runs) / 3


def _kernels(elements: int, dtype: torch.dtype, device: str) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """(operation, bytes read and written, call) for tensors of `elements` elements in rows of 512."""
    import torch

    aten = torch.ops.aten
    rows = elements // _WIDTH
    x = torch.randn(rows, _WIDTH, device=device).to(dtype)
    y = torch.randn(rows, _WIDTH, device=device).to(dtype)
    single = torch.randn(rows, _WIDTH, device=device)
    size, item = elements, x.element_size()
    yield "add", 3 * size * item, lambda: aten.add.Tensor(x, y)
    yield "mul_", 2 * size * item, lambda: aten.mul_.Tensor(x, 1.0)
    yield "clone", 2 * size * item, lambda: aten.clone(x)
    yield (
        "transposed_clone",
        2 * size * item,
        lambda: aten.clone(x.view(rows, 8, 64).transpose(0, 1), memory_format=torch.contiguous_format),
    )
    if dtype != torch.float32:
        yield "_to_copy", size * (4 + item), lambda: aten._to_copy(single, dtype=dtype)
    for name in ("exp", "tanh", "rsqrt", "gelu", "silu"):
        yield name, 2 * size * item, partial(getattr(aten, name), x)
    yield "pow", 2 * size * item, lambda: aten.pow.Tensor_Scalar(x, 2)
    yield "pow3", 2 * size * item, lambda: aten.pow.Tensor_Scalar(x, 3.0)
    for name in ("gelu_backward", "silu_backward", "tanh_backward"):
        yield name, 3 * size * item, partial(getattr(aten, name), x, y)
    yield "_softmax", 2 * size * item, lambda: aten._softmax(x, -1, False)
    yield "_softmax_backward_data", 3 * size * item, lambda: aten._softmax_backward_data(x, y, -1, dtype)
    yield "_log_softmax", 2 * size * item, lambda: aten._log_softmax(x, 1, False)
    yield "_log_softmax_backward_data", 3 * size * item, lambda: aten._log_softmax_backward_data(x, y, 1, dtype)
    weight = torch.ones(_WIDTH, device=device, dtype=dtype)
    _, mean, rstd = aten.native_layer_norm(x, [_WIDTH], weight, weight, 1e-5)
    yield "native_layer_norm", 2 * size * item, lambda: aten.native_layer_norm(x, [_WIDTH], weight, weight, 1e-5)
    yield (
        "native_layer_norm_backward",
        3 * size * item,
        lambda: aten.native_layer_norm_backward(y, x, [_WIDTH], mean, rstd, weight, weight, [True, True, True]),
    )
    yield "mean", size * item, lambda: aten.mean.dim(x, [-1], True)
    yield "sum", size * item, lambda: aten.sum.dim_IntList(x, [0], True)
    yield "bernoulli_", 2 * size * item, lambda: aten.bernoulli_.float(y, 0.9)
    yield "fill", size * item, lambda: aten.zeros_like(x)
    ids = torch.randint(0, 4096, (rows,), device=device)
    table = torch.randn(4096, _WIDTH, device=device).to(dtype)
    yield "embedding", 2 * size * item, lambda: aten.embedding(table, ids)
    yield (
        "embedding_dense_backward",
        size * item + table.numel() * item,
        lambda: aten.embedding_dense_backward(x, ids, 4096, -1, False),
    )
    targets = torch.zeros(rows, dtype=torch.int64, device=device)
    yield (
        "nll_loss_backward",
        2 * size * item,
        lambda: aten.nll_loss_backward(x[0, 0], x, targets, None, 1, -100, x[0, 0].clone()),
    )
    if dtype == torch.float32:
        state = [torch.zeros_like(x) for _ in range(3)]
        step = torch.ones((), device=device)
        yield "_fused_adamw_", 7 * size * item, lambda: aten._fused_adamw_(
            [state[0]], [x], [state[1]], [state[2]], [], [step], lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.0,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        yield "_foreach_norm", size * item, lambda: aten._foreach_norm.Scalar([x], 2)


def _measure_attention(clock: _Clock, dtype: torch.dtype, device: str) -> dict[str, list[list[float]]]:
    """[operations, seconds] of fused causal attention, forward and backward, by shape."""
    import torch
    from torch.nn import functional as F

    found: dict[str, list[list[float]]] = {"forward": [], "backward": []}
    for heads, length, size in _ATTENTION:
        q, k, v = (torch.randn(1, heads, length, size, device=device).to(dtype).requires_grad_() for _ in range(3))
        operations = 4.0 * heads * length**2 * size
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradient = torch.ones_like(out)

        def forward(q: Any = q, k: Any = k, v: Any = v) -> None:
            with torch.no_grad():
                F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def backward(out: Any = out, q: Any = q, k: Any = k, v: Any = v, gradient: Any = gradient) -> None:
            torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

        found["forward"].append([operations, clock.typical(forward)])
        found["backward"].append([2.5 * operations, clock.typical(backward)])
    return found


def _fresh_pages(clock: _Clock) -> float:
    """Extra seconds per byte when an operation writes to memory that the process does not hold yet.

    A training step allocates its activations in a row and frees them in the backward pass; they go back to the system,
    and each page has to be mapped and zeroed again. Blocks above 32 MiB do so every time, which is what is measured.
    """
    import torch

    x = torch.randn(12 << 20)
    held = torch.empty_like(x)
    fresh = clock.typical(lambda: x + 1, least=8)
    reused = clock.typical(lambda: torch.add(x, 1, out=held), least=8)
    return max(0.0, fresh - reused) / x.nbytes


def _host_bandwidth(clock: _Clock) -> float:
    import torch

    host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    return host.nbytes / clock.typical(lambda: device.copy_(host, non_blocking=True))


def _profile_of(name: str) -> str:
    from thrifty.hardware.devices import detect_id

    return detect_id(name)


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _path(identity: str) -> Path:
    root = os.environ.get("THRIFTY_CACHE") or Path.home() / ".cache" / "thrifty"
    return Path(root) / "calibration" / f"{identity}.json"
