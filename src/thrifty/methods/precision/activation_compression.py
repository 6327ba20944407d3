"""Activation-compressed training.

What it does: the forward pass is exact; what it saves for the backward pass is quantised to a few bits, in groups of
values with a range of their own and rounded at random, so that the gradients of linear layers are right on average.

Helps: when activations are the peak of memory and recomputation is too slow: 4 bits take an eighth of float32.
Does not help: when weights, optimizer states or logits that are not saved are the peak; every step is slower.
Limits: gradients are noisier, much so at 2 bits. They are unbiased where the gradient is linear in what was saved
(linear layers); for normalisations, activation functions and softmax to first order only. Queries, keys and values of
fused attention get 8 bits, beside the average. Weights, whole numbers, masks, statistics and small tensors are left
alone. Under gradient checkpointing only inputs of blocks are there to be compressed, and the recomputation starts from
the rounded ones. Adaptive levels run two passes for each saved tensor at every estimate. `mesa` takes ranges from the
present batch, not running ones, which would cut off outliers. Not for compiled models.
Source: Chen et al., "ActNN", ICML 2021; Liu et al., "GACT", ICML 2022; Pan et al., "Mesa", 2021.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thrifty._hf import unwrap_container
from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods._saved_tensors import SavedTensors
from thrifty.methods.precision._quantize import Packed, allocate, dequantize, quantize

Level = Literal["L1", "L1.1", "L1.2", "L2", "L2.1", "L2.2", "actnn", "mesa"]
# (bits on average, whether they are divided by sensitivity)
LEVELS: dict[str, tuple[float, bool]] = {
    "L1": (4, False), "L1.1": (8, False), "L1.2": (2, False), "L2": (4, True), "L2.1": (3, True), "L2.2": (2, True),
    "actnn": (2, True), "mesa": (8, False),
}  # fmt: skip
ATTENTION_BITS = 8
EXACT = 32


class _Attention(TorchFunctionMode):
    """Says when fused attention is at work: what it saves goes into an exponential, which amplifies rounding."""

    def __init__(self, owner: CompressedActivations) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.owner.attention = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.owner.attention = False


class CompressedActivations(SavedTensors):
    """Saved tensors in few bits: `with CompressedActivations(4).around(model): loss = model(**batch).loss`.

    Args:
        bits: Of every tensor: 1, 2, 4, 8, or 32 for no compression.
        least: Tensors with fewer elements stay as they are.
        size: Values in a group.
    """

    def __init__(self, bits: int = 4, *, least: int = 1024, size: int = 256) -> None:
        super().__init__(least)
        self.bits, self.size = bits, size
        self.table: list[int] | None = None
        """Bits by the order in which tensors are saved, in place of `bits`."""
        self.generator: torch.Generator | None = None
        self.attention = False
        self.sizes: list[int] = []
        self.fused: list[bool] = []
        """Whether each tensor belongs to fused attention, by the order in which they are saved; so with `sizes`."""
        self.packed_bytes = self.plain_bytes = 0

    def begin(self, seed: int | None, device: torch.device | str = "cpu") -> None:
        """A new forward pass, with random numbers of its own."""
        self.sizes, self.fused = [], []
        self.packed_bytes = self.plain_bytes = 0
        self.generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    @contextlib.contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """What the model saves inside is compressed."""
        with super().around(model), _Attention(self):
            yield

    def accepts(self, tensor: Tensor) -> bool:
        # What needs no gradient is a mask (minus infinity has no range), a table or a statistic of a normalisation.
        return super().accepts(tensor) and tensor.requires_grad and tensor.shape[-1] > 1

    def suits(self, payload: Any) -> bool:
        return not self.attention or not isinstance(payload, Packed) or payload.bits >= ATTENTION_BITS

    def store(self, tensor: Tensor) -> Any:
        index = len(self.sizes)
        self.sizes.append(tensor.numel())
        self.fused.append(self.attention)
        bits = self.table[index] if self.table is not None and index < len(self.table) else self.bits
        if self.attention:
            bits = max(bits, ATTENTION_BITS)
        self.plain_bytes += tensor.nbytes
        if bits == EXACT:
            self.packed_bytes += tensor.nbytes
            return tensor
        packed = quantize(tensor, bits, size=self.size, generator=self.generator)
        self.packed_bytes += packed.nbytes
        return packed

    def load(self, payload: Any) -> Tensor:
        return dequantize(payload) if isinstance(payload, Packed) else payload


def sensitivities(
    compressed: CompressedActivations,
    model: nn.Module,
    loss: Callable[[], Tensor],
    device: torch.device | str,
    seed: int,
) -> list[float]:
    """For each saved tensor the variance of the gradient when it alone has one bit: GACT's estimate.

    Two passes a tensor that differ only in how it is rounded; half the squared distance of their gradients is taken.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    state, table, bits = torch.get_rng_state(), compressed.table, compressed.bits
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []

    def gradients(only: int, draw: int) -> list[Tensor | None]:
        compressed.table = [EXACT] * only + [1]
        compressed.bits = EXACT
        compressed.begin(seed + draw, device)
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(state)
            with compressed.around(model):
                value = loss()
            return list(torch.autograd.grad(value, parameters, allow_unused=True))

    try:
        gradients(0, 0)
        found = []
        for index in range(len(compressed.sizes)):
            first, second = gradients(index, 2 * index), gradients(index, 2 * index + 1)
            pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
            found.append(sum(float((a - b).square().sum()) for a, b in pairs) / 2)
        return found
    finally:
        compressed.table, compressed.bits = table, bits


