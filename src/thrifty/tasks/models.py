"""Configurations, models and tokenizers: from a local folder, from the hub, or from scratch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError, did_you_mean
from thrifty.safety.trust import check_model_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ModelConfig = Mapping[str, Any] | str | None

# Settings that configuration classes take although they are no field of theirs.
_CONFIG_EXTRAS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "num_labels", "id2label", "label2id", "dtype")
# Families whose position table begins after the padding id, as RoBERTa's does.
_OFFSET_POSITIONS = (
    "roberta",
    "camembert",
    "xlm-roberta",
    "xlm-roberta-xl",
    "data2vec-text",
    "longformer",
    "xmod",
    "ibert",
)


def load_config(
    model_name_or_path: str | None, model_config: ModelConfig, *, trust_remote_code: bool = False, **overrides: Any
) -> PreTrainedConfig:
    """Returns the model's configuration without building the model.

    Args:
        model_name_or_path: A local folder or a hub id, or None for a model from scratch.
        model_config: For a model from scratch: a mapping with `model_type`, or the path of a config.json.
        trust_remote_code: Allow configuration code from the model's folder.
        overrides: Settings that go before those of a `model_config` that does not name them, such as `vocab_size`.

    Raises:
        InputError: Neither or both are given, or one of them is at fault.
    """
    from transformers import AutoConfig

    if (model_name_or_path is None) == (model_config is None):
        raise InputError(
            "give one of model_name_or_path and model_config" + (", not both" if model_config is not None else ""),
            key="model_name_or_path",
            value=model_name_or_path,
            fix="model_config is for training from scratch, model_name_or_path for a model that exists",
        )
    if model_name_or_path is not None:
        check_model_path(model_name_or_path)
        try:
            return AutoConfig.from_pretrained(model_name_or_path, trust_remote_code=trust_remote_code)
        except Exception as error:  # hub and parser errors of many classes
            raise _unloadable("model_name_or_path", model_name_or_path, error) from error
    settings = _read_settings(model_config)
    model_type = settings.pop("model_type", None)
    if not isinstance(model_config, str):
        _check_settings(model_type, settings)
    return _new_config(model_type, {**overrides, **settings})


def _read_settings(model_config: ModelConfig) -> dict[str, Any]:
    if not isinstance(model_config, str):
        return dict(model_config or {})
    path = Path(model_config).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})",
            key="model_config",
            value=model_config,
            fix="a mapping or a config.json",
        ) from error
    except ValueError as error:
        raise InputError(
            f"broken JSON ({error})", key="model_config", value=model_config, fix="repair that file"
        ) from error
    if not isinstance(settings, dict):
        raise InputError("not a JSON object", key="model_config", value=model_config, fix="a model's config.json")
    return settings


def _new_config(model_type: Any, settings: dict[str, Any]) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    known_types = list(CONFIG_MAPPING.keys())
    if model_type not in known_types:
        near = did_you_mean(str(model_type), known_types) if model_type else ""
        raise InputError(
            f"model_type is missing or unknown{near}", key="model_config.model_type", value=model_type, fix="e.g. llama"
        )
    try:
        return AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # configuration classes validate in many ways
        raise InputError(
            f"the configuration is refused ({_first_lines(error)})",
            key="model_config",
            value={"model_type": model_type, **settings},
            fix=f"see the settings of {CONFIG_MAPPING[str(model_type)].__name__}",
        ) from error


def _check_settings(model_type: Any, settings: Mapping[str, Any]) -> None:
    """A configuration class stores whatever it is given, so that a misspelt name would be lost without a word."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING.keys():  # noqa: SIM118  (a lazy mapping)
        return  # answered where the configuration is made
    cls = CONFIG_MAPPING[model_type]
    plain = cls()
    known = {*plain.to_dict(), *getattr(cls, "attribute_map", {}), *_CONFIG_EXTRAS}
    for name in settings:
        if name not in known and not hasattr(plain, name):
            raise InputError(
                f"{cls.__name__} has no such setting{did_you_mean(name, known)}",
                key=f"model_config.{name}",
                value=settings[name],
                fix="remove it or correct its name",
            )
        size = name.startswith("num_") or name.endswith(("_size", "_embeddings"))
        if size and isinstance(settings[name], int) and settings[name] < 0:
            raise InputError("is negative", key=f"model_config.{name}", value=settings[name], fix="a positive number")


