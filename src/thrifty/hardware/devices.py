"""Device profiles: what a machine can hold and how fast it can move and multiply numbers.

The built-in profiles are data-sheet facts kept in `devices.yaml`, each with its source. A device that is not in the
list is described by a YAML file of the same form, and a measured profile (`thrifty calibrate`) replaces the rates.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from thrifty.errors import InputError, did_you_mean

GIB = 1024**3
MIB = 1024**2

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
_KINDS = ("cuda", "rocm", "xla", "cpu", "mps")
_NUMBERS = {
    "compute_capability", "memory_gib", "usable_gib", "bandwidth_gbs", "link_gbs", "host_gbs", "processors",
    "context_mib",
    "workspace_mib", "launch_us", "alignment_bytes",
}  # fmt: skip
_KEYS = _NUMBERS | {"name", "aliases", "kind", "tflops", "gflops_per_core", "attention", "sources"}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or the host processor. Sizes in bytes, rates in operations or bytes per second."""

    id: str
    """Lower-case name by which it is asked for."""
    name: str
    """What the maker calls it."""
    kind: str
    """cuda, rocm, xla, mps or cpu."""
    memory_bytes: int
    """What a process can use: capacity less what the driver, firmware and error correction keep."""
    nominal_bytes: int
    """Capacity as sold."""
    peak_flops: dict[str, float]
    """Dense peak rate for each of fp32, tf32, fp16, bf16, fp8, int8 that the device has."""
    bandwidth: float
    """Device memory."""
    link_bandwidth: float
    """Between two devices of one machine, one direction."""
    host_bandwidth: float
    """Between device and host memory, one direction."""
    processors: int
    """Streaming multiprocessors, compute units or cores; for wave quantisation."""
    context_bytes: int
    """Taken by the driver for each process, outside the allocator."""
    workspace_bytes: int
    """Taken by the matrix library inside the allocator."""
    launch_seconds: float
    """Host time to issue one operation in eager mode."""
    alignment_bytes: int = 16
    """Matrix dimensions in bytes should be multiples of this."""
    compute_capability: float | None = None
    """NVIDIA only."""
    attention: tuple[str, ...] = ("flash", "efficient", "math")
    """Fused attention kernels, preferred first."""
    aliases: tuple[str, ...] = ()
    """Other names."""
    sources: tuple[str, ...] = ()
    """Where the numbers come from."""
    calibration: Mapping[str, Any] | None = field(default=None, repr=False)
    """Measured kernel times, see `thrifty.hardware.calibrate`."""

    @property
    def supports_bf16(self) -> bool:
        """Whether bfloat16 has a fast path. A CPU computes in it, at whatever speed calibration finds."""
        return "bf16" in self.peak_flops or self.kind == "cpu"

    @property
    def supports_fp16(self) -> bool:
        """Whether float16 training is sensible here."""
        return "fp16" in self.peak_flops

    @property
    def supports_tf32(self) -> bool:
        """Whether fp32 matrix products may run on the TensorFloat-32 units."""
        return "tf32" in self.peak_flops

    @property
    def supports_fp8(self) -> bool:
        """Whether 8-bit floating-point matrix units exist."""
        return "fp8" in self.peak_flops

    def peak(self, precision: str) -> float:
        """Dense peak rate in operations per second for a precision that the device has, else that of fp32.

        A device without units for a 16-bit format still runs it, on the fp32 pipeline.
        """
        if precision in self.peak_flops:
            return self.peak_flops[precision]
        return self.peak_flops.get("fp32") or max(self.peak_flops.values())

    def alignment(self, itemsize: int) -> int:
        """Elements to whose multiple matrix dimensions should be padded, for elements of `itemsize` bytes."""
        return max(1, self.alignment_bytes // itemsize)

    def with_memory(self, memory_bytes: int) -> Device:
        """The same device with another memory limit (a shared card, a MIG slice)."""
        return replace(self, memory_bytes=int(memory_bytes))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        data = asdict(self)
        data["calibrated"] = data.pop("calibration") is not None
        data.update({k: getattr(self, k) for k in ("supports_bf16", "supports_fp16", "supports_tf32", "supports_fp8")})
        return data


def list_devices() -> list[Device]:
    """All built-in profiles, in the order of the file; `cpu` is this machine."""
    return [_build(name, entry) for name, entry in _builtin().items()]


def get_device(name: str) -> Device:
    """Finds a device by id, alias, or path of a YAML file that describes one.

    A stored calibration of the same device is attached.

    Raises:
        InputError: Nothing has this name, or the file does not describe a device.
    """
    text = str(name).strip()
    if text.endswith((".yaml", ".yml")):
        return load_device(text)
    wanted = _normalise(text)
    for identity, entry in _builtin().items():
        if wanted == _normalise(identity) or wanted in {_normalise(str(a)) for a in entry.get("aliases", ())}:
            return _attach_calibration(_build(identity, entry))
    known = [n for i, e in _builtin().items() for n in (i, *map(str, e.get("aliases", ())))]
    raise InputError(
        f"unknown device{did_you_mean(text.lower(), known)}",
        key="device",
        value=name,
        fix="one of " + ", ".join(_builtin()) + ", or a YAML file that describes yours",
    )


def load_device(path: str | Path) -> Device:
    """Reads a device from a YAML file: the keys of `devices.yaml` at top level, plus an optional `id`.

    Raises:
        InputError: The file is missing, is not YAML, or holds an unknown, missing or malformed key.
    """
    import yaml

    file = Path(path)
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("no such file", key="device", value=str(path), fix="give the path of a device YAML") from None
    except yaml.YAMLError as error:
        raise InputError(f"not valid YAML: {error}", key="device", value=str(path)) from None
    if not isinstance(data, dict):
        raise InputError(
            "a device file holds a mapping", key="device", value=str(path), fix="see `thrifty devices --json`"
        )
    data = dict(data)
    identity = str(data.pop("id", file.stem)).lower()
    defaults = _read_file()["defaults"]
    return _build(identity, {**defaults, "sources": [str(file)], **data}, key=str(file))


@cache
def _read_file() -> dict[str, Any]:
    import yaml

    return yaml.safe_load(resources.files("thrifty.hardware").joinpath("devices.yaml").read_text(encoding="utf-8"))


@cache
def _builtin() -> dict[str, dict[str, Any]]:
    data = _read_file()
    entries = {name: {**data["defaults"], **entry} for name, entry in data["devices"].items()}
    entries["cpu"] = _host_entry(entries["cpu"])
    return entries


def _host_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Fills in what the operating system knows about this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * GIB
    name = platform.processor() or platform.machine()
    return {**entry, "name": f"{entry['name']} ({name}, {cores} cores)", "memory_gib": total / GIB, "processors": cores}


def _build(identity: str, entry: Mapping[str, Any], key: str | None = None) -> Device:
    where = key or identity
    for unknown in entry.keys() - _KEYS:
        raise InputError(f"unknown key{did_you_mean(unknown, _KEYS)}", key=f"{where}: {unknown}", value=entry[unknown])
    for needed in ("name", "kind", "memory_gib", "bandwidth_gbs", "processors"):
        if entry.get(needed) is None:
            raise InputError(f"a device needs `{needed}`", key=where, fix=f"add `{needed}: ...`")
    if entry["kind"] not in _KINDS:
        raise InputError("unknown kind", key=f"{where}: kind", value=entry["kind"], fix="one of " + ", ".join(_KINDS))
    for number in _NUMBERS & entry.keys():
        value = entry[number]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise InputError("must be a number, zero or more", key=f"{where}: {number}", value=value)
    rates = {k: float(v) * 1e12 for k, v in (entry.get("tflops") or {}).items()}
    per_core = entry.get("gflops_per_core") or {}
    rates |= {k: float(v) * 1e9 * entry["processors"] for k, v in per_core.items()}
    for precision in rates.keys() - set(PRECISIONS):
        raise InputError(
            f"unknown precision{did_you_mean(precision, PRECISIONS)}", key=f"{where}: tflops", value=precision
        )
    if not rates:
        raise InputError("a device needs `tflops`", key=where, fix="add e.g. `tflops: {fp32: 20, bf16: 80}`")
    host = float(entry["host_gbs"]) * 1e9
    link = entry.get("link_gbs")
    return Device(
        id=identity,
        name=str(entry["name"]),
        kind=entry["kind"],
        memory_bytes=round(entry.get("usable_gib", entry["memory_gib"]) * GIB),
        nominal_bytes=round(entry["memory_gib"] * GIB),
        peak_flops=rates,
        bandwidth=float(entry["bandwidth_gbs"]) * 1e9,
        # Without a link of their own, two devices talk through the host.
        link_bandwidth=host if link is None else float(link) * 1e9,
        host_bandwidth=host,
        processors=int(entry["processors"]),
        context_bytes=round(entry["context_mib"] * MIB),
        workspace_bytes=round(entry["workspace_mib"] * MIB),
        launch_seconds=float(entry["launch_us"]) * 1e-6,
        alignment_bytes=int(entry["alignment_bytes"]),
        compute_capability=entry.get("compute_capability"),
        attention=tuple(entry["attention"]),
        aliases=tuple(str(a) for a in entry.get("aliases", ())),
        sources=tuple(entry.get("sources", ())),
    )


def _attach_calibration(device: Device) -> Device:
    from thrifty.hardware.calibrate import stored_calibration

    measured = stored_calibration(device.id)
    return device if measured is None else replace(device, calibration=measured)


def _normalise(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")


def detect_id(name: str) -> str:
    """The id of the built-in profile whose device reports `name`, e.g. `NVIDIA A100-SXM4-80GB`.

    Raises:
        InputError: No profile fits.
    """
    words = _normalise(name)
    fitting = [
        (len(key), identity)
        for identity, entry in _builtin().items()
        for key in (_normalise(identity), *(_normalise(str(a)) for a in entry.get("aliases", ())))
        if key in words and not key.isdigit()
    ]
    if not fitting:
        raise InputError(
            "no built-in profile has this name", key="device", value=name, fix="describe it in a YAML file"
        )
    return max(fitting)[1]
