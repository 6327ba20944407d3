"""Checks of a run file that concern more than one key."""

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.config import yaml_text
from thrifty.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from thrifty.config.run_config import RunConfig
    from thrifty.recipe import Recipe

_SLOT_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "optimizer": ("optim", "optim_args", "optim_target_modules"),
    "schedule": ("lr_scheduler_type", "lr_scheduler_kwargs"),
    "precision": ("bf16", "fp16"),
}
"""The `TrainingArguments` fields that fill a slot in place of a method."""


def check_choices(config: RunConfig) -> None:
    """Values whose limits no single type expresses.

    Raises:
        InputError: A value is out of bounds, or belongs to another torch.
    """
    steps = config.arguments.get("max_steps", -1)
    if steps < 1 and steps != -1:
        raise InputError(
            "a run has at least one step",
            key="max_steps",
            value=steps,
            fix="1 or more; -1 leaves it to num_train_epochs",
        )
    _check_trackers(config.arguments.get("report_to"))
    backend = config.arguments.get("torch_compile_backend")
    if backend is not None:
        import torch._dynamo

        known: list[str] = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise InputError(
                f"torch has no such back end{did_you_mean(backend, known)}",
                key="torch_compile_backend",
                value=backend,
                fix="inductor",
            )
    mode = config.arguments.get("torch_compile_mode")
    if mode is not None:
        import torch._inductor

        modes = ["default", *torch._inductor.list_mode_options()]
        if mode not in modes:
            raise InputError(
                f"torch has no such mode{did_you_mean(mode, modes)}",
                key="torch_compile_mode",
                value=mode,
                fix=f"one of {', '.join(modes)}",
            )
    for key in _MAPPINGS:
        _check_mapping(key, config.arguments.get(key))
    _check_schedule(config.arguments)
    words = config.arguments.get("optim_args")
    if words is not None and not all(part.partition("=")[1] for part in words.replace(" ", "").split(",")):
        raise InputError(
            "is no list of key=value", key="optim_args", value=words, fix="optim_args: key=value,key=value"
        )
    labels = config.arguments.get("label_names")
    if labels is not None and labels != ["labels"]:
        raise InputError("the tasks name their labels", key="label_names", value=labels, fix="leave label_names out")


_MAPPINGS = ("accelerator_config", "fsdp_config", "deepspeed", "activation_checkpointing_kwargs", "lr_scheduler_kwargs")


def _check_mapping(key: str, value: Any) -> None:
    """A text in place of a mapping is the path of a JSON file, or JSON itself."""
    if not isinstance(value, str):
        return
    text = value
    if not value.lstrip().startswith("{"):
        path = Path(value).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError("is neither JSON nor a file", key=key, value=value, fix="a mapping") from error
    try:
        mapping = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not valid JSON ({error})", key=key, value=value, fix="a mapping") from error
    if not mapping:
        raise InputError("holds no mapping", key=key, value=value, fix="a mapping")


def _check_schedule(arguments: dict[str, Any]) -> None:
    """The settings of a schedule are handed to its function, which knows some names only."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
    from transformers.trainer_utils import SchedulerType

    settings = arguments.get("lr_scheduler_kwargs") or {}
    settings = json.loads(settings) if isinstance(settings, str) and settings.lstrip().startswith("{") else settings
    if not isinstance(settings, dict):
        raise InputError("holds no mapping", key="lr_scheduler_kwargs", value=settings, fix="a mapping")
    name = arguments.get("lr_scheduler_type", "linear")
    parameters = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [key for key in parameters if key not in ("optimizer", "num_warmup_steps", "num_training_steps")]
    unknown = next((key for key in settings if key not in known), None)
    if unknown is not None:
        raise InputError(
            f"the schedule '{name}' has no such setting{did_you_mean(unknown, known)}",
            key=f"lr_scheduler_kwargs.{unknown}",
            value=settings[unknown],
            fix=f"its settings are: {', '.join(known) or 'none'}",
        )


def _check_trackers(names: Any) -> None:
    from transformers.integrations import get_reporting_integration_callbacks

    listed = [names] if isinstance(names, str) else names or []
    try:
        get_reporting_integration_callbacks([name for name in listed if name not in ("all", "none")])
    except ValueError as error:
        raise InputError("transformers knows no such tracker", key="report_to", value=names, fix=str(error)) from error


def check_together(config: RunConfig) -> None:
    """Keys that exclude or need each other. Reads `model_config` where it names a file.

    Raises:
        InputError: Two keys say the same thing, or one that is needed is missing.
    """
    _exclusive("model_name_or_path", config.model_name_or_path, "model_config", config.model_config)
    sources = {
        "train_file": config.data.train_file,
        "dataset_name": config.data.dataset_name,
        "embedded_corpus": config.embedded_corpus,
    }
    for (key, value), (other, other_value) in itertools.combinations(sources.items(), 2):
        _exclusive(key, value, other, other_value)
    if config.model_name_or_path is None and config.model_config is None:
        raise InputError(
            "nothing says which model to train",
            key="model_name_or_path",
            fix="a local folder or a hub id; or model_config, to train from scratch",
        )
    if not any(sources.values()):
        raise InputError(
            "nothing says what to train on", key="train_file", fix="a file, a folder of images, or dataset_name"
        )
    if isinstance(config.model_config, str):
        config.model_config = _read_model_config(config.model_config)
    if config.model_config is not None and not isinstance(config.model_config.get("model_type"), str):
        raise InputError(
            "does not name the kind of model",
            key="model_config",
            value=config.model_config,
            fix="add model_type, for example llama",
        )
    if config.resume is not False and config.output_dir is None:
        raise InputError(
            "the folder of the run to go on with is missing",
            key="resume",
            value=config.resume,
            fix="set output_dir too",
        )
    if config.resume is not False and config.overwrite:
        raise InputError(
            "excludes overwrite: a run is either continued or replaced",
            key="resume",
            value=config.resume,
            fix="keep one",
        )


def check_twice(config: RunConfig, recipe: Recipe) -> None:
    """Refuses a slot that a method and a `TrainingArguments` field both fill.

    What the methods set through arguments of other names is compared when they configure the arguments.

    Raises:
        InputError: Naming both.
    """
    from thrifty.config.schema import all_keys

    for slot, arguments in _SLOT_ARGUMENTS.items():
        owner = recipe.owner(slot)
        for argument in arguments:
            value = config.arguments.get(argument)
            if owner is not None and value not in (None, all_keys()[argument].default):
                raise InputError(
                    f"the {slot} is set twice: by `{argument}` and by the method '{owner.name}'",
                    key=argument,
                    value=value,
                    fix=f"remove `{argument}`, or the method '{owner.name}'",
                )


def _exclusive(key: str, value: Any, other: str, other_value: Any) -> None:
    if value is not None and other_value is not None:
        raise InputError(f"excludes `{other}`, which is set too", key=key, value=value, fix=f"keep {key} or {other}")


def _read_model_config(path: str) -> dict[str, Any]:
    if not Path(path).expanduser().is_file():
        raise InputError(
            "there is no such file", key="model_config", value=path, fix="the path of a config.json, or a mapping"
        )
    return yaml_text.read_mapping(Path(path).expanduser())