def check_model_path(name: str, key: str = "model_name_or_path") -> None:
    """Tells a missing folder from a hub id.

    Raises:
        InputError: `name` is a path, but no folder.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists()
    if is_path:
        raise InputError("no such folder", key=key, value=name, fix="a folder with config.json, or a hub id")


def build(
    auto_class: Any,
    model_name_or_path: str | None,
    config: PreTrainedConfig,
    *,
    seed: int,
    dtype: str | torch.dtype = "float32",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    notes: list[str] | None = None,
    new_head: bool = False,
) -> PreTrainedModel:
    """Loads the weights (safetensors only), or draws them with `seed` where there are none.

    Args:
        auto_class: The `transformers.AutoModelFor...` class of the task.
        model_name_or_path: Where the weights are, or None for a model from scratch.
        config: What `load_config` returned, adapted to the data.
        seed: Seeds what is drawn: all weights from scratch, or a head that the folder lacks. The global random state
            is left as it was.
        dtype: Of the weights. float32 is what mixed-precision training needs, whatever the folder holds.
        trust_remote_code: Allow model code from the model's folder.
        attn_implementation: `sdpa`, `eager`, ... as in transformers.
        notes: Gets one line on weights that were drawn although a folder was given.
        new_head: The data has other classes than the folder's head, so the head is drawn anew.

    Raises:
        InputError: There are no such weights, or they do not fit the task.
    """
    extra: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    if model_name_or_path is None:
        try:
            with seeded(seed):
                model = auto_class.from_config(
                    config, dtype=_dtype(dtype), trust_remote_code=trust_remote_code, **extra
                )
        except (ValueError, TypeError, KeyError, ImportError, AssertionError, RuntimeError, ZeroDivisionError) as error:
            raise InputError(
                f"no {auto_class.__name__} can be built from this configuration ({_first_lines(error)})",
                key="model_config",
                value=config.model_type,
                fix="sizes that fit together (hidden_size a multiple of num_attention_heads), or another model_type",
            ) from error
        return model
    check_model_folder(model_name_or_path)
    try:
        with seeded(seed):
            model, info = auto_class.from_pretrained(
                model_name_or_path,
                config=config,
                dtype=_dtype(dtype),
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=new_head,
                **extra,
            )
    except Exception as error:  # hub, safetensors and shape errors of many classes
        raise _unloadable("model_name_or_path", model_name_or_path, error) from error
    drawn = sorted({*info["missing_keys"], *(str(entry[0]) for entry in info["mismatched_keys"])})
    if drawn and notes is not None:
        shown = ", ".join(drawn[:4]) + (f" and {len(drawn) - 4} more" if len(drawn) > 4 else "")
        notes.append(f"not in {model_name_or_path}, so drawn with seed {seed}: {shown}")
    return model


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise InputError("unknown", key="dtype", value=dtype, fix="float32, bfloat16 or float16")
    return found


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's generator of the CPU, on which models are initialised, and puts its state back afterwards."""
    import torch

    state = torch.random.get_rng_state()
    torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a local folder or the hub.

    Raises:
        InputError: There is none, or it is empty.
    """
    from transformers import AutoTokenizer

    check_model_path(name, "tokenizer_name_or_path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # hub and parser errors of many classes
        raise _unloadable("tokenizer_name_or_path", name, error) from error
    if len(tokenizer) < 2:
        raise InputError(
            f"the vocabulary has {len(tokenizer)} entries",
            key="tokenizer_name_or_path",
            value=name,
            fix="give a folder with tokenizer.json",
        )
    return tokenizer


def positions(config: PreTrainedConfig) -> int | None:
    """Returns the longest sequence the model takes, in tokens, or None where the configuration states no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    if config.model_type in _OFFSET_POSITIONS:
        return limit - (config.pad_token_id or 0) - 1
    return limit


def _unloadable(key: str, name: str, error: Exception) -> InputError:
    local = Path(name).expanduser().is_dir()
    text = _first_lines(error)
    fix = (
        "check the folder's files"
        if local
        else "check the hub id and the network (HF_HUB_OFFLINE), or give a local folder"
    )
    if local and not list(Path(name).expanduser().glob("*.safetensors")) and key == "model_name_or_path":
        fix = "give weights in safetensors (model.save_pretrained writes them); .bin files may run code and are refused"
    if "size mismatch" in text or "mismatched" in text:
        fix = "the folder's weights do not fit its config.json or this task"
    return InputError(f"cannot be loaded ({text})", key=key, value=name, fix=fix)


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] or type(error).__name__
