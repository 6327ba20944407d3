"""What is trained: a model's dimensions, a task, a sequence length, and all that the user has already decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from thrifty.config import RunConfig
    from thrifty.hardware.devices import Device

TASKS = ("causal-lm", "masked-lm", "text-classification", "image-classification", "seq2seq-lm",
         "masked-image-modeling", "image-text")  # fmt: skip
IMAGES_ALONE = ("image-classification", "masked-image-modeling")
DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training run as far as its cost depends on it.

    Raises:
        InputError: The task or data type is unknown, or the sequence does not fit the model's positions.
    """

    name: str
    """What the model is called."""
    config: PretrainedConfig
    task: str
    seq_len: int
    dtype: str = "float32"
    """Data type in which the weights are held."""
    padded: bool = False
    """Whether batches hold padding, so that attention masks are needed."""
    attn_implementation: str = "sdpa"
    methods: Sequence[Any] = ()
    """The user's methods: names, `{name: {settings}}` mappings or instances."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """`TrainingArguments` fields that the user set."""
    auto_precision: bool = False
    """Whether the device decides the precision (`precision: auto`)."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InputError(
                f"unknown task{did_you_mean(str(self.task), TASKS)}",
                key="task",
                value=self.task,
                fix="one of " + ", ".join(TASKS),
            )
        if self.dtype not in DTYPES:
            raise InputError(
                f"unknown data type{did_you_mean(self.dtype, DTYPES)}",
                key="dtype",
                value=self.dtype,
                fix="one of " + ", ".join(DTYPES),
            )
        if self.seq_len < 1:
            raise InputError("must be at least 1", key="seq_len", value=self.seq_len)
        positions = positions_of(self.config)
        if self.task not in IMAGES_ALONE and isinstance(positions, int) and self.seq_len > positions > 0:
            raise InputError(
                f"the model has {positions} positions", key="seq_len", value=self.seq_len, fix=f"at most {positions}"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the model, the task and the data type."""
        from thrifty.planner.store import content_hash

        return content_hash([self.config.to_dict(), self.task, self.dtype])

    @property
    def causal(self) -> bool:
        """Whether attention looks back only."""
        return self.task == "causal-lm"

    def settled(self, device: Device) -> Workload:
        """The same run with the precision that `precision: auto` takes on a device."""
        if not self.auto_precision:
            return self
        from thrifty.hardware.precision import precision_for

        return replace(self, methods=(*self.methods, *precision_for(device)), auto_precision=False)

    def with_methods(self, methods: Sequence[Any]) -> Workload:
        """The same run with other methods."""
        return replace(self, methods=tuple(methods))


def make_workload(
    model: str | Path | Mapping[str, Any] | PretrainedConfig,
    *,
    task: str = "causal-lm",
    seq_len: int | None = None,
    dtype: str = "float32",
    padded: bool = False,
    attn_implementation: str = "sdpa",
    methods: Sequence[Any] = (),
    **arguments: Any,
) -> Workload:
    """Builds a workload.

    Args:
        model: A catalogue name, a folder or config.json, a mapping as in config.json, or a `transformers`
        configuration.
        task: One of `TASKS`.
        seq_len: Tokens a sample; default 1024 or as many positions as the model has. Images have their own.
        dtype: Of the weights.
        padded: Whether batches hold padding.
        attn_implementation: As in transformers.
        methods: As in a run file.
        **arguments: `TrainingArguments` fields.
    """
    from thrifty.planner.catalogue import make_config, resolve

    if isinstance(model, Mapping):
        config, name = make_config(dict(model)), str(model.get("model_type"))
    elif isinstance(model, (str, Path)):
        config, name = resolve(model), str(model)
    else:
        config, name = model, getattr(model, "name_or_path", "") or model.model_type
    if task in IMAGES_ALONE:
        from thrifty.planner.step import hf_step

        if not hasattr(config, "image_size") and not hasattr(config, "vision_config"):
            raise InputError("this model takes no images", key="task", value=task, fix="name the task it does")
        seq_len = hf_step(config, task).fixed_seq
    elif seq_len is None:
        positions = positions_of(config)
        seq_len = min(1024, positions) if isinstance(positions, int) and positions > 0 else 1024
    return Workload(
        name=name, config=config, task=task, seq_len=int(seq_len or 1), dtype=dtype, padded=padded,
        attn_implementation=attn_implementation, methods=tuple(methods), arguments=dict(arguments),
    )  # fmt: skip


def positions_of(config: Any) -> Any:
    """The longest text that the model takes, where its configuration says so; CLIP's is its text tower's."""
    text = getattr(config, "text_config", None)
    return getattr(config if text is None else text, "max_position_embeddings", None)


def workload_from_run(run: RunConfig) -> Workload:
    """The workload of a run file. The data is not read: the sequence length is `max_length`."""
    if run.model_name_or_path is None and run.model_config is None:
        raise InputError("planning needs a model", key="model_name_or_path", fix="name one, or give model_config")
    model = run.model_config if run.model_config is not None else run.model_name_or_path
    assert model is not None
    if isinstance(model, Mapping) and "vocab_size" not in model and run.vocab_size:
        model = {**model, "vocab_size": run.vocab_size}
    arguments = {k: v for k, v in run.arguments.items() if k not in ("output_dir",)}
    attention = arguments.pop("attn_implementation", "sdpa")
    workload = make_workload(
        model, task=run.task, seq_len=run.data.max_length, dtype="float32" if run.dtype == "auto" else run.dtype,
        attn_implementation=attention, methods=run.methods, **arguments,
    )  # fmt: skip
    return replace(workload, auto_precision=run.precision == "auto")


def parse_bytes(text: str | int | float) -> int:
    """Bytes of `24GiB`, `80 GB`, `512MiB`, or a bare number of bytes.

    Raises:
        InputError: The text is none of these.

    >>> parse_bytes("24GiB")
    25769803776
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        number, unit = float(text), ""
    else:
        stripped = str(text).strip().lower().replace(" ", "")
        digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyz")
        unit = stripped[len(digits) :]
        try:
            number = float(digits)
        except ValueError:
            number = -1.0
    if unit not in _UNITS or not number > 0 or number == float("inf"):
        raise InputError("not a size", key="memory", value=text, fix="e.g. 24GiB or 80GB")
    return round(number * _UNITS[unit])


def parse_methods(text: str) -> list[Any]:
    """Methods of a command line: names separated by commas, settings after a colon.

    A setting's key and value are separated by `=`; a comma followed by `key=value` goes on with the same method.

    >>> parse_methods("gradient-checkpointing,lora:r=32,alpha=64")
    ['gradient-checkpointing', {'lora': {'r': 32, 'alpha': 64}}]
    """
    import yaml

    found: list[tuple[str, dict[str, Any]]] = []
    for part in (p.strip() for p in text.split(",")):
        if not part:
            continue
        name, colon, setting = part.partition(":")
        if not colon and "=" in part:
            if not found:
                raise InputError(
                    "a setting without a method before it", key="methods", value=text, fix="name:key=value"
                )
            name, setting = found[-1][0], part
        else:
            found.append((name.strip(), {}))
        if setting:
            key, equals, value = setting.partition("=")
            if not equals:
                raise InputError("a setting needs a value", key="methods", value=part, fix="name:key=value")
            found[-1][1][key.strip()] = yaml.safe_load(value)
    return [{name: settings} if settings else name for name, settings in found]
