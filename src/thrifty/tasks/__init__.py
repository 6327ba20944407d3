"""The tasks: what is trained, with which model class, on which data, measured how.

`get(name)` gives a task, `infer(model)` finds the task of a model, `load(...)` makes model, processor and data in one
call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from thrifty.data.options import DataOptions
    from thrifty.tasks.base import Processor, Task, TaskData

# Name to module and class: a task's module is imported when it is asked for.
_TASKS = {
    "causal-lm": ("thrifty.tasks.causal_lm", "CausalLM"),
    "masked-lm": ("thrifty.tasks.masked_lm", "MaskedLM"),
    "text-classification": ("thrifty.tasks.text_classification", "TextClassification"),
    "image-classification": ("thrifty.tasks.image_classification", "ImageClassification"),
    "seq2seq-lm": ("thrifty.tasks.seq2seq_lm", "Seq2SeqLM"),
    "masked-image-modeling": ("thrifty.tasks.masked_image_modeling", "MaskedImageModeling"),
    "image-text": ("thrifty.tasks.image_text", "ImageText"),
}
# BART's one class is in transformers' tables of several tasks: the first of ours that knows it has it.
_INFER_ORDER = ("seq2seq-lm", *(name for name in _TASKS if name != "seq2seq-lm"))


def names() -> tuple[str, ...]:
    """Returns the names of all tasks."""
    return tuple(_TASKS)


def get(name: str) -> Task:
    """Returns a task by its name.

    Raises:
        InputError: There is no such task.
    """
    if name not in _TASKS:
        raise InputError(
            f"unknown task{did_you_mean(str(name), _TASKS)}", key="task", value=name, fix=f"one of {', '.join(_TASKS)}"
        )
    module, cls = _TASKS[name]
    return getattr(import_module(module), cls)()


def infer(model: Any) -> Task:
    """Returns the task of a model from its class; a peft model has the task of the model inside.

    Raises:
        InputError: The class belongs to none of the tasks.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    classes = {base.__name__ for base in type(inner).__mro__}
    for task in map(get, _INFER_ORDER):
        if task.does(classes):
            return task
    raise InputError(
        f"no task is known for the class {type(inner).__name__}",
        key="task",
        fix=f"say which: one of {', '.join(_TASKS)}",
    )


@dataclass
class Loaded:
    """Everything that training needs but the training arguments."""

    task: Task
    model: PreTrainedModel
    processor: Processor
    data: TaskData
    notes: list[str] = field(default_factory=list)
    """Lines for the log, about processor, data and model."""


def load(
    task: str,
    options: DataOptions,
    *,
    model_name_or_path: str | None = None,
    model_config: Any = None,
    tokenizer_name_or_path: str | None = None,
    vocab_size: int | None = None,
    seed: int = 42,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    dtype: str = "float32",
) -> Loaded:
    """Makes processor, data and model in the right order, and checks that they fit.

    Args:
        task: The task's name.
        options: Where the data is and how to read it.
        model_name_or_path: A local folder or a hub id, or None.
        model_config: For a model from scratch: a mapping with `model_type`, or the path of a config.json.
        tokenizer_name_or_path: Where the tokenizer or image processor is; the model's own by default. A model from
            scratch without one gets one that is trained on the training text.
        vocab_size: Entries of a tokenizer that is trained.
        seed: Seeds all weights that are drawn.
        trust_remote_code: Allow code from the model's folder.
        attn_implementation: As in transformers.
        dtype: Of the weights.

    Raises:
        InputError: Something is at fault; nothing has been written (but to the cache).
    """
    from thrifty.data.sources import load_sources, training_texts

    chosen = get(task)
    config = chosen.load_config(model_name_or_path, model_config, trust_remote_code=trust_remote_code)
    sources = load_sources(options)
    notes: list[str] = []
    processor = chosen.load_processor(
        tokenizer_name_or_path or model_name_or_path,
        config=config,
        texts=lambda: training_texts(sources, options),
        vocab_size=vocab_size,
        trust_remote_code=trust_remote_code,
        notes=notes,
    )
    data = chosen.prepare(options, processor, config, sources=sources)
    notes += data.notes
    model = chosen.build_model(
        model_name_or_path,
        model_config,
        seed=seed,
        processor=processor,
        label_names=data.label_names,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
        dtype=dtype,
        notes=notes,
    )
    chosen.validate(model, data, processor)
    return Loaded(chosen, model, processor, data, notes)
