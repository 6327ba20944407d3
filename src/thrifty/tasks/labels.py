"""Class labels: from names, numbers or declared classes to indices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError, did_you_mean
from thrifty.tasks.base import first_logits, forward_inputs

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PreTrainedConfig

    from thrifty.data.options import DataOptions


def class_names(dataset: Dataset, options: DataOptions, *, key: str = "train_file") -> list[str]:
    """Returns the classes by index: declared ones, the numbers 0 to the largest, or the names in order.

    Args:
        dataset: Has a column `label`.
        options: For messages.
        key: The configuration key that names the data.

    Raises:
        InputError: A label is missing, negative, a fraction or of a mixed kind, or there is only one class.
    """
    from datasets import ClassLabel

    feature = dataset.features["label"]
    if isinstance(feature, ClassLabel):
        return _several(list(feature.names), options, key)
    values: list[Any] = _distinct(dataset["label"])
    if all(isinstance(value, bool) for value in values):
        return ["false", "true"]
    if all(isinstance(value, int) for value in values):
        if min(values) < 0:
            raise _fault(dataset, options, key, min(values), "out of range (labels count from 0)")
        names = [str(index) for index in range(max(values) + 1)]
        if len(names) > 10 * len(values) + 100:
            raise _fault(dataset, options, key, max(values), f"out of range ({len(values)} classes occur)")
    elif all(isinstance(value, str) for value in values):
        names = sorted(values, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))
    else:
        wrong = next(
            value for value in values if not isinstance(value, type(values[0])) or not isinstance(value, (int, str))
        )
        raise _fault(dataset, options, key, wrong, "neither a name nor a whole number")
    return _several(names, options, key)


def _distinct(values: Any) -> list[Any]:
    try:
        return list(dict.fromkeys(values))
    except TypeError:  # a list or mapping, which is no label: `class_names` names it
        return list(values)


def _several(names: list[str], options: DataOptions, key: str) -> list[str]:
    if len(names) < 2:
        raise InputError(
            f"there is only one class, {names[0]!r}", key=key, value=getattr(options, key, None), fix="give two or more"
        )
    return names


def settle_names(
    train: Dataset, config: PreTrainedConfig | None, options: DataOptions, *, key: str
) -> tuple[list[str], str]:
    """Returns the classes, in the order of a head that was trained before where there is one, and a line for the log.

    Raises:
        InputError: See `class_names`.
    """
    names = class_names(train, options, key=key)
    known = names_of(config)
    if known and set(names) <= set(known):
        names = known
    return names, f"{len(names)} classes: {', '.join(names[:10])}{' ...' if len(names) > 10 else ''}"


def class_losses(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Returns the cross-entropy of each sample of a batch with class `labels`, shape (B,)."""
    from torch.nn import functional

    logits = first_logits(model(**forward_inputs(inputs)).logits)
    return functional.cross_entropy(logits.float(), inputs["labels"].to(logits.device), reduction="none")


def names_of(config: PreTrainedConfig | None) -> list[str] | None:
    """Returns the classes a configuration names, or None where it has only the defaults `LABEL_0`, ..."""
    mapping = getattr(config, "id2label", None)
    if not mapping:
        return None
    names = [str(mapping[index]) for index in sorted(mapping)]
    return None if all(name == f"LABEL_{index}" for index, name in enumerate(names)) else names


def label_indices(dataset: Dataset, names: list[str], options: DataOptions, *, key: str = "train_file") -> list[int]:
    """Returns the label of each record as an index into `names`.

    Raises:
        InputError: A label is missing, unknown or out of range.
    """
    from datasets import ClassLabel

    feature = dataset.features["label"]
    declared = feature.names if isinstance(feature, ClassLabel) else None
    index_of = {name: index for index, name in enumerate(names)}
    indices: list[int] = []
    for number, value in enumerate(dataset["label"], start=1):
        if declared is not None and isinstance(value, int) and 0 <= value < len(declared):
            value = declared[value]
        if isinstance(value, bool):
            value = int(value)
        index = index_of.get(value, -1) if isinstance(value, str) else value
        if not isinstance(index, int) or not 0 <= index < len(names):
            hint = did_you_mean(value, names) if isinstance(value, str) else ""
            raise InputError(
                f"record {number}: label {value!r} is out of range{hint}",
                key=key,
                value=getattr(options, key, None),
                fix=f"labels are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''} (0 to {len(names) - 1})",
            )
        indices.append(index)
    return indices


def require_label(dataset: Dataset, options: DataOptions, needed: str, key: str) -> Dataset:
    """Returns the data with its label under the name `label`, and checks for the column `needed`.

    Raises:
        InputError: One of the two is not there.
    """
    if "label" not in dataset.column_names and "labels" in dataset.column_names:
        dataset = dataset.rename_column("labels", "label")
    for column, option in (
        (needed, "text_column" if needed == "text" else "column_mapping"),
        ("label", "label_column"),
    ):
        if column not in dataset.column_names:
            names = dataset.column_names
            near = did_you_mean(column, names)
            fix = (
                f"{option}: one of {', '.join(names)}"
                if option != "column_mapping"
                else f"{option}: {{NAME: {column}}}"
            )
            raise InputError(
                f"the data has no column {column!r}{near}", key=key, value=getattr(options, key, None), fix=fix
            )
    return dataset


def adapt_labels(config: PreTrainedConfig, names: list[str], *, from_scratch: bool) -> bool:
    """Writes the classes into `config`. Returns whether a loaded head has another number of classes and must be drawn
    anew."""
    before = config.num_labels
    config.num_labels = len(names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    return not from_scratch and before != len(names)


def _fault(dataset: Dataset, options: DataOptions, key: str, value: Any, what: str) -> InputError:
    number = next((n for n, found in enumerate(dataset["label"], start=1) if found == value or found is value), 0)
    return InputError(
        f"record {number}: label {value!r} is {what}",
        key=key,
        value=getattr(options, key, None),
        fix="give every record a class name or a whole number from 0 on",
    )
