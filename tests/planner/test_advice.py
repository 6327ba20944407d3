"""The shape and data-loading advisors, with worked numbers."""

from __future__ import annotations

import pytest

from thrifty.errors import InputError
from thrifty.hardware.devices import get_device
from thrifty.planner.advice import (
    advise_data_loading,
    advise_shapes,
    preferred_multiple,
    round_up,
    wave_quantisation,
)
from thrifty.planner.catalogue import make_config, resolve


@pytest.mark.parametrize(("size", "tiles", "waves", "efficiency"), [(1792, 98, 1, 0.907), (1793, 120, 2, 0.556)])
def test_one_row_more_costs_a_whole_wave(size: int, tiles: int, waves: int, efficiency: float) -> None:
    found = wave_quantisation(size, size, get_device("a100").processors)
    assert (found.tiles, found.waves) == (tiles, waves)
    assert found.efficiency == pytest.approx(efficiency, abs=5e-4)


def test_one_tile_too_many() -> None:
    assert wave_quantisation(109 * 256, 128, 108).efficiency == pytest.approx(0.505, abs=5e-4)
    assert wave_quantisation(108 * 256, 128, 108).efficiency == 1
    assert wave_quantisation(256, 129, 108).tile_efficiency == pytest.approx(129 / 256)


@pytest.mark.parametrize(
    ("device", "precision", "multiple"),
    [
        ("a100", "fp16", 64),
        ("a100", "tf32", 32),
        ("a100", "int8", 128),
        ("v100", "fp16", 8),
        ("v100", "fp32", 4),
        ("t4", "int8", 16),
        ("rtx4090", "bf16", 8),
    ],
)
def test_multiples_by_device_and_precision(device: str, precision: str, multiple: int) -> None:
    assert preferred_multiple(get_device(device), precision) == multiple


def test_gpt2_vocabulary_is_padded_to_the_known_size() -> None:
    found = {a.key: a for a in advise_shapes(resolve("gpt2"), get_device("a100"), "bf16", micro_batch=8, seq_len=1024)}
    assert found["vocab_size"].better == 50304
    assert "hidden_size" not in found


def test_a_well_shaped_model_gets_no_warning() -> None:
    advice = advise_shapes(resolve("llama-3.1-8b"), get_device("a100"), "bf16", micro_batch=4, seq_len=4096)
    assert not [a for a in advice if a.severity == "warning"]


def test_an_odd_model_is_told_everything() -> None:
    config = make_config(
        {
            "model_type": "llama",
            "hidden_size": 420,
            "intermediate_size": 1001,
            "num_attention_heads": 10,
            "vocab_size": 1000,
        }
    )
    found = {a.key for a in advise_shapes(config, get_device("h100"), "bf16", micro_batch=3, seq_len=129)}
    assert {"hidden_size", "intermediate_size", "head_dim", "seq_len"} <= found


def test_batch_advice_gains_what_it_says() -> None:
    device = get_device("a100")
    config = make_config(
        {"model_type": "llama", "hidden_size": 1792, "intermediate_size": 4864, "num_attention_heads": 14}
    )
    found = {a.key: a for a in advise_shapes(config, device, "bf16", micro_batch=8, seq_len=256)}
    advice = found["per_device_train_batch_size"]
    now, then = (wave_quantisation(b * 256, 1792, device.processors).efficiency for b in (8, advice.better))
    assert then - now >= 0.05


def test_rounding() -> None:
    assert [round_up(v, 64) for v in (1, 64, 65)] == [64, 64, 128]


def loading(**changes):
    values = {
        "step_seconds": 1.0,
        "samples_per_step": 100,
        "seconds_per_sample": 0.035,
        "cores": 16,
        "device": get_device("a100"),
    }
    return advise_data_loading(**(values | changes))


def test_enough_workers_hide_the_loading() -> None:
    advice = loading()
    assert advice.dataloader_num_workers == 4
    assert advice.waiting_share == 0
    assert advice.dataloader_pin_memory
    assert advice.dataloader_prefetch_factor == 2


def test_too_few_cores_leave_a_wait_and_say_so() -> None:
    advice = loading(cores=3)
    assert advice.dataloader_num_workers == 2
    assert advice.waiting_share == pytest.approx(1 - 1 / 1.75)
    assert "tokenise beforehand" in advice.reason


def test_cheap_samples_need_no_worker() -> None:
    advice = loading(seconds_per_sample=1e-5, device=get_device("cpu"))
    assert advice.dataloader_num_workers == 0
    assert advice.dataloader_prefetch_factor is None
    assert not advice.dataloader_pin_memory


def test_processes_share_the_cores() -> None:
    assert loading(processes=8).dataloader_num_workers == 1


@pytest.mark.parametrize(
    "changes", [{"step_seconds": 0}, {"cores": 0}, {"samples_per_step": 0}, {"seconds_per_sample": -1}]
)
def test_nonsense_is_an_input_error(changes) -> None:
    with pytest.raises(InputError):
        loading(**changes)


def test_zero_sizes_are_refused() -> None:
    with pytest.raises(InputError):
        wave_quantisation(0, 1, 1)
