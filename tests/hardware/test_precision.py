"""`precision: auto`: what is chosen on each kind of device, and what it excludes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thrifty
import tiny
from thrifty.config import parse_config
from thrifty.errors import InputError
from thrifty.hardware.detect import Accelerator, Hardware, detect
from thrifty.hardware.precision import choose_precision


def machine(*accelerators: Accelerator, bf16: bool) -> Hardware:
    return Hardware(accelerators, "Some Processor", 8, 8, 64 << 30, 32 << 30, bf16=bf16)


def cuda(name: str, capability: str | None) -> Accelerator:
    return Accelerator(name, "cuda", 16 << 30, compute_capability=capability)


@pytest.mark.parametrize(
    ("hardware", "methods", "says"),
    [
        (machine(bf16=False), (), "Some Processor has no bf16 units"),
        (machine(bf16=True), ("bf16",), "AMX or AVX512-BF16"),
        (machine(cuda("A100", "8.0"), bf16=True), ("bf16", "tf32"), "compute capability 8.0"),
        (machine(cuda("RTX 5090", "12.0"), bf16=True), ("bf16", "tf32"), "TF32"),
        (machine(cuda("V100", "7.0"), bf16=False), ("fp16",), "no bf16 units"),
        (machine(cuda("GTX 1080", "6.1"), bf16=False), (), "no units for half precision"),
        (machine(cuda("A100", "8.0"), cuda("V100", "7.0"), bf16=True), ("fp16",), "V100"),
        (machine(cuda("AMD Instinct MI300X", None), bf16=True), ("bf16",), "MI300X"),
        (machine(Accelerator("Apple M3", "mps", 1 << 34), bf16=False), (), "hardly faster"),
        (machine(Accelerator("Data Center GPU Max", "xpu", 1 << 34), bf16=True), ("bf16",), "has bf16 units"),
    ],
)
def test_every_kind_of_device(hardware: Hardware, methods: tuple[str, ...], says: str) -> None:
    choice = choose_precision(hardware)
    assert choice.methods == methods
    assert says in choice.line
    assert "\n" not in choice.line
    assert choice.line.startswith("+".join(methods).replace("+", " + ") or "fp32")


def test_the_trainer_takes_it_and_says_why(tmp_path, capsys) -> None:
    run = thrifty.Trainer(
        tiny.llama(),
        tiny.arguments(tmp_path, max_steps=1),
        train_dataset=tiny.text_samples(),
        data_collator=tiny.collate_text,
        methods=[{"lora": {"r": 2}}],
        precision="auto",
    )
    expected = choose_precision(detect(use_cpu=True))
    assert [method.name for method in run.recipe if method.name != "lora"] == list(expected.methods)
    assert bool(run.args.bf16) is ("bf16" in expected.methods)
    assert f"precision: {expected.line}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "methods", "rival"),
    [
        ({}, ["bf16"], "the method 'bf16'"),
        ({}, ["tf32"], "the method 'tf32'"),
        ({"bf16": True}, [], "`bf16: true`"),
    ],
)
def test_two_choices_are_refused(tmp_path, settings: dict[str, Any], methods: list[str], rival: str) -> None:
    with pytest.raises(InputError, match=f"precision='auto'.*{rival}"):
        thrifty.Trainer(tiny.llama(), tiny.arguments(tmp_path, **settings), methods=methods, precision="auto")
    base = {"model_config": {"model_type": "llama"}, "embedded_corpus": "kjv", "precision": "auto"}
    with pytest.raises(InputError, match=f"precision='auto'.*{rival}"):
        parse_config({**base, **settings, "methods": methods})


def test_a_run_file_keeps_auto_until_the_device_is_known() -> None:
    base = {"model_config": {"model_type": "llama"}, "embedded_corpus": "kjv", "precision": "auto"}
    config = parse_config(base)
    assert config.precision == "auto"
    assert config.methods == []
    assert parse_config(config.to_dict()).precision == "auto"
    with pytest.raises(InputError, match="dtype: bfloat16"):
        parse_config({**base, "dtype": "bfloat16"})
    with pytest.raises(InputError, match=r"precision='half'.*one of bf16.*fp16.*auto"):
        parse_config({**base, "precision": "half"})
    with pytest.raises(InputError, match="precision='half'"):
        thrifty.Trainer(tiny.llama(), tiny.arguments("unused"), precision="half")  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
def test_the_real_accelerator_trains_with_what_was_chosen(tmp_path) -> None:
    run = thrifty.Trainer(
        tiny.llama(),
        tiny.arguments(tmp_path, max_steps=2, use_cpu=False),
        train_dataset=tiny.text_samples(),
        data_collator=tiny.collate_text,
        precision="auto",
    )
    run.train()
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
