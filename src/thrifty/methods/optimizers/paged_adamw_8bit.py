"""Paged AdamW with 8-bit states.

What it does: AdamW with 8-bit states that lie in unified memory: where the GPU runs out of its own, the driver moves
them to the host and brings them back for the step.

Helps: peaks that would otherwise end in an out-of-memory error, such as long samples among short ones.
Does not help: a run that is out of memory all the time: then every step waits for the transfers.
Limits: as of adamw-8bit; paging needs CUDA. On a CPU, where states are in host memory anyway, it is adamw-8bit.
Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023.
Library: bitsandbytes (extra quant) on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thrifty.method import Method, Paper, register
from thrifty.methods.optimizers._groups import refuse_sharding
from thrifty.methods.optimizers._quantised import (
    Codec,
    Implementation,
    QuantisedAdamW,
    bitsandbytes_groups,
    quantised_groups,
    use_library,
)


@register(
    "paged-adamw-8bit",
    title="Paged AdamW with 8-bit states",
    section="optimizers",
    sources=[Paper("Dettmers et al.", 2023, "arXiv:2305.14314")],
    exact=False,
    micro_batch_invariant=False,
    claims=("optimizer",),
    preset={"min_size": 16},
    library="bitsandbytes",
    extra="quant",
)
@dataclass(kw_only=True)
class PagedAdamW8bit(Method):
    """AdamW with one byte for each state, in memory that the driver pages."""

    min_size: int = 4096
    """Tensors with fewer elements keep 32-bit states."""
    implementation: Implementation = "auto"
    """library: the kernels of bitsandbytes; torch: the same in plain torch, not paged; auto: the kernels on CUDA."""

    def __post_init__(self) -> None:
        if self.min_size < 0:
            raise ValueError(f"min_size must not be negative, got {self.min_size}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        refuse_sharding(self.name, args)
        use_library(self.implementation, self.name, "bitsandbytes", ctx)
        return {}

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        parts = quantised_groups(groups, ctx.model)
        settings = {
            "lr": ctx.args.learning_rate,
            "betas": (ctx.args.adam_beta1, ctx.args.adam_beta2),
            "eps": ctx.args.adam_epsilon,
        }
        if use_library(self.implementation, self.name, "bitsandbytes", ctx):
            from bitsandbytes.optim import PagedAdamW8bit as Library

            return Library(bitsandbytes_groups(parts), min_8bit_size=self.min_size, **settings)
        return QuantisedAdamW(parts, Codec(bits=8, block=256), min_size=self.min_size, **settings)