def divide(sensitivity: list[float], compressed: CompressedActivations, average: float) -> list[int]:
    """Bits of each saved tensor. Those of fused attention have theirs, and no part in the average."""
    free = [index for index, fused in enumerate(compressed.fused) if not fused]
    chosen = allocate([sensitivity[i] for i in free], [compressed.sizes[i] for i in free], average)
    return [dict(zip(free, chosen, strict=True)).get(i, ATTENTION_BITS) for i in range(len(compressed.sizes))]


@register(
    "activation-compression",
    title="Activation compression",
    section="precision",
    sources=[
        Paper("Chen et al.", 2021, "arXiv:2104.14129"),
        Paper("Liu et al.", 2022, "arXiv:2206.11357"),
        Paper("Pan et al.", 2021, "arXiv:2111.11124"),
    ],
    exact=False,
    micro_batch_invariant=False,
    processes=False,
    preset={"least": 64, "level": "L2", "refresh": 3},
    choices={"allow": [{"level": "L1"}, {"level": "L1.1"}, {"level": "L1.2"}]},
    bench_order=45,
)
@dataclass(kw_only=True)
class ActivationCompression(Method):
    """Quantises what the backward pass needs."""

    level: Level = "L1"
    """GACT's L1 (4 bits), L1.1 (8), L1.2 (2), or with bits divided by sensitivity L2 (4 on average), L2.1 (3), L2.2
    (2); `actnn` (2, divided) and `mesa` (8)."""
    least: int = 1024
    """Tensors with fewer elements stay as they are."""
    group: int = 256
    """Values that share a range."""
    refresh: int = 1000
    """Steps after which sensitivities are estimated again."""

    compressed: CompressedActivations | None = field(default=None, init=False, repr=False)
    sensitivity: list[float] = field(default_factory=list, init=False, repr=False)
    _place: tuple[int, int] = field(default=(-1, 0), init=False, repr=False)

    def __post_init__(self) -> None:
        for key in ("least", "group", "refresh"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.group % 8:
            raise ValueError(f"group must be a multiple of 8, got {self.group}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if getattr(ctx.args, "torch_compile", False):
            raise NotApplicable(
                "activation-compression: the compiler decides itself what is saved, and lets nobody replace it",
                fix="remove the method compile, or use gradient-checkpointing with the policy memory-budget",
            )
        if LEVELS[self.level][1] and (getattr(ctx.args, "fsdp", None) or getattr(ctx.args, "deepspeed", None)):
            raise NotApplicable(
                f"activation-compression: {self.level} compares whole gradients, which FSDP and DeepSpeed shard",
                fix="use the level L1, L1.1 or L1.2 there",
            )
        return model

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        average, adaptive = LEVELS[self.level]
        if self.compressed is None:
            self.compressed = CompressedActivations(int(average), least=self.least, size=self.group)
        compressed = self.compressed

        def with_compression(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if ctx.planning:
                # Three bits on average are as many tensors of two as of four.
                compressed.table = [2, 4] * 4096 if average == 3 else None
                compressed.begin(None)
                compressed.count_as_usual(inputs)
            else:
                seed = self._seed(ctx)
                if adaptive and (not self.sensitivity or self._place == (ctx.step // self.refresh * self.refresh, 0)):
                    bare = unwrap_container(model)
                    self.sensitivity = sensitivities(
                        compressed, bare, lambda: compute_loss(bare, inputs, num_items_in_batch), ctx.device, seed
                    )
                    compressed.table = None
                if adaptive and compressed.table is None:
                    compressed.table = divide(self.sensitivity, compressed, average)
                compressed.begin(seed, ctx.device)
            with compressed.around(model):
                return compute_loss(model, inputs, num_items_in_batch)

        return with_compression

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self._place = (-1, 0)  # a trial before the first step has drawn numbers that a resumed run would not draw

    def _seed(self, ctx: Any) -> int:
        """Another one for each micro-batch and process; equal after a resume."""
        step, micro = self._place
        self._place = (step, micro + 1) if step == ctx.step else (ctx.step, 0)
        text = f"{ctx.args.seed}/activation-compression/{self._place}/{ctx.rank}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    def state_dict(self) -> dict[str, Any]:
        table = self.compressed.table if self.compressed is not None else None
        return {"sensitivity": list(self.sensitivity), "table": list(table or [])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sensitivity = list(state["sensitivity"])
        if self.compressed is None:
            bits = int(LEVELS[self.level][0])
            self.compressed = CompressedActivations(bits, least=self.least, size=self.group)
        self.compressed.table = list(state["table"]) or None

    @property
    def state_per_rank(self) -> bool:
        return True
