"""Calibration of this machine, for a second in place of twenty."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from thrifty.errors import InputError
from thrifty.hardware import calibrate as measuring
from thrifty.hardware import probes
from thrifty.hardware.devices import get_device
from thrifty.planner.replay import OP_TYPE
from thrifty.planner.time import TimeModel


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THRIFTY_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(measuring, "_ELEMENTS", (1 << 12, 1 << 16))
        patch.setattr(measuring, "_PRODUCTS", ((64, 128, 128), (128, 256, 128)))
        patch.setattr(measuring, "_ATTENTION", ((4, 64, 32),))
        patch.setattr(probes, "_BATCHES", ((1, 16),))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        found = measuring.calibrate("cpu", seconds=0.5)
        torch.set_num_threads(threads)
        yield found, get_device("cpu")


def test_everything_is_measured_and_positive(measured) -> None:
    found, _ = measured
    assert 0 < found["overhead_seconds"] <= found["overhead_again_seconds"]
    assert found["micro_batch_seconds"] >= 0
    assert found["fresh_page_seconds"] >= 0
    assert found["in_step"] > 0
    for table in found["products"].values():
        assert all(seconds > 0 for *_, seconds in table)
    for kernel, table in found["kernels"].items():
        assert all(seconds > 0 for points in table.values() for _, seconds in points), kernel


def test_it_is_found_again_with_the_device(measured) -> None:
    found, device = measured
    assert device.calibration is not None
    assert device.calibration["date"] == found["date"]


def test_larger_operations_take_longer(measured) -> None:
    _, device = measured
    model = TimeModel(device, causal=True)
    ops = np.zeros((2, 1), OP_TYPE)
    ops["name"], ops["dtype"], ops["count"] = "aten.mm", "float32", 1
    ops["m"][:, 0] = ops["n"][:, 0] = ops["k"][:, 0] = (64, 1024)
    ops["b"] = 1
    ops["flops"] = 2 * ops["m"] * ops["n"] * ops["k"]
    seconds = model.step(ops).kernel_seconds
    assert seconds[1] > 100 * seconds[0]


def test_a_step_takes_as_many_times_longer_as_passes_did(measured, monkeypatch) -> None:
    """Passes that take three times what the kernels promise make every later prediction three times longer."""
    found, device = measured
    monkeypatch.setattr(probes, "_BATCHES", ((2, 8), (1, 16)))
    alone = TimeModel(replace(device, calibration={**found, "in_step": 1.0}), causal=True)
    promised = []

    def typical(run):
        seconds = float(alone.step(probes.operations_of(run)).seconds[0])
        promised.append(seconds)
        return 3 * seconds

    factor = probes.in_step(typical, {**found, "in_step": 7.0})
    assert len(promised) == 6
    assert factor == pytest.approx(3.0)
    slow = TimeModel(replace(device, calibration={**found, "in_step": factor}), causal=True)
    ops = np.zeros((1, 1), OP_TYPE)
    ops["name"], ops["dtype"], ops["count"], ops["read"], ops["written"] = "aten.add", "float32", 5, 8192, 4096
    assert slow.step(ops).seconds[0] == pytest.approx(3 * alone.step(ops).seconds[0])


def test_operations_of_a_call_are_those_that_the_planner_counts() -> None:
    x, w = torch.ones(3, 4), torch.ones(5, 4)
    ops = probes.operations_of(lambda: (x @ w.t()).relu())
    assert [str(name) for name in ops["name"]] == ["aten.mm", "aten.relu"]  # the transposition is a view
    assert ops["flops"].tolist() == [2 * 3 * 4 * 5, 0]
    assert ops["written"].tolist() == [60, 60]


def test_a_measured_product_is_predicted_as_measured(measured) -> None:
    """Neighbours that run at other rates hardly pull at it."""
    found, device = measured
    table = [(64, 128, 128, 2e-5), (128, 256, 128, 4e-5), (512, 512, 512, 16e-4)]
    model = TimeModel(replace(device, calibration={**found, "products": {"float32": table}}))
    ops = np.zeros((1, len(table)), OP_TYPE)
    ops["name"], ops["dtype"], ops["b"] = "aten.mm", "float32", 1
    for name, sizes in zip("mnk", zip(*(shape for *shape, _ in table), strict=True), strict=True):
        ops[name] = sizes
    ops["flops"] = 2 * ops["m"] * ops["n"] * ops["k"]
    assert model.kernels(ops)[0] == pytest.approx([seconds for *_, seconds in table], rel=0.1)


def test_a_bad_moment_does_not_make_kernels_free(monkeypatch) -> None:
    """While the cost of a call is learnt another process takes the core for a time: the calls look a hundred times
    longer."""
    clock = measuring._Clock("cpu", 0.0)  # the fewest repeats: four calls of a clock a try
    bursts = iter([1e-4] * 6)
    monkeypatch.setattr(clock, "_once", lambda run, loops: next(bursts, 1e-6))
    clock.learn_call(lambda: None)
    monkeypatch.setattr(clock, "_once", lambda run, loops: 5e-6)
    assert clock.kernel(lambda: None) == pytest.approx(4e-6)


def test_forgetting(measured, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    assert measuring.forget_calibration("cpu") is False
    assert measuring.stored_calibration("cpu") is None


def test_a_damaged_file_is_answered(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "cpu.json").write_text("{")
    with pytest.raises(InputError, match="damaged calibration"):
        get_device("cpu")


def test_a_device_that_cannot_be_measured() -> None:
    with pytest.raises(InputError):
        measuring.calibrate("tpu")
