"""Joint offloading and recomputation.

What it does: decides for each block whether its activations are kept, sent to the host, or computed again, so that a
step is fastest within a memory limit. What transfers can hide behind computing is offloaded; the rest is recomputed.

Helps: where the limit is tight and the link to the host is used by nothing else: faster than recomputing alone.
Does not help: when activations are not the peak; or on a slow link, where it is recomputation alone.
Limits: the first batch is measured (only inputs of blocks are kept in it). Times are those of the first batch, so
processes may plan differently; results are the same. On a CPU the host is the device (emulated): nothing is saved by
offloading. Not for sharded parameters or compiled models.
Source: Beaumont et al., "Efficient Combination of Rematerialization and Offloading for Training DNNs", NeurIPS 2021;
Patil et al., "POET: Training Neural Networks on Tiny Devices with Integrated Rematerialization and Paging", ICML 2022.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thrifty._hf import checkpointing_arguments, enable_checkpointing
from thrifty.architecture import find_blocks
from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods.checkpointing._chain import Chain, Schedule
from thrifty.methods.checkpointing._executor import ScheduledBlocks
from thrifty.methods.offload._joint import Plan, as_schedule, assess, joint
from thrifty.methods.offload.activation_offload import HostActivations

_PROBE_BYTES = 1 << 26
# For a dry run: bytes that reach the host in the time of one operation. 25 GB/s (PCIe 4) beside 125 TFLOP/s, and on a
# CPU copies at 5 GB/s beside 100 GFLOP/s; the limit on memory decides more than they do.
_LINK = {"cpu": 0.05}
_USUAL_LINK = 2e-4


def link_bandwidth(device: torch.device) -> float:
    """Bytes a second from the device to the host: the better of three copies."""
    source = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, pin_memory=source.is_cuda)
    best = 0.0
    for _ in range(3):
        if source.is_cuda:
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize(device)
        best = max(best, _PROBE_BYTES / (time.perf_counter() - begin))
    return best


class OffloadedAndRecomputed:
    """Plans and runs the joint optimum for one's own loop.

    Args:
        model: A Hugging Face model with checkpointing support, or any module.
        bandwidth: Bytes a second to the host.
        budget: The part of the blocks' activations that there is memory for; if less than the least that is possible,
            that least.
        budget_bytes: The same in bytes.
        blocks: The blocks, from a tensor to a tensor; default the model's stacks of equal blocks.
        host: Where activations go.
        link: For a dry run, in place of `bandwidth`: bytes in the time of one floating-point operation.
        meter: Counts the bytes that are kept on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        bandwidth: float,
        *,
        budget: float = 0.5,
        budget_bytes: int | None = None,
        blocks: Sequence[nn.Module] | None = None,
        host: HostActivations | None = None,
        link: float | None = None,
        meter: Any = None,
    ) -> None:
        if blocks is None:
            enable_checkpointing(model, {"use_reentrant": False})
            blocks = [block for stack in find_blocks(model) for block in stack]
        self.budget, self.budget_bytes = budget, budget_bytes
        self.plan: Plan | None = None
        self.host = host or HostActivations()
        self.scheduled = ScheduledBlocks(
            model, blocks, self._decide, costs="measured" if link is None else "planned", bandwidth=bandwidth,
            link=link, host=self.host, meter=meter, replan=link is None,
        )  # fmt: skip

    def _decide(self, chain: Chain) -> Schedule:
        length = len(chain)
        memory = self.budget_bytes
        if memory is None:
            all_kept = assess(chain, ("keep",) * length).peak
            least = min(assess(chain, ("recompute",) * length).peak, assess(chain, ("offload",) * length).peak)
            memory = max(int(self.budget * all_kept), least)
        self.plan = joint(chain, memory)
        return as_schedule(self.plan.choices)

    def remove(self) -> None:
        """Gives the blocks their own `forward` back."""
        self.scheduled.remove()


@register(
    "offload-and-recompute",
    title="Joint offloading and recomputation",
    section="offload",
    sources=[Paper("Beaumont et al.", 2021, "NeurIPS 2021"), Paper("Patil et al.", 2022, "arXiv:2207.07697")],
    exact=True,
    preset={"budget": 0.7, "least": 8},
    conflicts_with={
        "gradient-checkpointing": "both decide what the blocks keep",
        "activation-offload": "it decides itself what is offloaded",
        "activation-compression": "what it offloads it must find again as it was",
    },
    bench_order=49,
    emulated={"cpu": "the host is the device: what is offloaded is copied, and nothing is saved by it"},
)
@dataclass(kw_only=True)
class OffloadAndRecompute(Method):
    """Keeps, offloads or recomputes each block's activations, whatever is fastest within a limit."""

    budget: float = 0.5
    """The part of the blocks' activations that there is memory for; if less than the least that is possible, that
    least."""
    budget_bytes: int | None = None
    """The same in bytes, in place of `budget`."""
    bandwidth: float | None = None
    """Gigabytes a second to the host; None measures it."""
    least: int = 16384
    """Tensors with fewer elements stay on the device."""

    running: OffloadedAndRecomputed | None = field(default=None, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must be above 0 and at most 1, got {self.budget}")
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise ValueError(f"budget_bytes must be positive, got {self.budget_bytes}")
        if self.bandwidth is not None and self.bandwidth < 0:
            raise ValueError(f"bandwidth must not be negative, got {self.bandwidth}")
        if self.least < 1:
            raise ValueError(f"least must be at least 1, got {self.least}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise NotApplicable(
                "offload-and-recompute: it runs blocks again whose parameters FSDP or DeepSpeed have put away",
                fix="use gradient-checkpointing there",
            )
        return checkpointing_arguments(True, {"use_reentrant": False})

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.ctx = ctx
        if getattr(ctx.args, "torch_compile", False):
            raise NotApplicable(
                "offload-and-recompute: the compiler does not see what is dropped and moved",
                fix="use gradient-checkpointing with the policy memory-budget",
            )
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise NotApplicable(
                f"offload-and-recompute: {type(model).__name__} does not support checkpointing",
                fix="use activation-offload",
            )
        if len(find_blocks(model)) != 1:
            raise NotApplicable(
                f"offload-and-recompute: it is for one stack of blocks, and {type(model).__name__} has "
                f"{len(find_blocks(model))}",
                fix="use gradient-checkpointing with the policy optimal, or activation-offload",
            )
        return model

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self._start(kw["model"])

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        self._start(model)

    @property
    def warms_up(self) -> bool:
        return True

    def _start(self, model: nn.Module) -> None:
        if self.running is not None and self.running.scheduled.model is model:
            self.running.remove()
        if self.ctx.planning:
            link = 0.0 if self.bandwidth == 0 else _LINK.get(self.ctx.device_kind, _USUAL_LINK)
            self.running = OffloadedAndRecomputed(
                model, 0.0, budget=self.budget, budget_bytes=self.budget_bytes, link=link,
                host=HostActivations(self.least, forget=self.ctx.device_kind != "cpu"),
            )  # fmt: skip
            model.traced_whole = True  # type: ignore[assignment]  # a block's part depends on all of them
            return
        bandwidth = link_bandwidth(self.ctx.device) if self.bandwidth is None else self.bandwidth * 1e9
        self.running = OffloadedAndRecomputed(
            model, bandwidth, budget=self.budget, budget_bytes=self.budget_bytes, host=HostActivations(self.least)
        )

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        if self.running is not None:
            self.running.remove()
        return model
