"""Choice of the attention implementation.

What it does: makes the model compute its attention by PyTorch's SDPA, by FlashAttention, by FlexAttention or by plain
matrix products, and says after the first step which kernel really ran. `auto` takes FlashAttention where the package is
installed and the weights or the autocast are half precision on a GPU, and SDPA otherwise.

Helps: SDPA and FlashAttention never hold the matrix of scores: less memory and time at long sequences, most of all on
GPUs in half precision. FlexAttention skips the blocks that packed rows mask out.
Does not help: short sequences, where the feed-forward layers dominate.
Limits: FlashAttention needs a GPU, half precision and the flash-attn package; FlexAttention has no backward pass on a
CPU. A mask or dropout makes SDPA fall back to slower kernels; the report says so.
Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022; Dao, 2023; Dong
et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024.
Library: torch's scaled_dot_product_attention and flex_attention, flash-attn, through transformers.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty.method import Method, NotApplicable, Paper, register

Implementation = Literal["auto", "sdpa", "flash", "flex", "eager"]
HF_NAMES = {"sdpa": "sdpa", "flash": "flash_attention_2", "flex": "flex_attention", "eager": "eager"}

# What a profile calls the kernels, most telling first: SDPA's own operators, the package's, and the compiled one.
_KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
    "_scaled_dot_product_flash_attention": "flash (SDPA)",
    "_scaled_dot_product_cudnn_attention": "cuDNN (SDPA)",
    "_scaled_dot_product_efficient_attention": "memory-efficient (SDPA)",
    "_scaled_dot_product_fused_attention_overrideable": "the device's own (SDPA)",
    "_scaled_dot_product_attention_math": "matrix products (SDPA)",
    "flash_attn": "flash-attn",
    "flex_attention": "FlexAttention",
}
_FORWARD = {key for key in _KERNELS if key.startswith("_scaled")}


class KernelWatch:
    """Finds out which attention kernels a stretch of code runs, from a profile of it.

    >>> watch = KernelWatch()
    >>> with watch:
    ...     q = torch.randn(1, 2, 8, 4)
    ...     _ = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> watch.kernels
    {'flash (CPU)': 1}
    """

    def __init__(self) -> None:
        self.kernels: dict[str, int] = {}
        """How often each kernel ran; empty where attention was plain matrix products, or a profiler was running."""
        self.looked = False
        self._profile: Any = None

    def __enter__(self) -> KernelWatch:
        if not torch.autograd._profiler_enabled():  # profiles cannot be nested
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(*error)
        self.looked = True
        found: Counter[str] = Counter()
        for event in self._profile.events() or []:
            name = event.name.removeprefix("aten::")
            if "backward" in name.lower():
                continue
            if name in _FORWARD:
                found[_KERNELS[name]] += 1
            elif name.startswith("flash_attn") or "flex_attention" in name:
                found[_KERNELS["flash_attn" if name.startswith("flash_attn") else "flex_attention"]] += 1
        self.kernels = dict(found)
        self._profile = None


@contextlib.contextmanager
def attention_of(model: Any, implementation: str) -> Iterator[None]:
    """Inside, the model attends by this implementation (a name as transformers knows it)."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def choose(implementation: Implementation, device: torch.device, dtypes: set[torch.dtype]) -> str:
    """Resolves `auto`, and checks that the device can do what is asked.

    Args:
        implementation: What is wanted.
        device: Where the model trains.
        dtypes: Types in which attention computes (weights, or autocast).

    Raises:
        NotApplicable: The device, the data type or the packages do not allow it.
    """
    half = bool(dtypes) and dtypes <= {torch.float16, torch.bfloat16}
    installed = importlib.util.find_spec("flash_attn") is not None
    if implementation == "auto":
        return "flash" if device.type == "cuda" and half and installed else "sdpa"
    if implementation == "flash":
        if device.type != "cuda":
            raise NotApplicable(
                f"attention: FlashAttention needs a GPU, and the device is {device.type}",
                key="attention", value="flash", fix="use sdpa: on a CPU it has a kernel of that kind too",
            )  # fmt: skip
        if not installed:
            raise NotApplicable(
                "attention: the package flash-attn is not installed",
                key="attention", value="flash", fix="pip install flash-attn, or use sdpa, which has the same kernel",
            )  # fmt: skip
        if not half:
            raise NotApplicable(
                "attention: FlashAttention computes in half precision only",
                key="attention", value="flash", fix="add bf16 to the methods, or use sdpa",
            )  # fmt: skip
    if implementation == "flex" and device.type == "cpu":
        raise NotApplicable(
            "attention: FlexAttention has no backward pass on a CPU",
            key="attention", value="flex", fix="use sdpa, or train on a GPU",
        )  # fmt: skip
    return implementation


@register(
    "attention",
    title="Choice of the attention kernel",
    section="attention",
    sources=[
        Paper("Dao et al.", 2022, "arXiv:2205.14135"),
        Paper("Dao", 2023, "arXiv:2307.08691"),
        Paper("Dong et al.", 2024, "arXiv:2412.05496"),
    ],
    exact=True,
    claims=("attention",),
    preset={"implementation": "eager"},
    library="transformers",
    runs_before=("packing",),
    bench_order=5,
)
@dataclass(kw_only=True)
class Attention(Method):
    """How attention is computed."""

    implementation: Implementation = "auto"
    """SDPA, FlashAttention, FlexAttention or plain matrix products; auto takes the fastest that can run."""

    chosen: str = field(default="", init=False, repr=False)
    watch: KernelWatch | None = field(default=None, init=False, repr=False)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if not hasattr(model, "set_attn_implementation"):
            raise NotApplicable(
                f"attention: {type(model).__name__} does not let its attention be chosen",
                fix="remove attention from the methods",
            )
        if ctx.planning:
            # The dry run takes the device's own SDPA kernel, with which flash and flex share what they hold.
            self.chosen = "eager" if self.implementation == "eager" else "sdpa"
        else:
            autocast = torch.bfloat16 if ctx.args.bf16 else torch.float16 if ctx.args.fp16 else None
            dtypes = {autocast} if autocast else {p.dtype for p in model.parameters() if p.is_floating_point()}
            self.chosen = choose(self.implementation, ctx.device, dtypes)
        hf: Any = model
        name = HF_NAMES[self.chosen]
        try:
            hf.set_attn_implementation(name)
        except (ValueError, ImportError) as error:
            raise NotApplicable(
                f"attention: {type(model).__name__} has no {name}",
                key="attention", value=self.implementation, fix="use sdpa or eager",
            ) from error  # fmt: skip
        if hf.config._attn_implementation != name:
            raise NotApplicable(
                f"attention: {type(model).__name__} stays with {hf.config._attn_implementation}",
                key="attention", value=self.implementation, fix="remove attention from the methods",
            )  # fmt: skip
        return model

    def wrap_training_step(self, step: Callable[..., Tensor], ctx: Any) -> Callable[..., Tensor]:
        def watched(*args: Any, **kwargs: Any) -> Tensor:
            if self.watch is not None:
                return step(*args, **kwargs)
            self.watch = KernelWatch()
            with self.watch:
                return step(*args, **kwargs)

        return watched

    def facts(self) -> dict[str, Any]:
        if self.watch is None:
            return {}
        if not self.watch.looked:
            return {"implementation": self.chosen, "kernel": "unknown, since a profiler was running"}
        kernels = ", ".join(sorted(self.watch.kernels)) or "matrix products and softmax"
        return {"implementation": self.chosen, "kernel": kernels}
