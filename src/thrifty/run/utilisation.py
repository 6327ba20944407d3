"""How much of the device's rate a run reached."""

from __future__ import annotations

from typing import Any

from thrifty.errors import InputError
from thrifty.hardware.detect import Hardware


def model_flops_share(trainer: Any, hardware: Hardware, step_seconds: float) -> float | None:
    """The share of the peak rate that the model's own operations reach (MFU), or None where the peak is not known.

    The operations are the trainer's count: six for each parameter outside the embeddings and each token, padding
    included, attention left out. The peak is the measured one where this device was calibrated (`thrifty calibrate`),
    else that of the data sheet; for a processor only a measured one counts.

    Args:
        trainer: After training.
        hardware: What it ran on.
        step_seconds: Mean seconds of an optimizer step.
    """
    peak = peak_rate_here(trainer, hardware)
    done, steps = float(trainer.state.total_flos), trainer.state.global_step
    if peak is None or not done or not steps or not step_seconds:
        return None
    return done / steps / step_seconds / (peak * trainer.args.world_size)


def peak_rate_here(trainer: Any, hardware: Hardware) -> float | None:
    """Operations per second that the device can do in the precision of the run; None where nobody has said."""
    from thrifty.hardware.devices import detect_id, get_device

    try:
        name = detect_id(hardware.accelerators[0].name) if hardware.accelerators else "cpu"
        device = get_device(name)
    except InputError:
        return None
    precision = _precision(trainer)
    measured = (device.calibration or {}).get("peak_flops", {}).get(precision)
    if measured:
        return float(measured)
    return device.peak(precision) if device.kind != "cpu" else None


def _precision(trainer: Any) -> str:
    args, model = trainer.args, trainer.model
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if args.bf16 or dtype == "bfloat16":
        return "bf16"
    if args.fp16 or dtype == "float16":
        return "fp16"
    return "tf32" if args.tf32 else "fp32"
