"""Advice on shapes and on data loading.

Shapes: matrix units work on tiles, and a device on one tile for each of its processors at a time. A dimension that is
no multiple of the unit's width, or a product that just misses a whole wave of tiles, wastes what the last tile or wave
leaves idle. Source: NVIDIA, "Deep Learning Performance: Matrix Multiplication Background User's Guide".

Data loading: the loader must make a batch at least as fast as the device consumes one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from thrifty.hardware.devices import Device

TILE = (256, 128)
"""Rows and columns of the output tile of large matrix products on NVIDIA devices since Volta."""

_ITEM_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True)
class Waves:
    """How the tiles of one output matrix fall on the processors."""

    tiles: int
    waves: int
    efficiency: float
    """Share of the processors' time that is used: tiles / (waves x processors)."""
    tile_efficiency: float
    """Share of the tiles' area that is inside the matrix."""


@dataclass(frozen=True)
class Advice:
    """One thing to change, or to leave."""

    key: str
    value: Any
    better: Any
    """What to set instead; equal to `value` where nothing is gained."""
    reason: str
    severity: str = "hint"
    """hint or warning."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


def wave_quantisation(rows: int, columns: int, processors: int, tile: tuple[int, int] = TILE) -> Waves:
    """Tiles, waves and efficiency of a product with an output of `rows` x `columns`.

    >>> wave_quantisation(1793, 1793, 108).tiles
    120
    """
    if min(rows, columns, processors, *tile) < 1:
        raise InputError("sizes must be positive", key="shape", value=(rows, columns, processors))
    tiles = math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
    waves = math.ceil(tiles / processors)
    return Waves(tiles, waves, tiles / (waves * processors), rows * columns / (tiles * tile[0] * tile[1]))


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def preferred_multiple(device: Device, precision: str) -> int:
    """Elements to whose multiple dimensions should be padded on this device in this precision.

    128 bytes on A100 and later data-centre devices (64 in 16-bit, 32 in TF32, 128 in 8-bit),
    else 16 bytes (8 in 16-bit).
    """
    return max(1, device.alignment_bytes // _ITEM_BYTES[precision])


def advise_shapes(
    config: PretrainedConfig, device: Device, precision: str, *, micro_batch: int, seq_len: int
) -> list[Advice]:
    """Looks at vocabulary, widths, head size, batch and sequence; returns what would run better, most costly first.

    The dimensions of a pretrained model are reported, but only vocabulary, batch and sequence can be changed after the
    fact; padding the vocabulary leaves the logits of real ids unchanged as long as padded ids are never targets.
    """
    multiple = preferred_multiple(device, precision)
    found: list[Advice] = []
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab = getattr(text, "vocab_size", None)
    if vocab and vocab % max(multiple, 8):
        better = round_up(vocab, max(64, multiple))
        reason = f"the output layer's columns are no multiple of {max(multiple, 8)} in {precision}"
        how = "; model.resize_token_embeddings(n, pad_to_multiple_of=64) pads them"
        found.append(Advice("vocab_size", vocab, better, reason + how, "warning"))
    for key in ("hidden_size", "intermediate_size"):
        size = getattr(text, key, None)
        if isinstance(size, int) and size % multiple:
            least = _ITEM_BYTES[precision] * size % 16 != 0
            reason = f"no multiple of {multiple} elements ({device.alignment_bytes} bytes) in {precision}"
            severity = "warning" if least else "hint"
            found.append(Advice(key, size, round_up(size, multiple), reason + "; fixed once pretrained", severity))
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    size = getattr(text, "head_dim", None) or (hidden // heads if heads and hidden else None)
    if size and size % 8:
        reason = "fused attention kernels want a head size that is a multiple of 8; another one is padded or refused"
        found.append(Advice("head_dim", size, round_up(size, 8), reason, "warning"))
    if seq_len % 8:
        found.append(
            Advice("seq_len", seq_len, round_up(seq_len, 8), "no multiple of 8; pad_to_multiple_of=8 in the collator")
        )
    found += _advise_batch(text, device, micro_batch, seq_len)
    return sorted(found, key=lambda a: a.severity != "warning")


def _advise_batch(text: Any, device: Device, micro_batch: int, seq_len: int) -> list[Advice]:
    hidden = getattr(text, "hidden_size", None)
    if device.kind not in ("cuda", "rocm") or not hidden:
        return []
    now = wave_quantisation(micro_batch * seq_len, hidden, device.processors)
    around = range(max(1, micro_batch - 4), micro_batch + 5)
    scores = {b: wave_quantisation(b * seq_len, hidden, device.processors).efficiency for b in around}
    best = max(around, key=lambda b: (round(scores[b], 3), -abs(b - micro_batch)))
    if scores[best] - now.efficiency < 0.05:
        return []
    reason = (
        f"{now.tiles} tiles on {device.processors} processors make {now.waves} waves, {now.efficiency:.0%} used in the "
        f"hidden-size products; a micro-batch of {best} uses {scores[best]:.0%}"
    )
    return [Advice("per_device_train_batch_size", micro_batch, best, reason)]


@dataclass(frozen=True, kw_only=True)
class LoadingAdvice:
    """Settings of the data loader, and what they leave."""

    dataloader_num_workers: int
    dataloader_pin_memory: bool
    dataloader_prefetch_factor: int | None
    dataloader_persistent_workers: bool
    waiting_share: float
    """Share of the wall time in which the device still waits for data."""
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


def advise_data_loading(
    *,
    step_seconds: float,
    samples_per_step: int,
    seconds_per_sample: float,
    cores: int,
    processes: int = 1,
    device: Device,
) -> LoadingAdvice:
    """How many loader processes hide the making of batches.

    Args:
        step_seconds: Time of one optimizer step on one process.
        samples_per_step: Samples that this process consumes in that time.
        seconds_per_sample: Time to read, decode and tokenise one sample on one core.
        cores: Cores of the machine.
        processes: Training processes on the machine; each keeps one core for itself.
        device: On a CPU the loader's cores are taken from the computation.

    Raises:
        InputError: A time is negative or a count below one.
    """
    if step_seconds <= 0 or seconds_per_sample < 0:
        raise InputError("times must be positive", key="step_seconds", value=(step_seconds, seconds_per_sample))
    if min(samples_per_step, cores, processes) < 1:
        raise InputError("counts must be at least one", key="cores", value=(samples_per_step, cores, processes))
    work = samples_per_step * seconds_per_sample
    spare = max(0, cores // processes - 1)
    pin = device.kind in ("cuda", "rocm")
    if work <= 0.02 * step_seconds:
        workers, reason = (
            0,
            "making a batch takes less than 2 % of a step: a worker process would cost more than it hides",
        )
    else:
        needed = math.ceil(work / step_seconds)
        workers = min(needed, spare)
        reason = f"one core makes a step's samples in {work:.3g} s, the device uses them in {step_seconds:.3g} s"
        if needed > spare:
            reason += f"; {needed} workers are needed but {spare} cores are free for each process: tokenise beforehand"
    # Without workers the loader and the device take turns; with them the slower one sets the pace.
    total = step_seconds + work if workers == 0 else max(step_seconds, work / workers)
    return LoadingAdvice(
        dataloader_num_workers=workers,
        dataloader_pin_memory=pin,
        dataloader_prefetch_factor=2 if workers else None,
        dataloader_persistent_workers=workers > 0,
        waiting_share=1 - step_seconds / total,
        reason=reason,
    )
