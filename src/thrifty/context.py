"""`Context`: what every hook of a method is given."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from thrifty.errors import InputError
from thrifty.method import Batch, TrainingData

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments

    from thrifty.trainer import Trainer


class Context:
    """The run as a method may see it.

    Args:
        args: The training arguments, after `configure`.
        task: The task (`thrifty.tasks`), or None where the caller did not say.
        processing_class: Tokenizer or image processor.
        planning: True in a dry run, where data does not exist.
        trainer: The trainer; None in a dry run and in somebody's own loop.
        total_steps: The length of the run in optimizer steps, where it is known otherwise.
        device_kind: In a dry run, the kind of the device that is planned for.
        model_config: In a dry run, the configuration of the full model, of which hooks see a shallower one.
    """

    def __init__(
        self,
        *,
        args: TrainingArguments,
        task: Any = None,
        processing_class: Any = None,
        planning: bool = False,
        trainer: Trainer | None = None,
        data: TrainingData | None = None,
        total_steps: int | None = None,
        device_kind: str | None = None,
        model_config: Any = None,
    ) -> None:
        self.args = args
        self.task = task
        self.processing_class = processing_class
        self.planning = planning
        self.model_config = model_config
        self._device_kind = device_kind
        self.trainer = trainer
        self.data = data
        self.update_bytes: Callable[[torch.Tensor], int] | None = None
        """In a dry run: the bytes that the update of one parameter, alone, takes for a moment."""
        self.regions: dict[Any, Any] = {}
        """In a dry run: graphs of compiled blocks, shared by all that differ in nothing else."""
        self.loss_only = False
        """Whether the forward pass at hand is one of an evaluation that wants nothing but the loss."""
        self._total_steps = total_steps
        self._step = 0
        self._model: nn.Module | None = None

    # --- where the run stands ---

    @property
    def step(self) -> int:
        """Optimizer steps done so far."""
        return self.trainer.state.global_step if self.trainer is not None else self._step

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self._total_steps is not None:
            return self._total_steps
        if self.args.max_steps > 0:
            return self.args.max_steps
        if self.data is None:
            raise InputError("the length of the run is not known", key="max_steps", value=self.args.max_steps)
        micro_batches = math.ceil(len(self.data.train_dataset) / (self.args.train_batch_size * self.world_size))
        steps = math.ceil(micro_batches / self.args.gradient_accumulation_steps)
        return math.ceil(steps * self.args.num_train_epochs)

    @property
    def rank(self) -> int:
        return self.args.process_index

    @property
    def world_size(self) -> int:
        return self.args.world_size

    @property
    def device(self) -> torch.device:
        return self.args.device

    @property
    def device_kind(self) -> str:
        """`cuda`, `cpu`, ...: in a dry run that of the device planned for, which `device` is not."""
        return self._device_kind or self.device.type

    @property
    def cache(self) -> Path:
        """A folder on disk for results that another run may use again, keyed by content hash."""
        root = os.environ.get("THRIFTY_CACHE") or Path.home() / ".cache" / "thrifty"
        return Path(root)

    def cache_path(self, *content: Any) -> Path:
        """A path in the cache for this content (JSON-able values)."""
        digest = hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
        return self.cache / digest[:2] / digest

    def rng(self, name: str, *, step: int | None = None) -> torch.Generator:
        """A CPU generator that depends on the seed, the name and the step only: equal on all ranks and after resume."""
        text = f"{self.args.seed}/{name}/{'' if step is None else step}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        return torch.Generator().manual_seed(seed)

    # --- data ---

    def batches(self, count: int, model: nn.Module) -> list[Batch]:
        """`count` real collated training batches on the device. The position of the run is untouched."""
        from thrifty.safety.iterable import is_map_style

        if self.data is None:
            raise InputError("there is no data in a dry run; the method needs a `dry_run_form`", key="planning")
        dataset = self.data.train_dataset
        if not is_map_style(dataset):
            raise InputError(
                "a method looks at batches before training, which an iterable data set does not offer",
                key="train_dataset",
                fix="use a map-style data set (datasets.Dataset), or remove the method",
            )
        order = torch.randperm(len(dataset), generator=self.rng("batches")).tolist()
        size = self.args.train_batch_size
        chosen = [order[i * size : (i + 1) * size] for i in range(count)]
        features = [[self.only_inputs(dataset[index], model) for index in rows] for rows in chosen if rows]
        return [self.to_device(self.data.data_collator(rows)) for rows in features]

    def only_inputs(self, sample: Mapping[str, Any], model: nn.Module) -> Batch:
        """Keeps the columns that the model's `forward` accepts, and the labels."""
        unwrap: Any = getattr(model, "get_base_model", lambda: model)  # a peft model's own forward takes anything
        accepted = {*inspect.signature(unwrap().forward).parameters, "label", "label_ids", "labels"}
        return {key: value for key, value in sample.items() if key in accepted}

    def to_device(self, batch: Any) -> Any:
        """Moves tensors in nested mappings and lists to the device of the run."""
        if isinstance(batch, torch.Tensor):
            return batch.to(self.device)
        if isinstance(batch, Mapping):
            return {key: self.to_device(value) for key, value in batch.items()}
        if isinstance(batch, list | tuple):
            return type(batch)(self.to_device(value) for value in batch)
        return batch

    def per_sample_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of each sample: shape (batch,), without gradient. Raises `InputError` without a task."""
        if self.task is None:
            from thrifty import tasks

            self.task = tasks.infer(model)
        return self.task.per_sample_loss(model, batch)

    # --- what a method may ask of the trainer ---

    def replace_model(self, new: nn.Module, parameter_map: Mapping[str, str | None]) -> None:
        """See `Trainer.replace_model`."""
        if self.trainer is None:
            raise RuntimeError("replace_model needs a trainer")
        self.trainer.replace_model(new, parameter_map)

    def skip_update(self) -> None:
        """Ends a step without updating the weights. Call it in place of `update` from `wrap_update`."""
        if self.trainer is not None:
            self.trainer.skip_update()

    @property
    def model(self) -> nn.Module | None:
        """The model without DDP around it; while data is prepared, the model that was given."""
        return getattr(self.trainer, "model", self._model)

    def set_model(self, model: nn.Module) -> None:
        """Says which model there is before the trainer has one."""
        self._model = model

    @property
    def syncing(self) -> bool:
        """Is the current micro-batch the last one of its optimizer step?"""
        return self.trainer is None or self.trainer.accelerator.sync_gradients

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The bare optimizer, without accelerate's wrapper."""
        if self.trainer is None or self.trainer.optimizer is None:
            return None
        return getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)

    def aux_run(
        self, name: str, build: Callable[[], nn.Module], dataset: Any, *, max_steps: int, **arguments: Any
    ) -> nn.Module:
        """Trains a side model to its end in the cache, or loads it where an earlier run finished it.

        Args:
            name: Part of the cache key, with the arguments and the data's fingerprint.
            build: Makes the untrained model (called with the seed set).
            dataset: Map-style training data in the run's own format.
            max_steps: Optimizer steps of the side run.
            **arguments: Further `TrainingArguments` fields.

        Returns:
            The trained model, on the run's device, in eval mode.
        """
        from thrifty.side_run import side_run

        return side_run(self, name, build, dataset, max_steps=max_steps, arguments=arguments)
