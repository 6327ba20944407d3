"""What the user may say about the data: the keys of a run file that concern data, with Hugging Face's spelling."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class DataOptions:
    """Where the data is and how to read it. All lengths are in tokens."""

    train_file: str | None = None
    """Local training data: .jsonl .json .csv .parquet .arrow .txt, or a folder of images (one sub-folder a class)."""
    validation_file: str | None = None
    """Local validation data in the same formats."""
    dataset_name: str | None = None
    """A hub id, instead of `train_file`. The only key that may cause network traffic besides a hub model id."""
    dataset_config_name: str | None = None
    """The hub data set's configuration."""
    train_split: str = "train"
    """The hub data set's training split."""
    validation_split: str | None = None
    """The hub data set's validation split."""
    validation_fraction: float = 0.05
    """The share held out for validation where none is given; 0 holds out nothing."""
    dataset_format: str = "auto"
    """auto, text, prompt-completion, source-target, messages, alpaca, sharegpt or tokenized."""
    column_mapping: dict[str, str] = field(default_factory=dict)
    """Renames the data's own columns first: {theirs: ours}."""
    text_column: str | None = None
    """The column that holds the text, where it is not called `text`."""
    label_column: str | None = None
    """The column that holds the label, where it is not called `label`."""
    max_length: int = 256
    """Longest sample in tokens."""
    long_samples: str = "split"
    """What to do with a longer sample: split (text only; other formats raise), truncate, or error."""
    train_on_prompt: bool = False
    """Whether prompt or user tokens take part in the loss."""
    mlm_probability: float = 0.15
    """masked-lm: the share of tokens that is masked."""
    preprocessing_num_workers: int | None = None
    """1 tokenises on one thread; None and larger numbers use the tokenizer's own threads (RAYON_NUM_THREADS limits
    them)."""
    seed: int = 42
    """Seeds the validation split and the masking."""
