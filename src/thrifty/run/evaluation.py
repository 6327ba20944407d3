"""The verb `evaluate`: the metrics of a model on validation data. Writes nothing but to a temporary folder."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thrifty import tasks
from thrifty.config import parse_config, yaml_text
from thrifty.config.overrides import apply_overrides
from thrifty.errors import InputError
from thrifty.run.loading import base_of, with_adapter
from thrifty.trainer import Trainer

_FROM_SCRATCH = ("model_config", "vocab_size", "methods", "optimizer", "attention", "precision")
_OF_THE_RUN = ("output_dir", "overwrite", "resume")
_BATCH = 32
"""Samples at a time where nobody says: nothing is kept for a backward pass. What does not fit is divided."""


def evaluate(name: str, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Evaluates a model on the validation data of its run, or on data that the overrides name.

    Args:
        name: The folder of a run (its `run.yaml` says task and data), or any model folder or hub id.
        overrides: Texts of the form `key=value`.

    Returns:
        `eval_loss` and the task's metrics (`eval_perplexity`, `eval_bits_per_byte`, `eval_accuracy`, ...).

    Raises:
        InputError: The model, the data or a key is at fault.
    """
    run_file = Path(name).expanduser() / "run.yaml"
    values = yaml_text.read_mapping(run_file) if run_file.is_file() else {}
    values = {key: value for key, value in values.items() if key not in (*_FROM_SCRATCH, *_OF_THE_RUN)}
    values |= {"model_name_or_path": base_of(name)}
    if any((Path(name) / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        values["tokenizer_name_or_path"] = name
    values.setdefault("per_device_eval_batch_size", _BATCH)
    config = parse_config(apply_overrides(values, overrides), name="evaluate")
    loaded = tasks.load(
        config.task,
        config.data,
        model_name_or_path=config.model_name_or_path,
        tokenizer_name_or_path=config.tokenizer_name_or_path,
        seed=config.data.seed,
        trust_remote_code=config.trust_remote_code,
        attn_implementation=config.attn_implementation,
        dtype=config.dtype,
    )
    data = loaded.data
    if data.eval_dataset is None:
        raise InputError(
            "there is no validation data", key="validation_file", fix="name a file, or validation_fraction=0.1"
        )
    with tempfile.TemporaryDirectory(prefix="thrifty-evaluate-") as scratch:
        args = config.training_arguments(scratch, report_to="none", eval_strategy="no", save_strategy="no")
        trainer = Trainer(
            model=with_adapter(loaded.model, name),
            args=args,
            data_collator=data.data_collator,
            eval_dataset=data.eval_dataset,
            processing_class=loaded.processor,
            compute_metrics=data.compute_metrics,
            preprocess_logits_for_metrics=data.preprocess_logits_for_metrics,
            task=loaded.task,
        )
        silence(trainer)
        return dict(trainer.evaluate())


def silence(trainer: Trainer) -> None:
    """Takes transformers' own printing and its bar away; ours say the same."""
    from transformers import PrinterCallback
    from transformers import ProgressCallback as TransformersProgress

    for callback in (PrinterCallback, TransformersProgress):
        trainer.remove_callback(callback)


def metric_lines(metrics: Mapping[str, Any]) -> list[str]:
    """The metrics for people, without those about speed, and without `nll`, which is the loss but for rounding."""
    from thrifty.report import text

    hidden = ("_runtime", "_per_second", "_preparation_time", "_nll")
    names = [name for name in metrics if name.startswith("eval_") and not name.endswith(hidden)]
    labels = {name: name.removeprefix("eval_").replace("_", " ") for name in names}
    labels["eval_loss"] = "validation loss"
    width = max((len(label) for label in labels.values()), default=0)
    return [f"{labels[name]:<{width}}  {text.measured(metrics[name])}" for name in names]
