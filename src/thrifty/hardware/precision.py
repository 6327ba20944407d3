"""`precision: auto`: the mixed precision that a device does well, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError

if TYPE_CHECKING:
    from thrifty.hardware.detect import Hardware
    from thrifty.hardware.devices import Device

AUTO = "auto"
_TENSOR_CORES, _BF16_UNITS = 7.0, 8.0  # NVIDIA compute capabilities: Volta, Ampere


@dataclass(frozen=True)
class Choice:
    """Methods to train with, none for plain float32, and why."""

    methods: tuple[str, ...]
    reason: str

    @property
    def line(self) -> str:
        """One line for people."""
        return f"{' + '.join(self.methods) or 'fp32'}: {self.reason}"


def choose_precision(hardware: Hardware) -> Choice:
    """Chooses for the weakest of the accelerators, or for the processor where there is none.

    >>> from thrifty.hardware.detect import Accelerator, Hardware
    >>> t4 = Accelerator("Tesla T4", "cuda", 16 << 30, compute_capability="7.5")
    >>> choose_precision(Hardware((t4,), "", 8, 8, 0, 0, bf16=False)).line
    'fp16: Tesla T4 (compute capability 7.5) has fp16 units and no bf16 units; the loss is scaled'
    """
    kind = hardware.kind
    if kind == "cpu":
        if hardware.bf16:
            return Choice(("bf16",), f"{hardware.processor} has bf16 units (AMX or AVX512-BF16)")
        return Choice((), f"{hardware.processor} has no bf16 units (AMX or AVX512-BF16) and would emulate it, slowly")
    rated = [
        (float(device.compute_capability), device.name) for device in hardware.accelerators if device.compute_capability
    ]
    if rated:
        capability, name = min(rated)
        device = f"{name} (compute capability {capability})"
        if capability >= _BF16_UNITS:
            return Choice(("bf16", "tf32"), f"{device} has bf16 units; what stays in float32 uses its TF32 units")
        if capability >= _TENSOR_CORES:
            return Choice(("fp16",), f"{device} has fp16 units and no bf16 units; the loss is scaled")
        return Choice((), f"{device} has no units for half precision")
    name = hardware.accelerators[0].name
    if kind == "mps":
        return Choice((), f"{name} multiplies half precision hardly faster than float32")
    if hardware.bf16:
        return Choice(("bf16",), f"{name} has bf16 units")
    return Choice(("fp16",), f"{name} has no bf16 units; the loss is scaled")


def precision_for(device: Device) -> tuple[str, ...]:
    """The same choice for a device profile: the methods to plan with."""
    if device.kind == "cpu":
        return ("bf16",) if "bf16" in device.peak_flops else ()
    if "bf16" in device.peak_flops:
        return ("bf16", "tf32") if device.supports_tf32 else ("bf16",)
    has_units = device.compute_capability is None or device.compute_capability >= _TENSOR_CORES
    return ("fp16",) if device.supports_fp16 and has_units else ()


def check_auto(recipe: Any, arguments: dict[str, Any], dtype: str = "float32") -> None:
    """Refuses `precision: auto` beside something else that decides about precision.

    Args:
        recipe: The `Recipe` without the choice.
        arguments: The `TrainingArguments` fields that were set.
        dtype: The data type of the weights.

    Raises:
        InputError: Naming both.
    """
    owner = recipe.owner("precision")
    rival = f"the method '{owner.name}'" if owner is not None else None
    for name in ("tf32", *(() if rival else ("bf16", "fp16"))):
        if arguments.get(name):
            rival = f"`{name}: {str(arguments[name]).lower()}`"
    if rival is None and "tf32" in recipe:
        rival = "the method 'tf32'"
    if rival is None and dtype != "float32":
        rival = f"`dtype: {dtype}`: mixed precision needs weights in float32, and"
    if rival is not None:
        raise InputError(
            f"chooses for the device, and {rival} chooses too", key="precision", value=AUTO, fix="keep one of the two"
        )
