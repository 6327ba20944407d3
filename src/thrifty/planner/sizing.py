"""How large a model, and how many tokens, a compute budget is best spent on.

Training costs about C = 6 N D operations for N parameters and D tokens (more for long sequences). Hoffmann
et al., "Training Compute-Optimal Large Language Models", 2022, fitted three ways of dividing C; Besiroglu et al.,
"Chinchilla
Scaling: A Replication Attempt", 2024, refitted the third. They disagree (the rounded constants of the third way give
less than half of Chinchilla's own size for its budget), so the answer names the way and shows the others.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from thrifty.hardware.devices import Device

TOKENS_PER_PARAMETER = 20.0
# Chinchilla itself: the point through which the power laws of approaches 1 and 2 are drawn.
_ANCHOR_PARAMETERS, _ANCHOR_TOKENS = 70e9, 1.4e12


@dataclass(frozen=True)
class LossLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token of the authors' data."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Predicted loss of a model of `parameters` trained on `tokens`."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimal_parameters(self, flops: float) -> float:
        """The size that minimises the loss along 6 N D = `flops`."""
        total = self.alpha + self.beta
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / total)
        return scale * (flops / 6) ** (self.beta / total)


PUBLISHED = LossLaw(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
REFIT = LossLaw(E=1.82, A=482.0, B=2085.0, alpha=0.35, beta=0.37)

APPROACHES = {
    "1": "frontier of training curves: size and tokens grow alike, 20 tokens a parameter",
    "2": "profiles at equal compute: size grows as C^0.49",
    "3": "parametric loss with the published constants",
    "refit": "parametric loss with the constants of the 2024 replication",
}


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """A division of a compute budget."""

    flops: float
    approach: str
    parameters: float
    tokens: float
    loss: float
    """Nats per token on the authors' data by the refitted law: for comparing sizes, not for predicting your loss."""
    alternatives: dict[str, float]
    """Parameters by each of the other ways."""
    shape: dict[str, int]
    """A Llama-type model of about that size."""
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


def optimal_parameters(flops: float, approach: str = "1") -> float:
    """Parameters of the compute-optimal model for a budget of `flops` operations.

    Raises:
        InputError: The budget is not positive or the approach is unknown.
    """
    if not flops > 0 or not math.isfinite(flops):
        raise InputError("the budget must be a positive number", key="flops", value=flops, fix="e.g. --flops 1e19")
    anchor = 6 * _ANCHOR_PARAMETERS * _ANCHOR_TOKENS
    if approach == "1":
        return math.sqrt(flops / (6 * TOKENS_PER_PARAMETER))
    if approach == "2":
        return _ANCHOR_PARAMETERS * (flops / anchor) ** 0.49
    if approach in ("3", "refit"):
        return (PUBLISHED if approach == "3" else REFIT).optimal_parameters(flops)
    raise InputError(
        f"unknown approach{did_you_mean(approach, APPROACHES)}",
        key="approach",
        value=approach,
        fix="one of " + ", ".join(APPROACHES),
    )


def size_for_flops(flops: float, *, approach: str = "1", vocab_size: int = 32000) -> Sizing:
    """Divides a budget of `flops` operations between parameters and tokens."""
    parameters = optimal_parameters(flops, approach)
    tokens = flops / (6 * parameters)
    return Sizing(
        flops=flops,
        approach=approach,
        parameters=parameters,
        tokens=tokens,
        loss=REFIT.loss(parameters, tokens),
        alternatives={a: optimal_parameters(flops, a) for a in APPROACHES if a != approach},
        shape=suggest_shape(parameters, vocab_size),
    )


