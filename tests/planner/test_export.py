"""Exports: the numbers arrive, nothing is dropped, and real packages read the files."""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from thrifty.errors import InputError, ThriftyError
from thrifty.planner.export import TOOLS, export_plan
from thrifty.planner.export.intent import Adapter, Export, Intent
from thrifty.planner.export.reading import intent_of
from thrifty.planner.plan import plan

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import exports

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THRIFTY_CACHE", str(tmp_path_factory.mktemp("cache")))
        # What a search finds is tested elsewhere; here plans need only exist.
        patch.setattr("thrifty.planner.search.MOST_CLASSES", 1)
        options = {"device": "a100", "seq_len": 128, "processes": 1, "global_batch": 8}
        yield {
            "amp": plan(TINY, methods=["bf16", "gradient-checkpointing", "lawa"], learning_rate=3e-4, **options),
            "lora": plan(TINY, methods=["lora", {"gradient-checkpointing": {"every": 2}}], dtype="bfloat16", **options),
            "wide": plan(TINY, methods=[{"lion": {"betas": [0.95, 0.98]}}], devices=2, **options),
            "qlora": plan(TINY, methods=["qlora", "packing", "adamw-8bit"], dtype="bfloat16", **options),
        }


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", ["amp", "lora", "wide", "qlora"])
def test_every_plan_goes_to_every_tool(plans, tool: str, name: str, tmp_path) -> None:
    found = export_plan(plans[name], tool)
    assert found.source
    for path in found.write(tmp_path):
        text = path.read_text()
        if path.suffix == ".json":
            json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            yaml.safe_load(text)
        elif path.suffix == ".py":
            ast.parse(text)
        assert text.strip()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_method_that_only_thrifty_has_is_listed(plans, tool: str) -> None:
    assert any("'lawa'" in line for line in export_plan(plans["amp"], tool).missing)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_micro_batch_and_the_accumulation_arrive(plans, tool: str) -> None:
    chosen = plans["amp"].chosen
    found = export_plan(plans["amp"], tool)
    text = json.dumps(found.values, default=str) + "".join(found.files.values()) + " ".join(found.missing)
    assert str(chosen.micro_batch) in text
    assert str(chosen.accumulation) in text or str(chosen.global_batch) in text


def test_adapters_are_expressed_or_listed(plans) -> None:
    for tool in TOOLS:
        found = export_plan(plans["lora"], tool)
        expressed = any("lora" in key for key in found.values)
        listed = any("adapter" in line for line in found.missing)
        assert expressed or listed, tool
    axolotl = export_plan(plans["lora"], "axolotl").values
    assert (axolotl["lora_r"], axolotl["lora_alpha"], axolotl["lora_target_linear"]) == (8, 16, True)


@pytest.mark.parametrize("tool", exports.LOADERS)
@pytest.mark.parametrize("name", ["amp", "lora", "wide", "qlora"])
def test_the_package_reads_what_was_planned(plans, tool: str, name: str, tmp_path) -> None:
    pytest.importorskip(exports.PACKAGES[tool][0])
    expected = exports.facts(plans[name])
    exports.write_one(tmp_path, plans[name], tool, expected)
    assert exports.differences(exports.LOADERS[tool], tmp_path) == []


def test_a_misunderstanding_is_found(plans, tmp_path) -> None:
    exports.write_one(tmp_path, plans["amp"], "trainer", exports.facts(plans["amp"]) | {"micro_batch": 77})
    assert [line for line in exports.differences(exports.LOADERS["trainer"], tmp_path) if "77" in line]


LORA = Adapter(kind="LORA", rank=8, alpha=16, dropout=0.0, targets=["q_proj"], all_linear=False)
CHANGES: dict[str, dict[str, Any]] = {
    "micro-batch": {"micro_batch": 3}, "accumulation": {"accumulation": 5}, "length": {"seq_len": 77},
    "tf32": {"precision": "tf32"}, "fp16": {"precision": "fp16"}, "pure": {"dtype": "bfloat16"},
    "pure fp16": {"dtype": "float16", "precision": "fp16"}, "no checkpointing": {"checkpointing": False},
    "every second": {"checkpoint_every": 2}, "compile": {"compiled": True},
    "muon": {"optimizer": "Muon", "optim": None, "optimizer_settings": {"momentum": 0.9}},
    "8-bit": {"optimizer": "AdamW8bit", "optim": "adamw_bnb_8bit"},
    "a setting of AdamW": {"optimizer_settings": {"min_size": 7}, "optim": None},
    "rate": {"learning_rate": 0.5}, "clip": {"max_grad_norm": 0.5},
    "zero1": {"sharding": "zero1", "devices": 4}, "zero2": {"sharding": "zero2", "devices": 4},
    "zero3": {"sharding": "zero3", "devices": 4}, "packing": {"packing": True},
    "quantised": {"quantization": "nf4", "adapter": LORA},
    "task": {"task": "masked-lm"}, "a method": {"missing": ("the method 'lawa'",)},
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "another adapter": {"kind": "IA3"}, "dora": {"extras": {"use_dora": True}},
    "rslora": {"extras": {"use_rslora": True}}, "pissa": {"extras": {"init_lora_weights": "pissa_niter_4"}},
    "saved": {"extras": {"modules_to_save": ["lm_head"]}},
}  # fmt: skip
IN_FIELDS = {"tf32", "fp16", "no checkpointing", "compile"}
"""What reaches the Trainer through the fields of user and methods."""
ONLY_CAUSAL = {"axolotl", "llamafactory", "megatron", "neox", "paddle", "torchtitan"}
"""The rest do not ask for a task."""


