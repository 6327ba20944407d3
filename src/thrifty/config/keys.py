"""The keys of a run file that concern neither the data (`DataOptions`) nor `TrainingArguments`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(kw_only=True)
class RunKeys:
    """Model, task, methods and output of a run. The string below a field is its documentation everywhere."""

    task: Literal[
        "causal-lm",
        "masked-lm",
        "text-classification",
        "image-classification",
        "seq2seq-lm",
        "masked-image-modeling",
        "image-text",
    ] = "causal-lm"
    """What the model learns to do."""
    model_name_or_path: str | None = None
    """A local folder or a hub id of the model to start from."""
    model_config: dict[str, Any] | str | None = None
    """Instead of `model_name_or_path`, for training from scratch: a mapping with `model_type`, or a `config.json`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The data type in which the weights are held. Mixed precision (`methods: [bf16]`) needs float32."""
    attn_implementation: str | None = None
    """sdpa, eager, flash_attention_2, ...; None takes transformers' choice, SDPA where the model has it."""
    tokenizer_name_or_path: str | None = None
    """A local folder or a hub id of the tokenizer, where it is not the model's own."""
    embedded_corpus: Literal["kjv"] | None = None
    """Trains on the text that ships with thrifty, the King James Bible, instead of `train_file` or `dataset_name`."""
    vocab_size: int | None = None
    """Entries of the byte-level BPE that is trained on the training text where there is no tokenizer."""
    trust_remote_code: bool = False
    """Whether code that lies in the model's folder or on the hub may run."""

    methods: list[str | dict[str, dict[str, Any] | None]] = field(default_factory=list)
    """Techniques, in any order: a list of names, or of name: {settings}. `thrifty methods` lists them."""
    optimizer: str | dict[str, dict[str, Any] | None] | None = None
    """Shorthand: a method that claims the slot `optimizer`."""
    attention: str | dict[str, dict[str, Any] | None] | None = None
    """auto, sdpa, flash, flex or eager: which attention runs; or a method that claims the slot `attention`."""
    precision: str | dict[str, dict[str, Any] | None] | None = None
    """Shorthand: a method that claims the slot `precision`; auto takes what the device does well, and says why."""

    plan: Literal["auto"] | None = None
    """auto chooses micro-batch, accumulation and the methods that leave the mathematics unchanged, for this machine."""
    global_batch_size: int | None = None
    """Samples of an optimizer step on all devices. `plan: auto` divides it; without a plan, accumulation does."""
    plan_memory: str | None = None
    """plan: auto: what one device may use, e.g. 8GiB; None is what it has."""
    plan_allow: list[str] = field(default_factory=list)
    """plan: auto: methods or sections that may change the mathematics, e.g. [lora]."""

    output_dir: str | None = None
    """Where everything is written; left out, the next free folder below `runs`."""
    overwrite: bool = False
    """Whether a run that already lies in `output_dir` may be replaced."""
    resume: Literal[False, "auto"] | str = False
    """auto continues from the newest checkpoint in `output_dir` if there is one; a path continues from that one."""
    sample_prompt: str | None = None
    """causal-lm, seq2seq-lm: what the passage that is generated after training starts with."""
    max_new_tokens: int = 80
    """causal-lm, seq2seq-lm: the length of that passage in tokens."""
    num_threads: int | None = None
    """Processor threads for one operation; None keeps torch's own choice. Other numbers round differently."""


SLOTS = ("optimizer", "attention", "precision")
"""The shorthands: each puts a method into the slot of its own name."""
