"""The global batch is divided before a run: as planned, or by accumulation."""

from __future__ import annotations

from typing import Any

import pytest

from thrifty.config import parse_config, yaml_text
from thrifty.errors import InputError
from thrifty.run import train
from thrifty.run.planning import settle_batch

# One class to dry-run: which methods a search adds is tested with the planner.
FIXED = ["adamw", "gradient-checkpointing", "chunked-cross-entropy"]


def settled(values: dict[str, Any], folder: Any) -> dict[str, Any]:
    config = parse_config(values)
    return settle_batch(config, config.training_arguments(folder)).arguments


def test_a_planned_run_trains_and_its_file_repeats_it(base_values: dict[str, Any], tmp_path, capsys) -> None:
    values = {key: value for key, value in base_values.items() if key != "per_device_train_batch_size"}
    planned = {**values, "plan": "auto", "global_batch_size": 4, "plan_memory": "1GiB", "methods": FIXED}
    result = train(parse_config({**planned, "output_dir": str(tmp_path / "run")}))
    said = capsys.readouterr().out
    assert "Chosen: micro-batch" in said
    again = yaml_text.read_mapping(result.output_dir / "run.yaml")
    assert again["per_device_train_batch_size"] * again["gradient_accumulation_steps"] == 4
    assert "plan" not in again
    assert "global_batch_size" not in again
    assert again["methods"] == FIXED


def test_without_a_plan_accumulation_divides_the_batch(base_values: dict[str, Any], tmp_path) -> None:
    assert settled({**base_values, "global_batch_size": 8}, tmp_path)["gradient_accumulation_steps"] == 4
    with pytest.raises(InputError, match=r"global_batch_size=7.*multiple of the 2.*Fix: 6"):
        settled({**base_values, "global_batch_size": 7}, tmp_path)
    with pytest.raises(InputError, match=r"gradient_accumulation_steps=3"):
        settled({**base_values, "global_batch_size": 8, "gradient_accumulation_steps": 3}, tmp_path)


def test_what_cannot_be_planned_writes_nothing(base_values: dict[str, Any], tmp_path) -> None:
    target = tmp_path / "run"
    small = {**base_values, "plan": "auto", "global_batch_size": 2, "plan_memory": "4KiB", "methods": FIXED,
             "output_dir": str(target)}  # fmt: skip
    with pytest.raises(InputError, match="Nothing fits"):
        train(parse_config(small))
    assert not target.exists()
    values = {key: value for key, value in base_values.items() if key != "per_device_train_batch_size"}
    with pytest.raises(InputError, match="global_batch_size"):
        train(parse_config({**values, "plan": "auto", "output_dir": str(target)}))
    with pytest.raises(InputError, match="plan"):
        parse_config({**base_values, "plan": "best"})
