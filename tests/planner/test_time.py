"""The roofline, against hand-computed times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from thrifty.hardware.devices import get_device
from thrifty.planner.replay import OP_TYPE
from thrifty.planner.time import BANDWIDTH_SHARE, MATRIX_SHARE, TimeModel, model_flops_utilisation, tile_share

A100 = replace(get_device("a100"), calibration=None)


def op(name: str = "aten.mm", dtype: str = "bfloat16", **numbers: Any) -> np.ndarray:
    ops = np.zeros((1, 1), OP_TYPE)
    ops["name"], ops["dtype"], ops["count"], ops["phase"] = name, dtype, numbers.pop("count", 1), "forward"
    for key, value in numbers.items():
        ops[key] = value
    return ops


def product(m: int, n: int, k: int, dtype: str = "bfloat16") -> np.ndarray:
    size = 2 if dtype == "bfloat16" else 4
    moved = size * (m * k + k * n), size * m * n
    return op(dtype=dtype, b=1, m=m, n=n, k=k, flops=2 * m * n * k, read=moved[0], written=moved[1])


def test_a_large_product_is_bound_by_arithmetic() -> None:
    ops = product(27648, 4096, 4096)
    share = tile_share(ops, A100.processors)[0, 0]
    assert TimeModel(A100).kernels(ops)[0, 0] == pytest.approx(2 * 27648 * 4096**2 / (312e12 * MATRIX_SHARE * share))
    assert share > 0.9


def test_an_addition_is_bound_by_memory() -> None:
    ops = op("aten.add", read=2e9, written=1e9)
    assert TimeModel(A100).kernels(ops)[0, 0] == pytest.approx(3e9 / (2039e9 * BANDWIDTH_SHARE))


def test_a_thin_product_is_bound_by_memory() -> None:
    ops = product(1, 8192, 8192)
    assert TimeModel(A100).kernels(ops)[0, 0] >= (2 * 8192**2) / (2039e9 * BANDWIDTH_SHARE)


def test_tf32_speeds_up_fp32_products_where_there_are_units() -> None:
    ops = product(8192, 8192, 8192, "float32")
    plain, fast = TimeModel(A100).kernels(ops), TimeModel(A100, tf32=True).kernels(ops)
    assert plain[0, 0] / fast[0, 0] == pytest.approx(8, rel=0.01)
    v100 = replace(get_device("v100"), calibration=None)
    assert TimeModel(v100, tf32=True).kernels(ops)[0, 0] == TimeModel(v100).kernels(ops)[0, 0]


def test_causal_attention_does_half() -> None:
    ops = op("aten._scaled_dot_product_flash_attention", flops=1e13)
    assert TimeModel(A100).kernels(ops)[0, 0] == pytest.approx(2 * TimeModel(A100, causal=True).kernels(ops)[0, 0])


def test_many_small_operations_are_bound_by_launches() -> None:
    step = TimeModel(A100).step(op("aten.add", read=1e3, written=1e3, count=1000))
    assert step.launch_bound[0]
    assert step.seconds[0] == pytest.approx(1000 * A100.launch_seconds)


def test_a_calibrated_cpu_counts_what_runs_around_the_kernels() -> None:
    measured = {
        "overhead_seconds": 1e-5, "overhead_again_seconds": 4e-5, "micro_batch_seconds": 1e-3, "in_step": 1.5,
        "kernels": {"add": {"float32": [[1e3, 1e-6], [1e6, 1e-3]]}}, "fresh_page_seconds": 0.0,
    }  # fmt: skip
    cpu = TimeModel(replace(get_device("cpu"), calibration=measured))
    ops = op("aten.add", "float32", read=500, written=500, count=10)
    assert cpu.step(ops).seconds[0] == pytest.approx(1.5 * 10 * (1e-6 + 1e-5))
    ops["phase"] = "recompute"
    assert cpu.step(ops).seconds[0] == pytest.approx(1.5 * 10 * (1e-6 + 4e-5))
    assert cpu.micro_batch == pytest.approx(1.5e-3)
    assert TimeModel(replace(A100, calibration=measured)).micro_batch == 0.0  # it computes meanwhile
    assert TimeModel(A100).micro_batch == 0.0


def test_fusing_saves_reads_and_launches() -> None:
    ops = op("aten.mul", read=2e9, written=1e9, count=4)
    plain, fused = TimeModel(A100).step(ops), TimeModel(A100).step(ops, fused=True)
    assert fused.kernel_seconds[0] == pytest.approx(plain.kernel_seconds[0] / 3)
    assert fused.issue_seconds[0] == pytest.approx(plain.issue_seconds[0] / 4)


def test_one_tile_more_than_a_wave_costs() -> None:
    full, over = product(108 * 256, 128, 64), product(108 * 256 + 1, 128, 64)
    assert tile_share(full, 108)[0, 0] == 1
    assert tile_share(over, 108)[0, 0] < 0.85


def test_mfu() -> None:
    assert model_flops_utilisation(312e12, 2.0, A100, "bf16") == pytest.approx(0.5)
