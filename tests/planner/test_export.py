"""Exports: the numbers arrive, nothing is dropped, and real packages read the files."""

from __future__ import annotations

import ast
import json
import tomllib
from typing import Any

import pytest
import yaml

from thrifty.errors import InputError, ThriftyError
from thrifty.planner.export import TOOLS, export_plan
from thrifty.planner.export.intent import Export
from thrifty.planner.plan import plan

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
            "wide": plan(TINY, methods=["lion"], devices=2, **options),
        }


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", ["amp", "lora", "wide"])
def test_every_plan_goes_to_every_tool(plans, tool: str, name: str, tmp_path) -> None:
    found = export_plan(plans[name], tool)
    assert found.source
    for path in found.write(tmp_path):
        text = path.read_text()
        if path.suffix == ".json":
            json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            yaml.safe_load(text)
        elif path.suffix == ".toml":
            tomllib.loads(text)
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


def test_torchtitan_expresses_every_second_block(plans) -> None:
    toml = tomllib.loads(export_plan(plans["lora"], "torchtitan").files["torchtitan.toml"])
    assert toml["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "2"}


def test_the_trainer_takes_its_file(plans, tmp_path) -> None:
    from transformers import TrainingArguments

    values = json.loads(export_plan(plans["amp"], "trainer").files["training_arguments.json"])
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **values)
    assert args.bf16
    assert args.learning_rate == 3e-4
    assert args.per_device_train_batch_size == plans["amp"].chosen.micro_batch


@pytest.mark.parametrize("name", ["amp", "wide"])
def test_accelerate_loads_its_file(plans, name: str, tmp_path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = export_plan(plans[name], "accelerate").write(tmp_path)[0]
    config: Any = load_config_from_file(str(path))
    assert config.num_processes == plans[name].devices
    assert config.mixed_precision == ("bf16" if name == "amp" else "no")


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
