"""`Trainer`: `transformers.Trainer` that calls a recipe's methods at the right moments. It knows no method by name.

With an empty recipe it is bit for bit its parent.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import set_seed

from thrifty import _hf
from thrifty.context import Context
from thrifty.errors import InputError, NotApplicable
from thrifty.method import Batch, Method, TrainingData
from thrifty.recipe import Recipe, method_facts
from thrifty.replace import ReplaceModel
from thrifty.safety.iterable import is_map_style
from thrifty.safety.trainer import SafeTrainer
from thrifty.stream import SampleStream

METHOD_STATE = "thrifty_state.pt"
EVENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_train_end")


class Trainer(ReplaceModel, SafeTrainer):
    """A drop-in `transformers.Trainer` with methods and guards.

    Args:
        guards: Which guards are on (`thrifty.safety.options.Guards`); True is all of them, False none.
        methods: Names, `{name: {setting: value}}` mappings or `Method` instances, or a `Recipe`.
        precision: `auto` adds the mixed precision that the device does well, and says why in one line.
        task: A task of `thrifty.tasks` (or its name); inferred from the model where it is needed.
        *args: As for `transformers.Trainer`.
        **kwargs: As for `transformers.Trainer`.

    Raises:
        InputError: The methods conflict, or one cannot work here (`NotApplicable`).

    >>> Trainer(model, args, train_dataset=data, methods=["bf16", {"lora": {"r": 8}}])  # doctest: +SKIP
    """

    def __init__(
        self,
        *args: Any,
        methods: Recipe | Sequence[str | Mapping[str, Any] | Method] = (),
        precision: Literal["auto"] | None = None,
        task: Any = None,
        guards: Any = True,
        **kwargs: Any,
    ) -> None:
        self.recipe = Recipe.parse(methods)
        self.recipe_finished = False
        self._adjusted: torch.optim.Optimizer | None = None
        self.stream: SampleStream | None = None
        bound = inspect.signature(transformers.Trainer.__init__).bind(self, *args, **kwargs).arguments
        bound.pop("self")
        if isinstance(task, str):
            from thrifty import tasks

            task = tasks.get(task)
        given = bound.get("args") or TrainingArguments("tmp_trainer")
        if precision is not None:
            self.recipe = _with_precision(self.recipe, precision, given)
        self.ctx = Context(
            args=given,
            task=task,
            processing_class=bound.get("processing_class"),
            trainer=self,
        )
        if self.recipe:
            bound = self._apply_recipe(dict(bound))
        super().__init__(guards=guards, **bound)
        if task is not None and task.loss_without_labels:
            self.can_return_loss = True  # the parent asks the model's signature, which does not say so for ViTMAE
        self.ctx.args = self.args
        if self.recipe:
            for method in self.recipe.using("attach"):
                method.attach(self.accelerator, self.ctx)

    def events_before_guards(self) -> list[TrainerCallback]:
        return [_RecipeEvents(self)] if self.recipe else []

    def _apply_recipe(self, bound: dict[str, Any]) -> dict[str, Any]:
        if bound.get("model_init") is not None:
            raise InputError(
                "methods need the model itself", key="model_init", value=bound["model_init"], fix="pass model=..."
            )
        ctx, recipe = self.ctx, self.recipe
        bound["args"] = ctx.args = recipe.configure(ctx.args, ctx)
        data = TrainingData(
            train_dataset=bound.get("train_dataset"),
            eval_dataset=bound.get("eval_dataset"),
            data_collator=bound.get("data_collator") or _default_collator(bound.get("processing_class")),
        )
        ctx.data = data
        ctx.set_model(bound["model"])
        if data.train_dataset is not None:
            self._refuse_iterable(data.train_dataset)
            for method in recipe.using("prepare_data"):
                ctx.data = data = method.prepare_data(data, ctx)
            bound.update(
                train_dataset=data.train_dataset, eval_dataset=data.eval_dataset, data_collator=data.data_collator
            )
        model = bound["model"]
        for method in recipe.using("prepare_model"):
            with torch.random.fork_rng():
                set_seed(int(torch.randint(2**31, (1,), generator=ctx.rng(f"prepare/{method.name}"))))
                model = method.prepare_model(model, ctx)
        bound["model"] = model
        return bound

    # --- data ---

    def _refuse_iterable(self, dataset: Any) -> None:
        choosers = self.recipe.using("draw") + self.recipe.using("prepare_data")
        if choosers and not is_map_style(dataset):
            raise NotApplicable(
                "chooses or arranges samples, which an iterable data set does not offer",
                key=f"methods.{choosers[0].name}",
                fix="use a map-style data set (datasets.Dataset), or remove the method",
            )

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if not self.recipe.using("draw"):
            return loader
        taken = self.stream.taken if self.stream is not None else 0
        _hf.keep_stream_position()
        self.stream = SampleStream(loader, self.data_collator)
        self.stream.seek(taken)
        return self.stream

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        drawers, shapers = self.recipe.using("draw"), self.recipe.using("shape_batch")
        batches = iter(drawers[0].draw(self._next_batch, num_batches, self.ctx)) if drawers else epoch_iterator
        for method in shapers:
            batches = map(functools.partial(method.shape_batch, ctx=self.ctx), batches)
        return super().get_batch_samples(batches, num_batches, device)

    def _next_batch(self) -> Batch:
        assert self.stream is not None
        return self.ctx.to_device(next(self.stream))

    # --- model, loss, step ---

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        wrappers = self.recipe.using("wrap_loss")
        if return_outputs or not wrappers or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        parent = super().compute_loss

        def chain(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            return parent(model, inputs, num_items_in_batch=num_items_in_batch)

        for method in reversed(wrappers):
            chain = method.wrap_loss(chain, self.ctx)
        return chain(model, inputs, num_items_in_batch)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        chain = super().training_step
        for method in reversed(self.recipe.using("wrap_training_step")):
            chain = method.wrap_training_step(chain, self.ctx)
        return chain(model, inputs, num_items_in_batch)

    # --- optimizer ---

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        spared = self.recipe.no_decay()
        return [name for name in super().get_decay_parameter_names(model) if not any(part in name for part in spared)]

    def optimizer_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The parent's two groups (with and without decay), each with `names` of its `params`, as methods adjust it."""
        groups = decay_groups(model, self.get_decay_parameter_names(model), self.args.weight_decay)
        for method in self.recipe.using("adjust_groups"):
            groups = method.adjust_groups(groups, self.ctx)
        return groups

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer: Any = self._build_optimizer(model)
        bare = getattr(optimizer, "optimizer", optimizer)
        if bare is not self._adjusted:
            self._adjusted = bare
            for method in self.recipe.using("adjust_optimizer"):
                method.adjust_optimizer(bare, self.ctx)
        return optimizer

    def _build_optimizer(self, model: nn.Module | None) -> torch.optim.Optimizer:
        owner = self.recipe.owner("optimizer")
        self._remember_names()
        if self.optimizer is not None or (owner is None and not self.recipe.using("adjust_groups")):
            return super().create_optimizer() if model is None else super().create_optimizer(model)
        groups = [group for group in self.optimizer_groups(self.model if model is None else model) if group["params"]]
        if owner is not None:
            self.optimizer = owner.build_optimizer(groups, self.ctx)
        else:
            chosen: Any = self.model
            cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, chosen)
            self.optimizer = cls([{k: v for k, v in group.items() if k != "names"} for group in groups], **kwargs)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        owner = self.recipe.owner("schedule")
        if owner is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.look_again()
        self.lr_scheduler = owner.build_schedule(optimizer or self.optimizer, num_training_steps, self.ctx)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._wrap_update()
        return prepared

    def _wrap_update(self) -> None:
        """Puts the methods' middleware around the step of the optimizer that was just created."""
        wrappers = self.recipe.using("wrap_update")
        if not wrappers:
            return
        optimizer: Any = self.optimizer
        chain = type(optimizer).step.__get__(optimizer)
        for method in reversed(wrappers):
            chain = method.wrap_update(chain, self.ctx)

        def step(closure: None = None) -> None:
            optimizer._opt_called = True  # what the scheduler's own wrapper of `step`, replaced here, would note
            chain()

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step

    def skip_update(self) -> None:
        """Ends the current step without updating the weights (the scaler is told)."""
        _hf.skip_update(self.accelerator, self.optimizer)

    # --- evaluation and the end ---

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model holds the weights that the recipe evaluates and saves."""
        if self.recipe_finished or not self.recipe.using("evaluating"):
            yield
            return
        with self.recipe.evaluating(_hf.unwrap_container(self.model)):
            yield

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        collator: Any = self.data_collator
        epoch = getattr(collator, "epoch", None)
        if hasattr(collator, "set_epoch"):
            collator.set_epoch(0)  # always the same masks, so that validation losses compare
        try:
            with self.evaluating():
                return super().evaluation_loop(*args, **kwargs)
        finally:
            if hasattr(collator, "set_epoch"):
                collator.set_epoch(epoch)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        self.ctx.loss_only = prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self.ctx.loss_only = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the parent's; at the end the recipe finishes the model: merged, folded, averaged, unmasked."""
        if self.recipe_finished:
            raise InputError(
                "this trainer has finished its model (merged, folded or averaged)",
                key="train()",
                fix="make a new Trainer to go on from its weights",
            )
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        for method in self.recipe.using("facts"):
            if facts := method_facts(method):
                self.say(f"{method.name}: {facts}")
        self.finish()
        return result

    def finish(self) -> None:
        """Runs the methods' `finish`. `train()` calls it; call it yourself only after your own loop."""
        finishers = self.recipe.using("finish")
        if not finishers:
            return
        model = _hf.unwrap(self.model_wrapped)
        for method in finishers:
            model = method.finish(model, self.ctx)
        self.model = self.model_wrapped = model
        self.recipe_finished = True

    # --- saving and loading ---

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # A checkpoint must hold the weights that are trained; everything else holds those that are evaluated.
        with _hf.live_names(_hf.unwrap_container(self.model)) if _internal_call else self.evaluating():
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            for method in self.recipe.using("save_files"):
                method.save_files(self.model, output_dir or str(self.args.output_dir), self.ctx)

    def write_extra_state(self, folder: str) -> None:
        """Writes the methods' state into a checkpoint folder (called by the checkpoint store, before it seals)."""
        if not self.recipe:
            return
        states = self.recipe.state_dict()
        shared = {m.name: states[m.name] for m in self.recipe if not m.state_per_rank}
        own = {m.name: states[m.name] for m in self.recipe if m.state_per_rank}
        if self.args.should_save:
            torch.save({"version": 1, "methods": shared}, os.path.join(folder, METHOD_STATE))
        if own or self.stream is not None:
            taken = self.stream.taken if self.stream is not None else 0
            torch.save({"methods": own, "taken": taken}, os.path.join(folder, _rank_state(self.args.process_index)))

    def _load_extra_state(self, folder: str) -> None:
        path = os.path.join(folder, METHOD_STATE)
        if not os.path.exists(path):
            if self.recipe:
                raise InputError(
                    "the checkpoint was written without methods, but the recipe has "
                    f"{[method.name for method in self.recipe]}",
                    key="resume_from_checkpoint",
                    value=folder,
                    fix="start a new run from its weights (model_name_or_path)",
                )
            return
        states = torch.load(path, map_location="cpu", weights_only=True)["methods"]
        own_path = os.path.join(folder, _rank_state(self.args.process_index))
        taken = 0
        if os.path.exists(own_path):
            own = torch.load(own_path, map_location="cpu", weights_only=True)
            states, taken = {**states, **own["methods"]}, own["taken"]
        self.recipe.load_state_dict(states, where=folder)
        if self.stream is not None:
            self.stream.seek(taken)
        elif self.recipe.using("draw"):
            self.stream = SampleStream(super().get_train_dataloader(), self.data_collator)
            self.stream.seek(taken)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_extra_state(resume_from_checkpoint)
        self._restore_structure(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        # The best weights belong with the methods' state of that time: its average, its masks, its number of layers.
        if self.recipe and self.state.best_model_checkpoint is not None:
            self._load_extra_state(self.state.best_model_checkpoint)
            self._restore_structure(self.state.best_model_checkpoint)
        super()._load_best_model()

    def _restore_structure(self, folder: str) -> None:
        restorers = self.recipe.using("restore_model")
        if not restorers:
            return
        present = restored = _hf.unwrap_container(self.model)
        for method in restorers:
            restored = method.restore_model(restored, self.ctx)
        self.model = self.model_wrapped = restored.to(self.args.device)
        if restored is not present:
            # Another object: the others attach themselves anew, and what they reset comes from the checkpoint again.
            for method in self.recipe.using("on_replace"):
                if all(method is not other for other in restorers):
                    method.on_replace(restored, {}, self.ctx)
            self._load_extra_state(folder)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        if "sample_id" not in columns:
            columns.append("sample_id")


def decay_groups(model: nn.Module, decay: Sequence[str], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups, with and without decay, each with `params`, their `names` and `weight_decay`."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    # The parent goes by the word "bias"; T5's table of relative biases is a matrix like other embeddings.
    decaying = {*decay, *(name for name, p in trained if name.endswith("bias.weight") and p.ndim == 2)}
    groups = []
    for decays in (True, False):
        chosen = [(name, p) for name, p in trained if (name in decaying) is decays]
        groups.append(
            {
                "params": [p for _, p in chosen],
                "names": [name for name, _ in chosen],
                "weight_decay": weight_decay if decays else 0.0,
            }
        )
    return groups


class _RecipeEvents(TrainerCallback):
    """Passes the trainer's events on to the methods, in the recipe's order."""

    def __init__(self, trainer: Trainer) -> None:
        self._listeners = {event: trainer.recipe.using(event) for event in EVENTS}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("on_train_begin", args, state, control, kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("on_step_begin", args, state, control, kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("on_step_end", args, state, control, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("on_train_end", args, state, control, kwargs)

    def _tell(self, event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        for method in self._listeners[event]:
            getattr(method, event)(args, state, control, **kwargs)


def _with_precision(recipe: Recipe, precision: str, args: TrainingArguments) -> Recipe:
    from thrifty.hardware.detect import detect
    from thrifty.hardware.precision import AUTO, check_auto, choose_precision

    if precision != AUTO:
        raise InputError("is not auto", key="precision", value=precision, fix=f"auto, or methods=[{precision!r}]")
    check_auto(recipe, {name: getattr(args, name) for name in ("bf16", "fp16", "tf32")})
    choice = choose_precision(detect(use_cpu=args.device.type == "cpu"))
    if args.process_index == 0:
        _hf.write_line(f"precision: {choice.line}")
    return Recipe.parse([*recipe, *choice.methods])


def _rank_state(rank: int) -> str:
    return f"thrifty_state_rank{rank}.pt"


def _default_collator(processing_class: Any) -> Any:
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator

    if isinstance(processing_class, PreTrainedTokenizerBase):
        return DataCollatorWithPadding(processing_class)
    return default_data_collator
