"""Device profiles: complete, consistent with each other, found by name, and readable from a user's file."""

from __future__ import annotations

import pytest

from thrifty.errors import InputError
from thrifty.hardware.devices import GIB, detect_id, get_device, list_devices, load_device

IDS = [
    "t4", "v100-16gb", "v100-32gb", "rtx3090", "rtx4090", "rtx5090", "l4", "a10g", "a6000-48gb", "l40s", "a100-40gb",
    "a100-80gb", "h100-80gb", "h100-96gb", "h200", "b200", "mi300x", "tpu-v5e", "cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))


def test_the_list_is_complete() -> None:
    assert [d.id for d in list_devices()] == IDS


@pytest.mark.parametrize("identity", IDS)
def test_a_profile_is_plausible(identity: str) -> None:
    device = get_device(identity)
    assert device.sources
    assert 0 < device.memory_bytes <= device.nominal_bytes
    assert device.bandwidth > 0
    assert device.link_bandwidth > 0
    assert device.processors > 0
    rates = [device.peak_flops[p] for p in ("fp32", "tf32", "bf16", "fp8") if p in device.peak_flops]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("A100", "a100-80gb"),
        ("v100", "v100-16gb"),
        ("H100", "h100-80gb"),
        ("4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("gh200", "h100-96gb"),
    ],
)
def test_aliases(name: str, identity: str) -> None:
    assert get_device(name).id == identity


def test_capabilities_follow_the_units() -> None:
    assert not get_device("t4").supports_bf16
    assert not get_device("v100").supports_tf32
    assert get_device("a100").supports_tf32
    assert not get_device("a100").supports_fp8
    assert get_device("h100").supports_fp8
    assert get_device("t4").peak("bf16") == get_device("t4").peak("fp32")
    assert get_device("a100").alignment(2) == 64
    assert get_device("v100").alignment(2) == 8


def test_unknown_name_suggests_a_near_one() -> None:
    with pytest.raises(InputError, match="did you mean 'a100-80gb'"):
        get_device("a100-80g")


def test_memory_can_be_limited() -> None:
    assert get_device("a100").with_memory(10 * GIB).memory_bytes == 10 * GIB


@pytest.mark.parametrize(
    ("reported", "identity"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_detection_by_the_reported_name(reported: str, identity: str) -> None:
    assert detect_id(reported) == identity


def test_detection_of_something_else_is_an_error() -> None:
    with pytest.raises(InputError):
        detect_id("Voodoo 2")


GOOD = "name: My card\nkind: cuda\nmemory_gib: 20\nbandwidth_gbs: 700\nprocessors: 64\ntflops: {fp32: 20, bf16: 40}\n"


def test_a_users_file(tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    device = get_device(str(file))
    assert device.id == "mine"
    assert device.memory_bytes == 20 * GIB
    assert device.peak("bf16") == 40e12
    assert device.link_bandwidth == device.host_bandwidth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("tflops", "tflop"), "did you mean 'tflops'"),
        (GOOD.replace("kind: cuda", "kind: abacus"), "unknown kind"),
        (GOOD.replace("memory_gib: 20", "memory_gib: -1"), "zero or more"),
        (GOOD.replace("memory_gib: 20\n", ""), "memory_gib"),
        (GOOD.replace("bf16", "bf15"), "did you mean 'bf16'"),
        ("- 1", "mapping"),
        ("{", "not valid YAML"),
    ],
)
def test_a_faulty_file_is_answered(tmp_path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_device(tmp_path / "x.yaml")


def test_a_missing_file_is_answered(tmp_path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_device(tmp_path / "none.yaml")
