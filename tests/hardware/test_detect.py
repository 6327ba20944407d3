"""What detection says about the machine that the test runs on."""

from __future__ import annotations

import json
import os

import psutil
import pytest
import torch

from thrifty.hardware import detect as detection
from thrifty.hardware.detect import Accelerator, Hardware, detect


def test_the_facts_are_those_of_this_machine() -> None:
    found = detect()
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.threads == torch.get_num_threads()
    assert 0 < found.free_bytes <= found.memory_bytes <= psutil.virtual_memory().total
    assert found.processor
    expected = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert found.kind == expected
    assert json.loads(json.dumps(found.to_dict()))["kind"] == expected


def test_accelerators_can_be_left_out() -> None:
    found = detect(use_cpu=True)
    assert found.kind == "cpu"
    assert found.accelerators == ()
    assert "training runs on the processor" in found.lines()[0]


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "_container_memory", lambda: (2**30, 2**28))
    found = detect(use_cpu=True)
    assert found.memory_bytes == 2**30
    assert found.free_bytes <= 2**30 - 2**28


def test_lines_name_each_device() -> None:
    gpu = Accelerator("NVIDIA H200", "cuda", 150 * 2**30, 140 * 2**30, "9.0")
    machine = Hardware((gpu, gpu), "Some Processor", 16, 8, 2**37, 2**36, bf16=True)
    first, second, host = machine.lines()
    assert first == "cuda:0 NVIDIA H200, 150 GiB, 140 GiB free"
    assert second.startswith("cuda:1 ")
    assert host == "Some Processor, 16 cores (8 threads used), 128 GiB memory, 64.0 GiB free"
