"""Every private part of transformers and accelerate that the trainer needs, in one place.

`tests/test_canary.py` checks each of them and names the release that moved it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
import transformers.trainer as trainer_module
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, extract_model_from_parallel
from torch import nn
from transformers import TrainingArguments

# Methods of transformers.Trainer that thrifty overrides or calls although their names start with an underscore.
PRIVATE_TRAINER_METHODS = {
    "_run_epoch": (
        "model",
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "num_update_steps_per_epoch",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    ),
    "_inner_training_loop": ("resume_from_checkpoint",),
    "_init_training_state": ("max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint"),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_maybe_log_save_evaluate": ("tr_loss", "grad_norm"),
    "_save_checkpoint": ("model", "trial"),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_best_model": (),
    "_load_rng_state": ("checkpoint",),
    "_save": ("output_dir", "state_dict"),
    "_set_signature_columns_if_needed": (),
    "_get_output_dir": ("trial",),
    "_wrap_model": ("model",),
    "_clip_grad_norm": ("model",),
    "_get_grad_norm": ("model", "grad_norm"),
}


def default_argument(cls: type[TrainingArguments], key: str) -> Any:
    """The declared default of a field. (Making a `TrainingArguments` to look would reset accelerate's global state.)"""
    field = next(f for f in dataclasses.fields(cls) if f.name == key)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def replace_arguments(args: TrainingArguments, changes: Mapping[str, Any]) -> TrainingArguments:
    """A copy of `args` with other fields. Goes through `__post_init__`, which derives the precision and the devices."""
    n_gpu = args._n_gpu
    copy = dataclasses.replace(args, **changes)
    copy._n_gpu = n_gpu
    return copy


def checkpointing_arguments(enabled: bool, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The `TrainingArguments` fields that switch checkpointing on: renamed in transformers 5.18."""
    known = {f.name for f in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    return {name: enabled, f"{name}_kwargs": kwargs}


def enable_checkpointing(model: Any, kwargs: dict[str, Any]) -> None:
    """Switches checkpointing on under the name that this release of transformers has for it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def copy_checkpointing(old: Any, new: Any, args: TrainingArguments) -> None:
    """Switches checkpointing on in a model that takes the place of one that has it."""
    name = "is_activation_checkpointing" if hasattr(old, "is_activation_checkpointing") else "is_gradient_checkpointing"
    if getattr(old, name, False):
        names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
        given: list[Any] = [getattr(args, name, None) for name in names]
        enable_checkpointing(new, next((kwargs for kwargs in given if kwargs), {"use_reentrant": False}))


def unwrap(model: nn.Module) -> nn.Module:
    """The bare model with its own `forward`, without DDP and without accelerate's autocast wrapper."""
    bare = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    # With this mark left on it, accelerate would not prepare the model again, and autocast would be gone for good.
    vars(bare).pop("_is_accelerate_prepared", None)
    return bare


def unwrap_container(model: nn.Module) -> nn.Module:
    """The model inside DDP or a compiled module; its `forward` keeps accelerate's autocast."""
    return extract_model_from_parallel(model, keep_fp32_wrapper=True)


def stays_in_fp32(model: Any, name: str, *, strict: bool) -> bool:
    """Whether the model asks that a module or parameter of this name is not made smaller; `strict`: by bf16 neither."""
    asked = getattr(model, "_keep_in_fp32_modules_strict" if strict else "_keep_in_fp32_modules", None) or ()
    return any(f".{part}." in f".{name}." for part in asked)


def forget_prepared(accelerator: Accelerator) -> None:
    """Makes accelerate forget prepared models and optimizers, but not the loaders, before others are prepared."""
    accelerator._models.clear()
    accelerator._optimizers.clear()
    accelerator._schedulers.clear()


def skip_update(accelerator: Accelerator, optimizer: Any) -> None:
    """Ends a step without an update: under fp16 the scaler has to be told, or the next step fails."""
    scaler = accelerator.scaler
    if scaler is None:
        return
    inner = optimizer.optimizer
    if scaler._per_optimizer_states[id(inner)]["stage"].name == "READY":
        scaler.unscale_(inner)
    scaler.update()


class ShortStep(AcceleratedOptimizer):
    """accelerate's optimizer, whose `step` does not look for an optional package on the disk each time."""

    def step(self, closure: Any = None) -> None:
        if self.gradient_state.sync_gradients:
            self.optimizer.step(closure)


def shorten_step(optimizer: Any) -> None:
    """Takes the detours out of the step of a prepared optimizer where none of them can apply."""
    if type(optimizer) is not AcceleratedOptimizer or optimizer.scaler is not None:
        return
    special = type(optimizer.optimizer).__module__.startswith("lomo")
    if not special and optimizer.accelerator_state.distributed_type != DistributedType.XLA:
        optimizer.__class__ = ShortStep


def enable_cpu_fp16(accelerator: Accelerator) -> None:
    """accelerate ignores fp16 on a CPU without a word. Give it autocast and a scaler there too."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu")


@contextlib.contextmanager
def live_names(model: Any) -> Iterator[None]:
    """Inside, `save_pretrained` writes the names that the model's own `state_dict` has.

    For some families (ViT) transformers saves under the names of earlier releases. Its trainer then loads a checkpoint
    without renaming anything, finds none of the blocks' weights, warns, and goes on with those it has.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        yield
        return
    saving: Any = functools.partial(model.save_pretrained, save_original_format=False)
    model.save_pretrained = saving
    try:
        yield
    finally:
        del model.save_pretrained


def keep_stream_position() -> None:
    """Lets our own loaders keep their position: the parent would rebuild them to skip batches."""
    original = trainer_module.skip_first_batches
    if getattr(original, "_thrifty", False):
        return

    @functools.wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if getattr(dataloader, "keeps_position", False):
            return dataloader
        return original(dataloader, num_batches)

    skip_first_batches._thrifty = True  # type: ignore[attr-defined]
    trainer_module.skip_first_batches = skip_first_batches


def random_state_globals() -> Any:
    """A context in which `torch.load` takes what the trainer's `rng_state.pth` holds: arrays of numpy."""
    from transformers.trainer_pt_utils import safe_globals

    return safe_globals()


def has_shuffle_buffer(dataset: Any) -> bool:
    """Does a streamed data set of `datasets` shuffle through a buffer, whose content its state leaves out?"""
    pending = [getattr(dataset, "_ex_iterable", None)]
    while pending:
        part = pending.pop()
        if part is None:
            continue
        if "BufferShuffled" in type(part).__name__:
            return True
        pending += [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
    return False


def write_line(line: str) -> None:
    """Prints a line without tearing a progress bar apart."""
    from tqdm import tqdm

    tqdm.write(line)


def release() -> str:
    """The versions that a canary names."""
    import accelerate

    return f"transformers {transformers.__version__}, accelerate {accelerate.__version__}, torch {torch.__version__}"
