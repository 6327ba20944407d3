"""What can be found out before the first step, from real batches of the run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from thrifty.safety import startup
from thrifty.safety.iterable import is_map_style
from thrifty.safety.normalise import ignores_num_items
from thrifty.safety.trial import longest_indices

if TYPE_CHECKING:
    from thrifty.safety.checkpointing import SafeCheckpoints
    from thrifty.safety.running import SafeRunning

BATCHES = 4  # looked at by the checks; they cost a collation each
SURE = 1e-6  # probability of a batch without one of the longest samples, below which every batch is as long as any
SECONDS = 2.0  # after which lengths are no longer read one by one: the longest seen so far have to do


def check_start(trainer: SafeRunning) -> None:
    """Runs the start-up checks on a few real batches; notices are said, errors refuse.

    Raises:
        InputError: Training would silently do something else than asked.
    """
    batches = [batch for batch in first_batches(trainer) if "labels" in batch]
    model: Any = trainer.model
    args: Any = trainer.args
    findings = startup.tied_weights(model) + startup.reentrant(model)
    scaled_on_cpu = args.device.type == "cpu" and trainer.accelerator.scaler is not None
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    findings += startup.precision(
        model,
        fp16=bool(args.fp16) and not scaled_on_cpu,
        bf16=bool(args.bf16),
        device=args.device,
        compensated=bool(getattr(optimizer, "kahan", False) or getattr(optimizer, "keeps_low_bits", False)),
    )
    tokens = batches and "input_ids" in batches[0] and batches[0]["labels"].dim() > 1
    if tokens:
        findings += startup.trainable_tokens(batches, causal=trainer._loss_shifts_labels)
        tokenizer = trainer.processing_class
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            findings += startup.end_token(tokenizer, batches) + startup.special_tokens(tokenizer, batches)
    if batches:
        findings += startup.label_range(model, batches)
    startup.settle(findings, trainer.say)


def must_normalise(trainer: SafeRunning) -> bool:
    """Does the model ignore the number of targets of a step, so that the trainer has to divide the loss itself?"""
    own = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    if own or not trainer.model_accepts_loss_kwargs:
        return False
    batches = first_batches(trainer, count=1)
    if not batches or "labels" not in batches[0]:
        return False
    inputs = trainer._prepare_inputs({k: v for k, v in batches[0].items() if k != "sample_id"})
    with trainer.compute_loss_context_manager():
        ignores = ignores_num_items(trainer.model_wrapped, inputs)
    several = trainer.args.gradient_accumulation_steps * trainer.args.world_size > 1
    if ignores and several:
        trainer.say(
            f"{type(trainer.model).__name__} does not divide its loss by the number of targets in the step: "
            "it is done here, so that accumulation and several processes give the mean over all of them"
        )
    return ignores


def first_batches(trainer: SafeRunning, count: int = BATCHES) -> list[Any]:
    """A few collated batches from the start of the data; the position and the random state of the run are untouched."""
    from thrifty.safety.oom import rng_snapshot

    dataset: Any = trainer.train_dataset
    if not is_map_style(dataset) or len(dataset) == 0:
        return []
    size = trainer.args.per_device_train_batch_size
    groups = [range(i, min(i + size, len(dataset))) for i in range(0, min(count * size, len(dataset)), size)]
    restore = rng_snapshot()
    try:
        return [collate(trainer, [dataset[i] for i in group]) for group in groups]
    finally:
        restore()


def longest_batch(trainer: SafeCheckpoints) -> Any:
    """The collated batch of the longest samples; None where lengths are not known, or any batch is as long."""
    from thrifty.safety.oom import rng_snapshot

    lengths = sample_lengths(trainer.train_dataset)
    if not lengths:
        return None
    size = trainer.args.per_device_train_batch_size
    others = 1 - lengths.count(max(lengths)) / len(lengths)
    if others**size < SURE and _first_step_is_a_trial(trainer):
        return None
    dataset: Any = trainer.train_dataset
    chosen = longest_indices(lengths, size)
    restore = rng_snapshot()
    try:
        batch = collate(trainer, [dataset[i] for i in chosen])
    finally:
        restore()
    batch.pop("sample_id", None)
    return trainer._prepare_inputs(batch)


def _first_step_is_a_trial(trainer: SafeCheckpoints) -> bool:
    """Are the batches what the data says, and can a step that fails be run again?"""
    recipe: Any = getattr(trainer, "recipe", None)
    shaped = recipe is not None and any(recipe.using(hook) for hook in ("draw", "shape_batch"))
    return trainer.args.world_size == 1 and not shaped


def collate(trainer: SafeCheckpoints, rows: list[Any]) -> Any:
    """Collates samples as the training loader does, unused columns removed."""
    collator: Any = trainer._get_collator_with_removed_columns(trainer.data_collator)
    if trainer.args.remove_unused_columns and hasattr(trainer.train_dataset, "column_names"):
        trainer._set_signature_columns_if_needed()
        kept: Any = trainer._signature_columns
        rows = [{k: v for k, v in row.items() if k in kept} for row in rows]
    return collator(rows)


def sample_lengths(dataset: Any) -> list[int]:
    """Tokens of each sample, or of the first ones where reading takes long; empty where samples have no tokens."""
    if not is_map_style(dataset):
        return []
    if hasattr(dataset, "lengths"):
        return list(dataset.lengths)
    count = len(dataset)
    if count == 0:
        return []
    if hasattr(dataset, "column_names"):
        if "input_ids" not in dataset.column_names:
            return []
        import pyarrow.compute

        column = dataset.with_format("arrow")[:]["input_ids"]
        return pyarrow.compute.list_value_length(column).to_pylist()  # pyright: ignore[reportAttributeAccessIssue]
    first = dataset[0]
    if not isinstance(first, dict) or "input_ids" not in first:
        return []
    lengths: list[int] = []
    end = time.monotonic() + SECONDS
    for index in range(count):
        lengths.append(len(dataset[index]["input_ids"]))
        if index % 256 == 255 and time.monotonic() > end:
            break
    return lengths
