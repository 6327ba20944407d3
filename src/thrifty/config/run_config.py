"""`RunConfig`: a run file that has been read, checked and sorted into model, data, methods and training arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.config import yaml_text
from thrifty.config.checks import check_choices, check_together, check_twice
from thrifty.config.keys import SLOTS, RunKeys
from thrifty.config.overrides import apply_overrides
from thrifty.config.retired import check_retired
from thrifty.data.options import DataOptions
from thrifty.errors import InputError, did_you_mean
from thrifty.hardware.precision import AUTO, check_auto
from thrifty.safety.options import Guards

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from transformers import TrainingArguments

DEFAULTS: Mapping[str, Any] = {"logging_steps": 10, "disable_tqdm": True}
"""Where thrifty's default differs from that of `TrainingArguments`: 500 steps between two logs is longer than
many a run, and the progress bar is thrifty's own."""


@dataclass(kw_only=True)
class RunConfig(RunKeys):
    """Everything that decides a run. Built by `load_config` or `parse_config`.

    The shorthands (`optimizer`, `attention`, `precision`) have been moved into `methods`, a `config.json` has been read
    into `model_config`, and paths of local files are absolute.
    """

    data: DataOptions = field(default_factory=DataOptions)
    """Where the data is and how to read it."""
    guards: Guards = field(default_factory=Guards)
    """Which guards watch the run."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The `TrainingArguments` fields that the file sets, as written."""
    name: str = "run"
    """What the run is called where `output_dir` is chosen for it."""

    def training_arguments(self, output_dir: str | Path, **changes: Any) -> TrainingArguments:
        """Builds the `TrainingArguments`, before the methods set theirs.

        Raises:
            InputError: transformers refuses a value, or a combination of values.
        """
        from transformers import TrainingArguments

        values = {**DEFAULTS, **self.arguments, **changes}
        if isinstance(values.get("parallelism_config"), dict):
            from accelerate.parallelism_config import ParallelismConfig

            try:
                values["parallelism_config"] = ParallelismConfig(**values["parallelism_config"])
            except (TypeError, ValueError) as error:
                value = values["parallelism_config"]
                raise InputError(str(error), key="parallelism_config", value=value, fix="see accelerate") from error
        try:
            args = TrainingArguments(output_dir=str(output_dir), seed=self.data.seed, **values)
        except (ValueError, TypeError, KeyError, OSError, ImportError, NotImplementedError) as error:
            text = " ".join(str(error).split())
            named = [key for key in values if key in text]
            key = named[0] if named else None
            raise InputError(text, key=key, value=values.get(key) if key else None) from error
        if "dataloader_pin_memory" not in values and args.device.type not in ("cuda", "xpu"):
            args.dataloader_pin_memory = False  # only these can use it, and torch warns at every loader elsewhere
        return args

    def to_dict(self, args: TrainingArguments | None = None) -> dict[str, Any]:
        """The flat form that `parse_config` reads back to an equal configuration.

        Args:
            args: Adds every plain `TrainingArguments` field of these arguments, so that nothing is left to defaults.
                Tokens for the hub are never part of it.
        """
        from thrifty.config.schema import all_keys

        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(RunKeys)}
        flat = {**own, **dataclasses.asdict(self.data), **dataclasses.asdict(self.guards), **self.arguments}
        if args is not None:
            for key in all_keys().values():
                value = getattr(args, key.name, None)
                value = getattr(value, "value", value)
                follows_machine = key.name == "dataloader_pin_memory"
                plain = isinstance(value, bool | int | float | str) and not follows_machine
                if key.owner == "training" and key.name not in flat and plain:
                    flat[key.name] = value
        return {key: flat[key] for key in all_keys() if flat.get(key) is not None and key != "hub_token"}


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run file, applies `key=value` overrides and checks everything that can be checked without the data.

    Args:
        path: A YAML or JSON file. None takes the embedded default (a small Llama on the King James text), or nothing
            where the overrides name a model or a task of their own.
        overrides: Texts of the form `key=value`.

    Raises:
        InputError: With the key, its value and the fix.
    """
    if path is not None:
        values, name = yaml_text.read_mapping(path), Path(path).stem
    else:
        values, name = _base_for(overrides), "demo"
    return parse_config(apply_overrides(values, overrides), name=name)


def parse_config(values: Mapping[str, Any], *, name: str = "run") -> RunConfig:
    """Checks the content of a run file: names, types, limits, values that are gone, and what excludes each other.

    Raises:
        InputError: With the key, its value and the fix.
    """
    from thrifty.config.schema import RENAMED_INSIDE, all_keys, run_file_model

    keys = all_keys()
    check_retired(values, keys)
    unknown = next((key for key in values if key not in keys), None)
    if unknown is not None:
        raise InputError(
            f"there is no such key{did_you_mean(unknown, keys)}",
            key=unknown,
            value=values[unknown],
            fix="`thrifty config-schema` lists all keys",
        )
    from pydantic import ValidationError

    try:
        checked = run_file_model().model_validate(dict(values))
    except ValidationError as error:
        raise _as_input_error(error.errors(), values) from None

    def part(owner: str) -> dict[str, Any]:
        names = [key.name for key in keys.values() if key.owner == owner and key.name in values]
        return {n: getattr(checked, RENAMED_INSIDE.get(n, n)) if owner != "training" else values[n] for n in names}

    config = RunConfig(
        **part("run"),
        data=DataOptions(**part("data")),
        guards=Guards(**part("guards")),
        arguments=part("training"),
        name=name,
    )
    check_choices(config)
    check_together(config)
    _fold_shorthands(config)
    _check_methods(config)
    _make_absolute(config)
    return config


def default_text() -> str:
    """The embedded default run file, as text."""
    return resources.files("thrifty.config").joinpath("default.yaml").read_text(encoding="utf-8")


def _base_for(overrides: Iterable[str]) -> dict[str, Any]:
    """The embedded default, as far as the overrides leave it standing.

    Its learning rate is made for a small model from scratch and would ruin a pre-trained one, so that a run that names
    its own model or task starts from nothing.
    """
    named = {override.partition("=")[0].strip() for override in overrides}
    if named & {"model_name_or_path", "task"}:
        return {}
    values = yaml_text.parse(default_text(), "the embedded default")
    if named & {"train_file", "dataset_name"}:
        del values["embedded_corpus"]
        values.pop("sample_prompt", None)
    return values


def _as_input_error(errors: Sequence[ErrorDetails], values: Mapping[str, Any]) -> InputError:
    """One pydantic error as a sentence that names key, value and fix."""
    from thrifty.config.annotations import describe
    from thrifty.config.schema import LIMITS, all_keys

    key = all_keys()[str(errors[0]["loc"][0])]
    value = values[key.name]
    accepted = describe(key.annotation, LIMITS.get(key.name))
    near = did_you_mean(value, accepted.removeprefix("one of ").split(", ")) if isinstance(value, str) else ""
    example = yaml_text.dump({key.name: key.default}).strip() if key.default not in (None, [], {}) else None
    fix = f"for example `{example}`" if example else f"write {accepted}, or leave it out"
    return InputError(f"must be {accepted}{near}", key=key.name, value=value, fix=fix)


def _fold_shorthands(config: RunConfig) -> None:
    """Moves the shorthands into `methods`, each checked against the slot that it names."""
    from thrifty.method import registry
    from thrifty.recipe import Recipe

    for slot in SLOTS:
        value = getattr(config, slot)
        if value is None:
            continue
        if slot == "precision" and value == AUTO:  # known when the device is: `thrifty.run.training`
            check_auto(Recipe.parse(config.methods), config.arguments, config.dtype)
            continue
        if isinstance(value, dict) and len(value) != 1:
            raise InputError(
                "names no single method", key=slot, value=value, fix=f"{slot}: name, or {slot}: {{name: {{...}}}}"
            )
        name = value if isinstance(value, str) else next(iter(value))
        fitting = [other for other in registry.names() if slot in registry.get(other).spec.claims]
        if isinstance(value, str) and name not in fitting and slot in fitting:
            name, value = slot, {slot: {"implementation": value}}  # attention: flash
        if name not in fitting:
            raise InputError(
                f"no method of that name fills this slot{did_you_mean(name, fitting)}",
                key=slot,
                value=value,
                fix=f"one of {', '.join([*fitting, *([AUTO] if slot == 'precision' else [])])}"
                if fitting
                else f"leave {slot} out",
            )
        holder = Recipe.parse(config.methods).owner(slot)
        if holder is not None:
            raise InputError(
                f"the slot is set twice: by `{slot}: {name}` and by '{holder.name}' in methods",
                key=slot,
                value=value,
                fix="keep one",
            )
        folded: list[Any] = [*config.methods, value]
        config.methods = folded
        setattr(config, slot, None)


def _check_methods(config: RunConfig) -> None:
    from thrifty.recipe import Recipe

    recipe = Recipe.parse(config.methods)
    check_twice(config, recipe)
    for method in recipe:
        tasks = method.spec.tasks
        if tasks and config.task not in tasks:
            raise InputError(
                f"works on {', '.join(tasks)} only",
                key=f"methods.{method.name}",
                fix=f"remove it: the task is {config.task}",
            )


def _exists(key: str, value: str) -> bool:
    try:
        return Path(value).expanduser().exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, no such home
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"cannot be a path ({reason})", key=key, value=value, fix="a path or an id") from error


def _make_absolute(config: RunConfig) -> None:
    """Local paths become absolute, so that the resolved file works from any folder; hub ids stay."""
    for owner, names in (
        (config, ("model_name_or_path", "tokenizer_name_or_path")),
        (config.data, ("train_file", "validation_file")),
    ):
        for name in names:
            value = getattr(owner, name)
            if value is not None and _exists(key=name, value=value):
                setattr(owner, name, str(Path(value).expanduser().resolve()))
