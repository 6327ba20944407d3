"""What this machine has: accelerators, processor, memory. Nothing is allocated on a device."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Accelerator:
    """One device that torch can train on. Sizes in bytes."""

    name: str
    kind: str
    """cuda (ROCm included), mps or xpu."""
    memory_bytes: int
    free_bytes: int | None = None
    compute_capability: str | None = None
    """NVIDIA only, for example 8.0."""


@dataclass(frozen=True)
class Hardware:
    """A machine as a training run sees it. Sizes in bytes."""

    accelerators: tuple[Accelerator, ...]
    processor: str
    cores: int
    """Processor cores that this process may use."""
    threads: int
    """Threads that torch uses for one operation."""
    memory_bytes: int
    """Host memory, or the limit of the container where that is lower."""
    free_bytes: int
    bf16: bool
    """Whether bfloat16 runs at full rate where training will run."""

    @property
    def kind(self) -> str:
        """Where training runs: the kind of the first accelerator, or cpu."""
        return self.accelerators[0].kind if self.accelerators else "cpu"

    def lines(self) -> list[str]:
        """One line for people about each part."""
        from thrifty.report import text

        host = (
            f"{self.processor}, {self.cores} cores ({self.threads} threads used), "
            f"{text.size(self.memory_bytes)} memory, {text.size(self.free_bytes)} free"
        )
        devices = []
        for index, device in enumerate(self.accelerators):
            free = "" if device.free_bytes is None else f", {text.size(device.free_bytes)} free"
            devices.append(f"{device.kind}:{index} {device.name}, {text.size(device.memory_bytes)}{free}")
        return [*devices, host] if devices else [f"no accelerator; training runs on the processor: {host}"]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {**asdict(self), "kind": self.kind}


def detect(*, use_cpu: bool = False) -> Hardware:
    """Looks at this machine.

    Args:
        use_cpu: Leave accelerators out, as `use_cpu: true` in a run file does.
    """
    import psutil
    import torch

    accelerators = () if use_cpu else _accelerators()
    memory = psutil.virtual_memory()
    limit, used = _container_memory()
    total = min(memory.total, limit) if limit else memory.total
    free = min(memory.available, limit - used) if limit else memory.available
    kind = accelerators[0].kind if accelerators else "cpu"
    if kind == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        bf16 = kind == "xpu" or (kind == "cpu" and bool(torch.cpu._is_amx_tile_supported() or _avx512_bf16()))
    return Hardware(
        accelerators=accelerators,
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_bytes=int(total),
        free_bytes=max(0, int(free)),
        bf16=bool(bf16),
    )


def processor_name() -> str:
    """The processor's model name, as the operating system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(
            r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE
        )
        if found:
            return " ".join(found[1].split())
    return platform.processor() or platform.machine()


def _accelerators() -> tuple[Accelerator, ...]:
    import psutil
    import torch

    if torch.cuda.is_available():
        found = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            capability = None if torch.version.hip else f"{properties.major}.{properties.minor}"
            found.append(Accelerator(properties.name, "cuda", int(total), int(free), capability))
        return tuple(found)
    if torch.backends.mps.is_available():
        # Unified memory: what Metal recommends as the most that one process should take.
        limit = getattr(torch.mps, "recommended_max_memory", lambda: psutil.virtual_memory().total)()
        return (Accelerator(f"Apple {processor_name()}", "mps", int(limit)),)
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        count = torch.xpu.device_count()
        properties = [torch.xpu.get_device_properties(index) for index in range(count)]
        return tuple(Accelerator(p.name, "xpu", int(p.total_memory)) for p in properties)
    return ()


def _avx512_bf16() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text(errors="replace")


def _container_memory() -> tuple[int | None, int]:
    """Limit and use of the control group, in bytes; None where there is no limit."""
    for limit_file, use_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(limit_file).read_text().strip(), Path(use_file).read_text().strip()
        except OSError:
            continue
        # Version 1 states "no limit" as a number near 2**63.
        if limit.isdigit() and int(limit) < 2**60:
            return int(limit), int(used)
    return None, 0
