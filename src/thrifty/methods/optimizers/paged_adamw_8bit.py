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

from thrifty.method import Paper, register
from thrifty.methods.optimizers._quantised import Implementation
from thrifty.methods.optimizers.adamw_8bit import AdamW8bit


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
    emulated={"cpu": "states lie in host memory anyway, so nothing is paged"},
)
@dataclass(kw_only=True)
class PagedAdamW8bit(AdamW8bit):
    """AdamW with one byte for each state, in memory that the driver pages."""

    implementation: Implementation = "auto"
    """library: the kernels of bitsandbytes; torch: the same in plain torch, not paged; auto: the kernels on CUDA."""

    def library_class(self) -> Any:
        from bitsandbytes.optim import PagedAdamW8bit

        return PagedAdamW8bit
