"""What a task is: its model class, its processor, its data, its loss and its metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from thrifty.errors import InputError
from thrifty.tasks import models

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from thrifty.data.options import DataOptions
    from thrifty.data.sources import Sources

Processor = Any
"""A tokenizer, or an image processor."""


@dataclass
class TaskData:
    """Data ready for training, with everything a `transformers.Trainer` takes."""

    train_dataset: Dataset
    """Map-style, tokenised, with an int64 column `sample_id`."""
    eval_dataset: Dataset | None
    data_collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
    compute_metrics: Callable[[Any], dict[str, float]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    """Reduces logits to a few numbers a sample, so that evaluation never gathers logits."""
    eval_bytes: int | None = None
    """UTF-8 bytes of the validation text that is predicted: bits per byte = `eval_tokens` * mean nll / ln 2 /
    `eval_bytes`."""
    eval_tokens: int | None = None
    """Tokens that are predicted in one pass over the validation data."""
    train_tokens: int | None = None
    """Tokens that are trained on in one pass over the training data."""
    label_names: list[str] | None = None
    """Classification: the classes by index."""
    notes: list[str] = field(default_factory=list)
    """Lines for the log: what was detected, dropped or decided."""


@dataclass(frozen=True)
class Sample:
    """One decoded sample."""

    parts: list[tuple[str, bool]]
    """Text and whether it is trained on, in order."""
    label: str | None = None
    """Classification: the class."""

    def __str__(self) -> str:
        body = "".join(f"⟦{text}⟧" if trained else text for text, trained in self.parts)
        return body if self.label is None else f"{body}\n-> {self.label}"


class Task(ABC):
    """One kind of training. A task has no state; one instance serves every run.

    The order of calls: `load_config`, `load_processor`, `prepare`, `build_model`, `validate` (`thrifty.tasks.load`
    makes them all).
    """

    name: ClassVar[str]
    """As written under the key `task`."""
    auto_name: ClassVar[str]
    """The name of the `transformers.AutoModelFor...` class."""
    auto_table: ClassVar[str]
    """The middle of the name of transformers' table of that class, `MODEL_FOR_..._MAPPING_NAMES`."""
    token_unit: ClassVar[str] = "tokens"
    """What `count_tokens` counts."""
    loss_without_labels: ClassVar[bool] = False
    """Whether the model computes its loss from its inputs alone."""

    def auto_class(self) -> Any:
        """Returns the `transformers.AutoModelFor...` class."""
        import transformers

        return getattr(transformers, self.auto_name)

    def does(self, classes: set[str]) -> bool:
        """Whether a model whose class and base classes have these names is one of this task."""
        from transformers.models.auto import modeling_auto

        known: set[str] = set()
        for value in getattr(modeling_auto, f"MODEL_FOR_{self.auto_table}_MAPPING_NAMES").values():
            known.update([value] if isinstance(value, str) else value)
        return bool(classes & known)

    def load_config(
        self,
        model_name_or_path: str | None,
        model_config: models.ModelConfig,
        *,
        trust_remote_code: bool = False,
    ) -> PreTrainedConfig:
        """Returns the model's configuration, before the data is known. See `thrifty.tasks.models.load_config`."""
        return models.load_config(model_name_or_path, model_config, trust_remote_code=trust_remote_code)

    def build_model(
        self,
        model_name_or_path: str | None,
        model_config: models.ModelConfig,
        *,
        seed: int,
        processor: Processor = None,
        label_names: list[str] | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        dtype: str | torch.dtype = "float32",
        notes: list[str] | None = None,
    ) -> PreTrainedModel:
        """Builds or loads the model.

        Args:
            model_name_or_path: A local folder or a hub id, or None.
            model_config: For a model from scratch: a mapping with `model_type`, or the path of a config.json. Settings
                it does not name follow the data: `vocab_size`, the special token ids, the labels.
            seed: Seeds all weights that are drawn.
            processor: The tokenizer or image processor that the model will be trained with.
            label_names: Classification: the classes.
            trust_remote_code: Allow model code from the model's folder.
            attn_implementation: As in transformers.
            dtype: Of the weights.
            notes: Gets lines on what was drawn.

        Raises:
            InputError: The model cannot be built or loaded, or does not fit the processor or the labels.
        """
        overrides = {} if model_name_or_path is not None else self.config_overrides(processor)
        config = models.load_config(model_name_or_path, model_config, trust_remote_code=trust_remote_code, **overrides)
        new_head = self.adapt_config(config, processor, label_names, from_scratch=model_name_or_path is None)
        model = models.build(
            self.auto_class(),
            model_name_or_path,
            config,
            seed=seed,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            notes=notes,
            new_head=new_head,
        )
        self.adapt_model(model, processor)
        return model

    def config_overrides(self, processor: Processor) -> dict[str, Any]:
        """Returns settings that a model from scratch takes from the processor, unless its `model_config` names them."""
        return {}

    def adapt_config(
        self, config: PreTrainedConfig, processor: Processor, label_names: list[str] | None, *, from_scratch: bool
    ) -> bool:
        """Makes `config` fit the processor and the labels. Returns whether a loaded head must be drawn anew."""
        return False

    def adapt_model(self, model: PreTrainedModel, processor: Processor) -> None:
        """Changes what must be changed in a model that has been built."""
        return

    @abstractmethod
    def load_processor(
        self,
        processor_name_or_path: str | None,
        *,
        config: PreTrainedConfig | None = None,
        texts: Callable[[], list[str]] | None = None,
        vocab_size: int | None = None,
        trust_remote_code: bool = False,
        notes: list[str] | None = None,
    ) -> Processor:
        """Loads the tokenizer or image processor, or makes one for a model from scratch.

        Args:
            processor_name_or_path: A local folder or a hub id; None makes one.
            config: The model's configuration (an image processor's size follows it).
            texts: Called for the training text where a tokenizer must be trained.
            vocab_size: Entries of a trained tokenizer.
            trust_remote_code: Allow tokenizer code from the folder.
            notes: Gets lines on what was made or picked.
        """

    @abstractmethod
    def prepare(
        self,
        options: DataOptions,
        processor: Processor,
        config: PreTrainedConfig | None = None,
        *,
        sources: Sources | None = None,
    ) -> TaskData:
        """Reads, formats and tokenises the data.

        Args:
            options: Where the data is and how to read it.
            processor: What `load_processor` returned.
            config: The model's configuration; checks the lengths and the labels against it where given.
            sources: The data, where it has been read already (`thrifty.data.sources.load_sources`).

        Raises:
            InputError: The data is at fault, or does not fit the model.
        """

    def validate(self, model: PreTrainedModel, data: TaskData, processor: Processor) -> None:
        """Checks that model, data and processor fit together.

        Raises:
            InputError: The data is empty, or does not fit.
        """
        if len(data.train_dataset) == 0:
            raise InputError("the training data is empty", key="train_file", fix="give records to train on")

    @abstractmethod
    def decoded_sample(self, data: TaskData, processor: Processor, index: int = 0) -> Sample:
        """Returns a training sample as a person would read it, with what of it is trained on."""

    @abstractmethod
    def per_sample_loss(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Returns the mean loss of each sample, float32 of shape (B,). No gradient is required of it.

        Args:
            model: The model, in whichever mode the caller wants.
            inputs: A collated batch on the model's device. `sample_id` is ignored.
        """

    def count_tokens(self, batch: Mapping[str, Any]) -> int:
        """Returns how many `token_unit` a batch holds, padding not counted."""
        mask = batch.get("attention_mask")
        return int(mask.sum()) if mask is not None else int(batch["input_ids"].numel())


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that every token has an embedding.

    Raises:
        InputError: The model's vocabulary is smaller than the tokenizer's.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])  # pyright: ignore
    if len(tokenizer) > rows:
        raise InputError(
            f"the tokenizer has {len(tokenizer)} entries, but the model has embeddings for {rows}",
            key="model_config.vocab_size",
            value=rows,
            fix=f"vocab_size: {len(tokenizer)} for a model from scratch, or the model's own tokenizer",
        )


def check_positions(config: PreTrainedConfig | None, options: DataOptions) -> None:
    """Checks `max_length` against the positions of the model.

    Raises:
        InputError: Samples could be longer than the model can take.
    """
    limit = models.positions(config) if config is not None else None
    if limit is not None and options.max_length > limit:
        raise InputError(
            f"the model has positions for {limit} tokens",
            key="max_length",
            value=options.max_length,
            fix=f"at most {limit}",
        )


def forward_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch without what a model's forward does not take: `labels` and `sample_id`."""
    return {name: value for name, value in inputs.items() if name not in ("labels", "sample_id")}


def first_logits(logits: Any) -> torch.Tensor:
    """Returns the logits of a model that may give more beside them."""
    return logits[0] if isinstance(logits, (tuple, list)) else logits
