"""The verb `train`: everything is checked before anything is written, and everything is said while it happens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from thrifty import tasks
from thrifty.config import RunConfig, yaml_text
from thrifty.hardware.detect import Hardware, detect
from thrifty.hardware.precision import choose_precision
from thrifty.recipe import Recipe
from thrifty.report import write_all
from thrifty.report.files import write_atomic
from thrifty.report.progress import ProgressCallback
from thrifty.report.recorder import MetricsRecorder
from thrifty.report.summary import write_summary
from thrifty.report.throughput import TokenCounter
from thrifty.run import folder as run_folder
from thrifty.run.console import say
from thrifty.run.evaluation import silence
from thrifty.run.outcome import RUN_FILE, conclude, introduce, passage_of, summary_of
from thrifty.run.planning import settle_batch
from thrifty.safety.signals import Interrupted
from thrifty.trainer import Trainer


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    output_dir: Path
    """Holds the model and everything about it."""
    metrics: dict[str, float]
    """The final evaluation, `eval_loss` and others; empty without validation data."""
    summary: dict[str, Any] = field(repr=False)
    """What `summary.json` says."""
    sample_text: str | None = None
    """causal-lm: the generated passage."""


class RunTrainer(Trainer):
    """The trainer of a run: it counts the tokens that the progress bar and the metrics show."""

    counter: TokenCounter

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        mask = inputs.get("attention_mask")
        # A sum on the device costs no waiting; the number is read at logging steps.
        self.counter.add(mask.sum() if mask is not None else self.ctx.task.count_tokens(inputs))
        return super().training_step(model, inputs, num_items_in_batch)


def train(config: RunConfig) -> RunResult:
    """Trains what `config` says, and leaves the model, the record of the run and a report in its output folder.

    Raises:
        InputError: Something cannot be done as asked. Nothing has been written or overwritten then.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    folder = Path(config.output_dir).expanduser() if config.output_dir else run_folder.next_free(config.name)
    run_folder.check(
        folder,
        overwrite=config.overwrite,
        resume=config.resume,
        sources=(config.model_name_or_path, config.tokenizer_name_or_path),
    )
    with run_folder.left_alone_on_failure(folder):
        args = config.training_arguments(folder)
        hardware = detect(use_cpu=args.use_cpu)
        say("hardware", hardware.lines())
        config = settle_batch(_settle_precision(config, hardware), args)
        args = config.training_arguments(folder)
        loaded = tasks.load(
            config.task,
            config.data,
            model_name_or_path=config.model_name_or_path,
            model_config=config.model_config,
            tokenizer_name_or_path=config.tokenizer_name_or_path,
            vocab_size=config.vocab_size,
            seed=config.data.seed,
            trust_remote_code=config.trust_remote_code,
            attn_implementation=config.attn_implementation,
            dtype=config.dtype,
        )
        trainer = _trainer(config, args, loaded, folder)
        introduce(trainer, loaded)
        say("writing to", str(folder))
        trained = _run(trainer, config, folder)
    main = trainer.is_world_process_zero()
    metrics = _final_metrics(trainer)
    trainer.save_model(str(folder))
    trainer.save_state()
    passage = passage_of(config, trainer, loaded)
    summary = summary_of(config, trainer, loaded, hardware, trained.metrics, metrics, passage) if main else {}
    if main:
        write_summary(folder, **summary)
        write_all(folder)
        conclude(folder, config, metrics, passage)
    return RunResult(folder, metrics, summary, passage[1] if passage else None)


def _settle_precision(config: RunConfig, hardware: Hardware) -> RunConfig:
    """`precision: auto` becomes what it means on this machine, so that the run file of the run repeats it."""
    if config.precision is None:
        return config
    choice = choose_precision(hardware)
    say("precision", choice.line)
    return dataclasses.replace(config, methods=[*config.methods, *choice.methods], precision=None)


def _final_metrics(trainer: Any) -> dict[str, float]:
    """Evaluates the model that is saved, unless the last step was evaluated and nothing has changed it since."""
    if trainer.eval_dataset is None:
        return {}
    last = next((row for row in reversed(trainer.state.log_history) if "eval_loss" in row), None)
    if last is not None and last["step"] == trainer.state.global_step and not trainer.recipe.using("finish"):
        return {name: value for name, value in last.items() if name.startswith("eval_")}
    return trainer.evaluate()


class _Beginning(TrainerCallback):
    """Writes the first files of a run, in place of those of an earlier run, once the guards have let it begin."""

    def __init__(self, folder: Path, config: RunConfig, args: TrainingArguments) -> None:
        self.folder, self.config, self.args = folder, config, args

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self.config.overwrite:
            run_folder.clear(self.folder)
        settled = dataclasses.replace(
            self.config,
            output_dir=str(self.folder.resolve()),
            num_threads=torch.get_num_threads(),
            overwrite=False,
            resume=False,
        )
        # The arguments before the methods set theirs: methods stand in `methods`.
        content = yaml_text.dump(settled.to_dict(self.args))
        write_atomic(self.folder / RUN_FILE, f"# Written by `thrifty train`; it repeats the run.\n{content}")


def _trainer(config: RunConfig, args: TrainingArguments, loaded: tasks.Loaded, folder: Path) -> Any:
    data = loaded.data
    counter = TokenCounter()
    progress = ProgressCallback(counter)
    trainer: Any = RunTrainer(
        model=loaded.model,
        args=args,
        data_collator=data.data_collator,
        train_dataset=data.train_dataset,
        eval_dataset=data.eval_dataset,
        processing_class=loaded.processor,
        compute_metrics=data.compute_metrics,
        preprocess_logits_for_metrics=data.preprocess_logits_for_metrics,
        methods=Recipe.parse(config.methods),
        task=loaded.task,
        guards=config.guards,
    )
    trainer.counter, trainer.progress = counter, progress
    silence(trainer)
    # Added last, so that they begin after the guards: what a guard refuses leaves nothing behind.
    for callback in (_Beginning(folder, config, args), MetricsRecorder(counter), progress):
        trainer.add_callback(callback)
    return trainer


def _run(trainer: Any, config: RunConfig, folder: Path) -> Any:
    try:
        return trainer.train(resume_from_checkpoint=None if config.resume is False else config.resume)
    except (KeyboardInterrupt, Interrupted):
        command = f"thrifty train {folder / RUN_FILE} resume=auto"
        say("interrupted", f"at step {trainer.state.global_step}; go on with: {command}")
        raise
    finally:
        # After an error a live bar would eat the message.
        trainer.progress.close()
