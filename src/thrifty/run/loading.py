"""Loading a trained model by its folder alone, with an adapter where there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thrifty import tasks
from thrifty.errors import InputError
from thrifty.safety.trust import check_model_folder

_ADAPTER = "adapter_config.json"


def base_of(name: str) -> str:
    """The model that the weights belong to: `name` itself, or the base model of the adapter in the folder `name`.

    Raises:
        InputError: The adapter does not say what it belongs to.
    """
    path = Path(name).expanduser() / _ADAPTER
    if not path.is_file() or (path.parent / "config.json").is_file():
        return name
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise InputError("does not name its base model", key=str(path), fix="set base_model_name_or_path in it")
    return str(base)


def with_adapter(model: nn.Module, name: str) -> Any:
    """Puts the adapter in the folder `name` on its base model and merges it, if there is one."""
    if base_of(name) == name:
        return model
    check_model_folder(name, "model")
    from peft import PeftModel

    return PeftModel.from_pretrained(model, name).merge_and_unload()  # pyright: ignore


def load_for_inference(task_name: str, name: str, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Loads a model and its processor.

    Raises:
        InputError: There is no such model, or it does not fit the task.
    """
    task = tasks.get(task_name)
    base = base_of(name)
    processor_name = name if _has_processor(name) else base
    config = task.load_config(base, None, trust_remote_code=trust_remote_code)
    processor = task.load_processor(processor_name, config=config, trust_remote_code=trust_remote_code)
    notes: list[str] = []
    model = task.build_model(base, None, seed=0, processor=processor, trust_remote_code=trust_remote_code, notes=notes)
    drawn = [note for note in notes if "drawn" in note]
    if drawn:
        raise InputError(f"is no {task_name} model: {drawn[0]}", key="model", value=name, fix="a model of that task")
    return with_adapter(model, name), processor


def best_device() -> torch.device:
    """An accelerator if there is one, else the processor."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def _has_processor(name: str) -> bool:
    folder = Path(name).expanduser()
    return not folder.is_dir() or any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
