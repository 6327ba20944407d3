"""What one training step is made of, as callables: the planner dry-runs it without knowing any method by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from thrifty.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Dialect = Literal["cuda", "cpu"]
Attention = Literal["flash", "efficient", "math"]
Batch = dict[str, torch.Tensor]

# Names under which configurations keep the number of equal blocks (`attribute_map` covers n_layer and the like).
_COUNT_NAMES = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
_SUB_CONFIGS = ("text_config", "vision_config", "encoder", "decoder")


def outputs_loss(model: nn.Module, inputs: Batch) -> torch.Tensor:
    """Returns the loss that a Hugging Face model computes itself from the labels in `inputs`, or without any (CLIP)."""
    asks = "return_loss" in inspect.signature(model.forward).parameters
    return model(**inputs, return_loss=True).loss if asks else model(**inputs).loss


@dataclass(frozen=True, kw_only=True)
class Step:
    """One micro-batch of training and the optimizer step after it.

    Attributes:
        build_model: Builds the model, on `meta`, with the given number of repeated blocks. It is called with small
            counts;
            the cost is extrapolated to `layers`.
        layers: The counts that the user's model has, by name, e.g. `{"num_hidden_layers": 32}`.
        units: The period of each count where neighbouring blocks differ in turn (Gemma 3: 6). Default 1.
        build_batch: Makes one micro-batch from (batch size, sequence length).
        transform_model: What is done to the model before the optimizer exists (adapters, freezing).
        compute_loss: Forward pass and loss.
        build_optimizer: Makes the optimizer from the trainable parameters; None for none.
        autocast: Data type of mixed precision, or None.
        fp32_outputs: Whether the outputs are converted to float32 after an autocast forward, as accelerate does.
        checkpointing: Whether every block is recomputed in the backward pass.
        dialect: Whose kernels to trace: those of CUDA or those of the CPU.
        attention: Which SDPA kernel CUDA would choose.
        padded: Whether the batch holds padding, so that attention masks are really built.
        clip_grad_norm: Largest norm of the gradient, or None for no clipping.
        fixed_seq: The only sequence length there is (images), or None.
        seq_breaks: Sequence lengths at which the graph changes (a sliding window).
        seq_limit: The longest sequence that the model can take (learned positions), or None.
        warm_up: Whether a whole step must run before the traced one, because hooks on the model make state.
        least_blocks: The fewest blocks to trace: three where a middle one has events that neither end has.
    """

    build_model: Callable[[Mapping[str, int]], nn.Module]
    layers: Mapping[str, int]
    build_batch: Callable[[int, int], Batch]
    units: Mapping[str, int] = field(default_factory=dict)
    transform_model: Callable[[nn.Module], nn.Module | None] | None = None
    compute_loss: Callable[[nn.Module, Batch], torch.Tensor] = outputs_loss
    build_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    autocast: torch.dtype | None = None
    fp32_outputs: bool = False
    checkpointing: bool = False
    dialect: Dialect = "cuda"
    attention: Attention = "flash"
    padded: bool = False
    clip_grad_norm: float | None = None
    fixed_seq: int | None = None
    seq_breaks: tuple[int, ...] = ()
    seq_limit: int | None = None
    warm_up: bool = False
    least_blocks: int = 2

    def prepared_model(self, counts: Mapping[str, int]) -> nn.Module:
        """Builds the model with `counts` blocks and does to it all that training would do before the first step."""
        model = self.build_model(counts)
        if self.transform_model is not None:
            model = self.transform_model(model) or model
        if self.checkpointing:
            enable_checkpointing(model)
        model.train()
        return model

    def base_counts(self) -> dict[str, int]:
        """Returns the smallest counts that still show a first, a middle and a last block, congruent to `layers`."""
        base = {}
        for name, full in self.layers.items():
            unit = self.units.get(name, 1)
            least = max(self.least_blocks, unit + 1 if unit > 1 else 2)
            base[name] = min(full, least + (full - least) % unit)
        return base


def enable_checkpointing(model: nn.Module) -> None:
    """Turns on the recomputation of every block, in the form that also works with frozen inputs (adapters)."""
    from thrifty._hf import enable_checkpointing as enable

    enable(model, {"use_reentrant": False})
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    if frozen and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()  # type: ignore[operator]


def layer_counts(config: PreTrainedConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the numbers of repeated blocks of a configuration and the period of each.

    Keys are paths inside the configuration: `num_hidden_layers`, `vision_config.num_hidden_layers`, ...
    """
    counts: dict[str, int] = {}
    units: dict[str, int] = {}
    for prefix, part in _parts(config):
        names = [name for name in _COUNT_NAMES if isinstance(getattr(part, name, None), int)]
        if part.model_type in ("bart", "mbart", "marian", "pegasus", "blenderbot", "whisper"):
            names = ["encoder_layers", "decoder_layers"]
        elif "num_decoder_layers" in names:
            names = ["num_layers", "num_decoder_layers"]
        elif "num_hidden_layers" in names:
            names = ["num_hidden_layers"]
        for name in names:
            counts[prefix + name] = int(getattr(part, name))
            kinds = getattr(part, "layer_types", None)
            if isinstance(kinds, list) and len(kinds) == counts[prefix + name]:
                units[prefix + name] = _period(kinds)
    if not counts:
        raise InputError(
            "no number of layers found in the configuration",
            key="model_type",
            value=config.model_type,
            fix="use a text or vision Transformer whose configuration has num_hidden_layers",
        )
    return counts, units