def said(tool: str, intent: Intent) -> tuple[Any, ...]:
    found = import_module(f"thrifty.planner.export.{tool}").export(intent)
    found.check()
    return dict(found.values), found.files, found.flags, found.missing


@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_dropped(plans, tool: str) -> None:
    """Whatever changes in the plan changes the files, or the list of what they cannot say."""
    plain = intent_of(plans["amp"])
    before = said(tool, plain)
    for name, change in CHANGES.items():
        if (name != "task" or tool in ONLY_CAUSAL) and (name not in IN_FIELDS or tool != "trainer"):
            assert said(tool, dataclasses.replace(plain, **change)) != before, name
    adapted = dataclasses.replace(plain, adapter=LORA)
    before = said(tool, adapted)
    assert before != said(tool, plain)
    for name, change in ADAPTERS.items():
        other = dataclasses.replace(plain, adapter=dataclasses.replace(LORA, **change))
        if name != "another adapter" or tool in ("axolotl", "llamafactory", "paddle"):
            assert said(tool, other) != before, name


def test_quantised_weights_and_small_states_are_expressed_or_listed(plans) -> None:
    for tool in TOOLS:
        values, files, _, missing = said(tool, intent_of(plans["qlora"]))
        text = json.dumps(values, default=str) + "".join(files.values()) + " ".join(missing)
        for words in (("nf4",), ("8bit",), ("packing", "pack_impl")):
            assert any(word in text for word in words), (tool, words)
    factory = export_plan(plans["qlora"], "llamafactory").values
    assert (factory["quantization_bit"], factory["double_quantization"], factory["optim"]) == (
        4,
        True,
        "adamw_bnb_8bit",
    )


def test_the_optimizers_own_betas_arrive(plans) -> None:
    assert export_plan(plans["wide"], "deepspeed").values["optimizer"]["params"]["betas"] == [0.95, 0.98]
    assert export_plan(plans["wide"], "trainer").values["adam_beta2"] == 0.98
    assert export_plan(plans["wide"], "trainer").values["optim"] == "lion_32bit"


def test_what_a_tool_means_by_its_numbers() -> None:
    """Two thirds of NeoX's intermediate size are gate and value; Megatron drops by default; Paddle fixes alpha."""
    from transformers import LlamaConfig

    intent = Intent(
        model="m", config=LlamaConfig(**{k: v for k, v in TINY.items() if k != "model_type"}), task="causal-lm",
        seq_len=128, micro_batch=1, accumulation=1, devices=4, sharding="zero3", precision="bf16", dtype="float32",
        checkpointing=True, checkpoint_every=2, compiled=False, optimizer="AdamW", optimizer_settings={},
        optim="adamw_torch", learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-8, max_grad_norm=1.0,
        adapter=dataclasses.replace(LORA, alpha=8), quantization=None, double_quantization=False, packing=False,
        fields={}, missing=(),
    )  # fmt: skip
    assert said("neox", intent)[0]["intermediate_size"] == 480
    megatron, _, _, missing = said("megatron", intent)
    assert (megatron["hidden-dropout"], megatron["ckpt-format"]) == (0.0, "fsdp_dtensor")
    assert (megatron["recompute-method"], megatron["recompute-num-layers"]) == ("block", 3)
    assert any("first 3 instead" in line for line in missing)
    assert any("alpha 8" in line for line in said("paddle", intent)[3])
    assert said("composer", intent)[0]["optimizer"]["weight_decay"] == pytest.approx(1e-4)
    assert any("by op" in line for line in said("torchtitan", intent)[3])


def test_megatron_is_told_the_dimensions(plans) -> None:
    flags = export_plan(plans["amp"], "megatron").flags
    for flag, value in (
        ("--hidden-size", "64"),
        ("--num-query-groups", "2"),
        ("--seq-length", "128"),
        ("--global-batch-size", "8"),
    ):
        assert flags[flags.index(flag) + 1] == value
    assert "--bf16" in flags


def test_an_unknown_tool_is_answered(plans) -> None:
    with pytest.raises(InputError, match="did you mean 'axolotl'"):
        export_plan(plans["amp"], "axolot")


def test_an_undocumented_key_is_caught() -> None:
    bad = Export(tool="x", files={}, values={"a": 1, "b": {"c": "no"}}, keys={"b": {"c": ["yes"]}})
    with pytest.raises(ThriftyError, match=r"a is not documented; b.c='no' is none of"):
        bad.check()
