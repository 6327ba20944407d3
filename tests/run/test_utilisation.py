"""The share of the device's rate that a run reached."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

import tiny
from thrifty.hardware import calibrate
from thrifty.hardware.detect import Accelerator, detect
from thrifty.hardware.devices import get_device
from thrifty.run.utilisation import model_flops_share


def trainer_of(**precision):
    args = SimpleNamespace(**{"bf16": False, "fp16": False, "tf32": None, "world_size": 2, **precision})
    return SimpleNamespace(args=args, model=tiny.llama(), state=SimpleNamespace(total_flos=6e15, global_step=3))


def on(name):
    return dataclasses.replace(detect(use_cpu=True), accelerators=(Accelerator(name, "cuda", 80 << 30),))


@pytest.mark.parametrize(("precision", "name"), [({}, "fp32"), ({"tf32": True}, "tf32"), ({"bf16": True}, "bf16")])
def test_share_of_the_data_sheet(precision, name):
    hardware = on("NVIDIA A100-SXM4-80GB")
    peak = get_device("a100-80gb").peak(name)
    share = model_flops_share(trainer_of(**precision), hardware, step_seconds=4.0)
    assert share == pytest.approx(2e15 / 4.0 / (2 * peak))


def test_unknown_device_and_unmeasured_processor_give_none(monkeypatch):
    assert model_flops_share(trainer_of(), on("Quantum 9"), step_seconds=1.0) is None
    monkeypatch.setattr(calibrate, "stored_calibration", lambda identity: None)
    assert model_flops_share(trainer_of(), detect(use_cpu=True), step_seconds=1.0) is None


def test_measured_rate_of_a_processor_counts(monkeypatch):
    monkeypatch.setattr(calibrate, "stored_calibration", lambda identity: {"peak_flops": {"fp32": 1e15}})
    assert model_flops_share(trainer_of(), detect(use_cpu=True), step_seconds=4.0) == pytest.approx(0.25)