def size_for_time(
    seconds: float,
    device: Device,
    *,
    devices: int = 1,
    precision: str | None = None,
    utilisation: float | None = None,
    approach: str = "1",
    vocab_size: int = 32000,
) -> Sizing:
    """Divides what `devices` of a kind can compute in `seconds`.

    Args:
        seconds: Wall time of the run.
        device: Profile; its measured matrix rate is taken where it was calibrated.
        devices: How many, assumed to scale perfectly.
        precision: fp32, tf32, bf16, ...; default the best that trains well on the device.
        utilisation: Share of the peak rate that the model's operations reach (MFU); default 0.4 of a data-sheet peak,
            0.8 of a measured rate.
        approach: See `APPROACHES`.
        vocab_size: For the suggested shape.
    """
    if not seconds > 0:
        raise InputError("the time must be positive", key="budget", value=seconds, fix="e.g. --budget 2h")
    if devices < 1:
        raise InputError("at least one device is needed", key="devices", value=devices)
    chosen = precision or next((p for p in ("bf16", "fp16", "tf32") if p in device.peak_flops), "fp32")
    measured = (device.calibration or {}).get("peak_flops", {}).get(chosen)
    peak = measured or device.peak(chosen)
    share = utilisation if utilisation is not None else (0.8 if measured else 0.4)
    if not 0 < share <= 1:
        raise InputError("must lie in (0, 1]", key="utilisation", value=utilisation)
    sizing = size_for_flops(seconds * devices * peak * share, approach=approach, vocab_size=vocab_size)
    basis = "measured rate" if measured else "data-sheet peak"
    note = f"{devices} x {device.id} at {share:.0%} of the {basis} in {chosen} ({peak / 1e12:.3g} TFLOP/s)"
    return Sizing(**{**asdict(sizing), "assumptions": (note,)})


def suggest_shape(parameters: float, vocab_size: int = 32000) -> dict[str, int]:
    """Dimensions of a Llama-type decoder (tied embeddings below 1 B) with about `parameters` parameters.

    The width is a multiple of 128 (64 for small models), the depth near one layer for each 64 to 128 of width, the MLP
    8/3 of the width.
    """
    step = 128 if parameters > 3e7 else 64
    best: tuple[float, dict[str, int]] | None = None
    for hidden in range(step, 16384 + 1, step):
        intermediate = math.ceil(hidden * 8 / 3 / step) * step
        per_layer = 4 * hidden**2 + 3 * hidden * intermediate + 2 * hidden
        embeddings = vocab_size * hidden * (1 if parameters < 1e9 else 2) + hidden
        for layers in range(max(2, hidden // 128), max(4, hidden // 48) + 1):
            total = embeddings + layers * per_layer
            # Near the wanted size first; then near the usual aspect of one layer for 80 of width.
            distance = abs(math.log(total / parameters)) + 0.05 * abs(math.log(hidden / layers / 80))
            if best is None or distance < best[0]:
                heads = max(1, hidden // (128 if hidden >= 2048 else 64))
                shape = {
                    "hidden_size": hidden,
                    "intermediate_size": intermediate,
                    "num_hidden_layers": layers,
                    "num_attention_heads": heads,
                    "vocab_size": vocab_size,
                    "parameters": total,
                }
                best = (distance, shape)
    assert best is not None
    return best[1]


def training_flops(
    parameters: float, tokens: float, *, layers: int = 0, hidden: int = 0, seq_len: int = 0, recompute: bool = False
) -> float:
    """Operations of a run: 6 N a token, 12 L s h a token for attention, a third more with full recomputation."""
    per_token = 6 * parameters + 12 * layers * seq_len * hidden
    return per_token * tokens * (4 / 3 if recompute else 1)


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `45m`, `2h`, `1.5d`, `1h30m`, or a bare number of seconds.

    Raises:
        InputError: The text is none of these.

    >>> parse_duration("1h30m")
    5400.0
    """
    units = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
    whole = text.strip().lower()
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhdw])", whole)
    if parts and re.fullmatch(r"(\s*\d+(?:\.\d+)?\s*(min|[smhdw]))+\s*", whole):
        return sum(float(number) * units[unit] for number, unit in parts)
    try:
        return float(whole)
    except ValueError:
        raise InputError("not a duration", key="budget", value=text, fix="e.g. 90s, 45m, 2h, 1.5d") from None