def with_counts(config: PreTrainedConfig, counts: Mapping[str, int]) -> PreTrainedConfig:
    """Returns a copy of `config` with other numbers of blocks; lists with one entry a block are fitted."""
    config = deepcopy(config)
    for prefix, part in _parts(config):
        for name in _COUNT_NAMES:
            if prefix + name not in counts:
                continue
            old, new = getattr(part, name), counts[prefix + name]
            for key, value in vars(part).items():
                if isinstance(value, list) and len(value) == old and old != new:
                    unit = _period(value)
                    setattr(part, key, [value[i % unit] if i >= old else value[i] for i in range(new)])
            setattr(part, name, new)
    return config


def hf_step(
    config: PreTrainedConfig,
    task: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    padded: bool = False,
    **fields: Any,
) -> Step:
    """Makes the step that trains a Hugging Face model on one of the tasks.

    Args:
        config: Configuration of the full model.
        task: One of `thrifty.tasks`.
        dtype: Data type of the weights.
        attn_implementation: `sdpa` or `eager`.
        padded: Whether the batch holds padding.
        **fields: Further fields of `Step`.

    Raises:
        InputError: The task is unknown, or the configuration has no repeated blocks.
    """
    factory = model_factory(task)
    counts, units = layer_counts(config)

    def build_model(counts: Mapping[str, int]) -> nn.Module:
        small = with_counts(config, counts)
        # The cache of keys and values is for generation; Trainer turns it off.
        for _, part in _parts(small):
            part.use_cache = False
        if task == "seq2seq-lm" and getattr(small, "decoder_start_token_id", None) is None:
            small.decoder_start_token_id = 0
        with torch.device("meta"):
            return factory.from_config(small, dtype=dtype, attn_implementation=attn_implementation)

    settings: dict[str, Any] = {
        "layers": counts,
        "units": {name: unit for name, unit in units.items() if unit > 1},
        "build_batch": batch_builder(config, task),
        "fixed_seq": _image_tokens(config) if task in ("image-classification", "masked-image-modeling") else None,
        "seq_breaks": _windows(config),
        "seq_limit": getattr(getattr(config, "text_config", config), "max_position_embeddings", None),
    }
    return Step(build_model=build_model, padded=padded, **(settings | fields))


def model_factory(task: str) -> Any:
    """The `transformers` auto class that builds a task's model.

    Raises:
        InputError: The task is unknown.
    """
    import transformers

    if task not in _TASKS:
        raise InputError(
            f"unknown task{did_you_mean(task, _TASKS)}", key="task", value=task, fix=f"one of {list(_TASKS)}"
        )
    return getattr(transformers, _TASKS[task])


def batch_builder(config: PreTrainedConfig, task: str) -> Callable[[int, int], Batch]:
    """Returns a function from (batch size, sequence length) to the batch that the task's collator would make.

    Shapes: `input_ids`, `attention_mask` and token labels (batch, seq) int64; class labels (batch,); `pixel_values`
    (batch, channels, size, size) float32, whatever the sequence length.
    """

    def ids(batch: int, seq: int) -> torch.Tensor:
        return torch.ones(batch, seq, dtype=torch.int64)

    def token_labels(batch: int, seq: int) -> Batch:
        return {"input_ids": ids(batch, seq), "attention_mask": ids(batch, seq), "labels": ids(batch, seq)}

    def class_labels(batch: int, seq: int) -> Batch:
        inputs = {"input_ids": ids(batch, seq), "attention_mask": ids(batch, seq)}
        return inputs | {"labels": torch.zeros(batch, dtype=torch.int64)}

    def image_labels(batch: int, seq: int) -> Batch:
        part = getattr(config, "vision_config", config)
        size = part.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = torch.zeros(batch, getattr(part, "num_channels", 3), height, width)
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.int64)}

    def images_alone(batch: int, seq: int) -> Batch:
        return {"pixel_values": image_labels(batch, seq)["pixel_values"]}

    def pairs(batch: int, seq: int) -> Batch:
        return images_alone(batch, seq) | {"input_ids": ids(batch, seq)}

    builders = {
        "text-classification": class_labels,
        "image-classification": image_labels,
        "masked-image-modeling": images_alone,
        "image-text": pairs,
    }
    return builders.get(task, token_labels)


_TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-image-modeling": "AutoModelForPreTraining",
    "image-text": "AutoModelForZeroShotImageClassification",
}


def _parts(config: PreTrainedConfig) -> list[tuple[str, PreTrainedConfig]]:
    """The configuration and its sub-configurations, each with the prefix of its keys."""
    parts = [("", config)]
    for name in _SUB_CONFIGS:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "model_type") and part is not config:
            parts.append((f"{name}.", part))
    return parts


def _period(values: list[Any]) -> int:
    """The shortest period of a list (a last incomplete period is allowed); its length if it never repeats."""
    for unit in range(1, len(values)):
        if all(values[i] == values[i - unit] for i in range(unit, len(values))):
            return unit
    return max(1, len(values))


def _windows(config: PreTrainedConfig) -> tuple[int, ...]:
    found = {getattr(part, "sliding_window", None) for _, part in _parts(config)}
    return tuple(sorted(window for window in found if isinstance(window, int) and window > 0))


def _image_tokens(config: PreTrainedConfig) -> int:
    part = getattr(config, "vision_config", config)
    size, patch = part.image_size, getattr(part, "patch_size", 16)
    pair = [size, size] if isinstance(size, int) else list(size)
    patches = [patch, patch] if isinstance(patch, int) else list(patch)
    return (pair[0] // patches[0]) * (pair[1] // patches[1]) + 1
