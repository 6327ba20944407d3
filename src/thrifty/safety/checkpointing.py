"""Mixin: checkpoints that cannot be harmed, and a resume that means what it says."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from thrifty import _hf
from thrifty.errors import InputError
from thrifty.safety import fingerprint
from thrifty.safety.background import BackgroundSave, fits_on_host, put_off
from thrifty.safety.iterable import DATA_STATE, IterableStream
from thrifty.safety.lean import LeanLoop
from thrifty.safety.options import Guards
from thrifty.safety.schedule import hold_after, place_at, scale_base_rates
from thrifty.safety.store import CheckpointNotSaved, CheckpointStore
from thrifty.safety.trust import check_checkpoint

TRAINER_STATE = "trainer_state.json"


class SafeCheckpoints(LeanLoop):
    """Writes through `CheckpointStore` and resumes from what verifies, by samples."""

    guards: Guards
    store: CheckpointStore | None = None
    _staging: Path | None = None
    _position: fingerprint.Position | None = None
    _saved_print: dict[str, Any] | None = None
    _iterable: IterableStream | None = None
    _saving: tuple[BackgroundSave, str | None] | None = None

    @property
    def run_dir(self) -> str:
        """The folder of the run."""
        return str(self.args.output_dir)

    def say(self, line: str) -> None:
        """One line to the user, from the main process only."""
        if self.is_world_process_zero():
            _hf.write_line(line)

    def say_here(self, line: str) -> None:
        """One line about this process alone, with its rank where there are several."""
        _hf.write_line(line if self.args.world_size == 1 else f"[process {self.args.process_index}] {line}")

    def write_extra_state(self, folder: str) -> None:
        """What a subclass adds to a checkpoint, before it is sealed."""

    # --- saving ---

    def _open_store(self) -> CheckpointStore | None:
        """The store of this run, or None where another engine writes the checkpoints."""
        if not self.guards.atomic_checkpoints or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return None
        if self.store is None:
            self.store = CheckpointStore(
                self.run_dir,
                rank=self.args.process_index,
                world_size=self.args.world_size,
                all_ok=self._all_ok if self.args.world_size > 1 else None,
            )
        return self.store

    def _all_ok(self, mine: bool) -> bool:
        answer = torch.tensor([int(mine)], device=self.args.device)
        dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        return bool(answer.item())

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        store = self._open_store() if trial is None else None
        step = self.state.global_step
        if store is None:
            super()._save_checkpoint(model, trial)
            self.write_extra_state(os.path.join(self._get_output_dir(trial), f"checkpoint-{step}"))
            return
        self.finish_saving()
        best_before, aside = self.state.best_model_checkpoint, self._may_save_aside(trial)
        try:
            with contextlib.ExitStack() as sealing:
                folder = sealing.enter_context(
                    store.writing(step, fingerprint=self._fingerprint(), resumable=not self.args.save_only_model)
                )
                self._staging = folder.parent
                with put_off(folder) if aside else contextlib.nullcontext([]) as writes:
                    super()._save_checkpoint(model, trial)
                    self._write_data_state(folder)
                    self.write_extra_state(str(folder))
                self._name_best_checkpoint(store, folder)
                best = self.state.best_global_step
                if aside:
                    rotate = functools.partial(store.rotate, self.args.save_total_limit, best=best)
                    self._saving = BackgroundSave(writes, sealing.pop_all(), rotate), best_before
                    return
        except CheckpointNotSaved as error:
            self._not_saved(error, best_before)
        else:
            store.rotate(self.args.save_total_limit, best=best)
        finally:
            self._staging = None

    def _not_saved(self, error: CheckpointNotSaved, best_before: str | None) -> None:
        self.state.best_model_checkpoint = best_before
        self.say(f"{error}; the next one is due in {self.args.save_steps:g} steps")

    def _may_save_aside(self, trial: Any) -> bool:
        """May a thread write this checkpoint while training goes on?"""
        args, wish = self.args, self.guards.background_save
        if wish == "off" or args.world_size > 1 or not self.is_in_train or args.push_to_hub:
            return False
        # Somebody who listens to saves wants to find the files.
        listeners = [c for c in self.callback_handler.callbacks if type(c).on_save is not TrainerCallback.on_save]
        if wish == "auto" and any(not type(c).__module__.startswith("thrifty.") for c in listeners):
            return False
        if getattr(self, "recipe", None) and self.recipe.using("save_files"):  # pyright: ignore[reportAttributeAccessIssue]
            return False  # they read what was written before
        return fits_on_host(self._bytes_to_save())

    def _refuse_background_save(self) -> None:
        """A wish for what cannot be is an error; `auto` takes what there is."""
        args = self.args
        reasons = {
            "several processes write together": args.world_size > 1,
            "another engine writes the checkpoints": self.is_deepspeed_enabled or self.is_fsdp_enabled,
            "atomic_checkpoints is off": not self.guards.atomic_checkpoints,
            "push_to_hub uploads what was just written": args.push_to_hub,
        }
        found = [reason for reason, holds in reasons.items() if holds]
        if found and self.guards.background_save == "on":
            raise InputError(
                f"a thread cannot write the checkpoints: {found[0]}", key="background_save", value="on", fix="use auto"
            )

    def _bytes_to_save(self) -> int:
        optimizer: Any = self.optimizer
        model = self.model
        assert model is not None
        tensors = [*model.parameters(), *model.buffers()]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def finish_saving(self) -> None:
        """Waits for the checkpoint that a thread is writing, if there is one, and says so if it was not saved."""
        if self._saving is None:
            return
        (saving, best_before), self._saving = self._saving, None
        try:
            saving.wait()
        except CheckpointNotSaved as error:
            self._not_saved(error, best_before)

    def look_after_saving(self) -> None:
        """At a step boundary: is the checkpoint that a thread was writing complete, or refused? Does not wait."""
        if self._saving is not None and not self._saving[0].running:
            self.finish_saving()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.args.dataloader_num_workers:
            self.finish_saving()  # workers are forked, which threads do not like
        super()._run_epoch(*args, **kwargs)
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.finish_saving()  # what comes next looks at the checkpoints

    def _name_best_checkpoint(self, store: CheckpointStore, folder: Path) -> None:
        """The parent looks for the best checkpoint beside the staging folder; it is, or will be, in the run folder."""
        best = self.state.best_global_step
        if best and (best == self.state.global_step or store.path(best).exists()):
            self.state.best_model_checkpoint = str(store.path(best))
        if self.args.should_save:
            self.state.save_to_json(str(folder / TRAINER_STATE))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _fingerprint(self) -> dict[str, Any]:
        described = fingerprint.describe(
            self.args,
            max_steps=self.state.max_steps,
            total_batch_size=self._samples_per_step(),
            dataset=self.train_dataset,
        )
        described["batch"]["samples_seen"] = self._samples_seen()
        return json.loads(json.dumps(described, default=str))

    def _samples_per_step(self) -> int:
        return self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size

    def _samples_seen(self) -> int | None:
        if not hasattr(self.train_dataset, "__len__"):
            return None
        length: int = len(self.train_dataset)  # type: ignore[arg-type]
        return fingerprint.samples_seen(
            self.state.global_step,
            dataset_length=length,
            total_batch_size=self._samples_per_step(),
            drop_last_to=self._train_batch_size * self.args.world_size if self.args.dataloader_drop_last else None,
        )

    # --- data ---

    def get_train_dataloader(self) -> Any:
        loader: Any = super().get_train_dataloader()
        self._iterable = None
        if not self.guards.atomic_checkpoints or not isinstance(loader.dataset, IterableDataset):
            return loader
        _hf.keep_stream_position()
        across = self._train_batch_size * self.args.world_size
        self._iterable = IterableStream(loader, samples=across, report=self.say)
        return self._iterable

    def _write_data_state(self, folder: Path) -> None:
        stream, rank = self._iterable, self.args.process_index
        if stream is not None and (rank == 0 or not stream.whole):
            torch.save(stream.state_dict(), folder / DATA_STATE.format(rank=rank))

    def _place_iterable(self, stream: IterableStream, resume: str, saved_print: dict[str, Any]) -> tuple[int, int]:
        """Sends an iterable data set to the position of a checkpoint: the pass, and micro-batches into it.

        Raises:
            InputError: Nothing is left to run, or the position means something else with the present sizes.
        """
        args, step = self.args, self.state.global_step
        before, now = saved_print.get("batch", {}).get("total_batch_size"), self._samples_per_step()
        if before is not None and before != now:
            raise InputError(
                f"an iterable data set goes on only with as many samples a step as before: {before}, not {now}",
                key="per_device_train_batch_size",
                value=args.per_device_train_batch_size,
                fix=f"choose micro-batch x gradient_accumulation_steps x processes = {before}",
            )
        if step >= self.state.max_steps:
            raise InputError(
                f"nothing is left to run: step {step} of {self.state.max_steps} is done",
                key="max_steps",
                value=self.state.max_steps,
                fix="ask for more, with schedule=extend or schedule=continue, or evaluate the checkpoint",
            )
        per_pass = len(stream) if hasattr(self.train_dataset, "__len__") else 0
        per_pass = per_pass or self.state.max_steps * args.gradient_accumulation_steps
        path = Path(resume) / DATA_STATE.format(rank=0 if stream.whole else args.process_index)
        if path.is_file():
            saved = torch.load(path, map_location="cpu", weights_only=True)
        else:  # a checkpoint of the plain trainer: its epoch is a fraction
            epoch = int(self.state.epoch or 0)
            into = round(((self.state.epoch or 0) - epoch) * per_pass)
            place = {"epoch": epoch, "samples": into * stream.samples, "whole": stream.whole}
            saved = {**place, "state": None, "finished": False}
        if saved["whole"] != stream.whole or saved["samples"] % stream.samples:
            raise InputError(
                "the data set is dealt out to the processes in another way than in the checkpoint",
                key="per_device_train_batch_size",
                value=args.per_device_train_batch_size,
                fix="resume with the micro-batch and the processes of the checkpoint",
            )
        taken = saved["samples"] // stream.samples
        if hasattr(self.train_dataset, "__len__") and taken >= per_pass:
            return saved["epoch"] + 1, 0
        if args.ignore_data_skip:
            return saved["epoch"], 0
        stream.seek(saved)
        return saved["epoch"], taken

    # --- resuming ---

    def find_checkpoint(self, wanted: str | bool | None) -> str | None:
        """The checkpoint to resume from: `True` or `auto` is the newest complete one, a path must be complete itself.

        Raises:
            InputError: `True`, and there is none; or the path is not a complete checkpoint.
        """
        if wanted in (None, False):
            return None
        if not self.guards.atomic_checkpoints or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return super_checkpoint(self.run_dir) if wanted in (True, "auto") else str(wanted)
        if wanted in (True, "auto"):
            found = self._newest()
            if found is None and wanted is True:
                raise InputError(
                    "there is no complete checkpoint to resume from",
                    key="output_dir",
                    value=self.args.output_dir,
                    fix="resume='auto' starts afresh where there is none",
                )
            self.say(f"resuming from {found}" if found else "no checkpoint yet: starting afresh")
            if found is not None:
                check_checkpoint(found)
            return found
        problems = CheckpointStore(Path(str(wanted)).parent, read_only=True).verify(str(wanted))
        if problems:
            raise InputError(
                f"this checkpoint cannot be used: {'; '.join(problems)}",
                key="resume_from_checkpoint",
                value=str(wanted),
                fix="resume='auto' takes the newest complete one",
            )
        check_checkpoint(str(wanted))
        return str(wanted)

    def _newest(self) -> str | None:
        answer: list[Any] = [None, []]
        if self.args.process_index == 0 and Path(self.run_dir).is_dir():
            store = CheckpointStore(self.run_dir, read_only=True)
            newest = store.newest_complete()
            answer = [str(newest.path) if newest.path else None, [(str(p), why) for p, why in newest.skipped]]
        if self.args.world_size > 1:
            dist.broadcast_object_list(answer, src=0)
        for path, why in answer[1]:
            self.say(f"skipped {path}: {why}")
        return answer[0]

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: str | None, trial: Any
    ) -> tuple[int, int]:
        start = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial)
        self._position = None
        if resume is None or not os.path.isdir(resume):
            return start
        saved = CheckpointStore(Path(resume).parent, read_only=True).fingerprint(resume)
        self._saved_print = saved
        self.state.max_steps = max_steps
        if not saved:
            return start if self._iterable is None else self._place_iterable(self._iterable, resume, {})
        accepted = fingerprint.require_same(saved, self._fingerprint(), self.guards.schedule)
        if self._iterable is not None:
            return self._place_iterable(self._iterable, resume, saved)
        seen = saved["batch"].get("samples_seen")
        if not hasattr(self.train_dataset, "__len__") or seen is None:
            return start
        length: int = len(self.train_dataset)  # type: ignore[arg-type]
        by_steps = self.args.max_steps > 0
        self._position = position = fingerprint.resume_position(
            seen,
            dataset_length=length,
            micro_batch=self._train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            world_size=self.args.world_size,
            num_train_epochs=None if by_steps else self.args.num_train_epochs,
            max_steps=max_steps if by_steps else None,
            drop_last=self.args.dataloader_drop_last,
        )
        if not any(d.part == "batch" for d in accepted):
            return start
        self._refuse_draws()
        self.state.global_step = position.global_step
        self.say(
            f"batch changed: {saved['batch']['total_batch_size']} -> {self._samples_per_step()} samples a step; "
            f"going on after sample {seen}, which is step {position.global_step} now"
        )
        return position.epoch, position.micro_batches_to_skip

    def _refuse_draws(self) -> None:
        if getattr(self, "stream", None) is not None:
            raise InputError(
                "a method chooses the samples of a step, and its position is counted in micro-batches",
                key="per_device_train_batch_size",
                value=self.args.per_device_train_batch_size,
                fix="resume with the batch size, accumulation and processes of the checkpoint",
            )

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        saved = self._saved_print
        if not saved or resume_from_checkpoint is None:
            return prepared
        if saved["batch"]["total_batch_size"] != self._samples_per_step() and self._position is not None:
            place_at(self.lr_scheduler, self.state.global_step)
        if self.guards.schedule == "continue":
            hold_after(self.lr_scheduler, saved["schedule"]["max_steps"])
        elif self.guards.schedule == "extend":
            # The saved state of the schedule holds the old base rates.
            scale_base_rates(self.lr_scheduler, self.args.learning_rate / saved["schedule"]["learning_rate"])
            place_at(self.lr_scheduler, self.state.global_step)
        self._saved_print = None
        return prepared

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self._saved_print and self.guards.schedule == "continue":
            num_training_steps = self._saved_print["schedule"]["max_steps"]
        return super().create_scheduler(num_training_steps, optimizer)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        position, self._position = self._position, None
        if position is not None and position.first_step_micro_batches < num_batches:
            # The checkpoint's last step ended inside a step of the new size: its rest comes first.
            num_batches = position.first_step_micro_batches
        return super().get_batch_samples(epoch_iterator, num_batches, device)


def super_checkpoint(folder: str) -> str | None:
    """transformers' own search, for checkpoints of other engines."""
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(folder) if os.path.isdir(folder) else None
