"""Writes the small modelling file with which a changed architecture loads in an interpreter without thrifty.

The folder's `config.json` gets a `model_type` of its own on purpose: with the old one, `from_pretrained` without
`trust_remote_code` would build the unchanged architecture and give other logits without a word.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import transformers
from safetensors import safe_open
from torch import nn
from transformers.models.auto import modeling_auto

from thrifty.errors import NotApplicable


def auto_class_name(model: nn.Module) -> str:
    """The Auto class through which a model of this class is loaded, e.g. `AutoModelForCausalLM`."""
    name = type(model).__name__
    order = (
        "Seq2SeqLM",
        "CausalLM",
        "MaskedLM",
        "SequenceClassification",
        "ImageClassification",
        "ZeroShotImageClassification",
    )
    tables = {
        "CausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "MaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "SequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "ImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "ZeroShotImageClassification": modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "Seq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    for kind in order:
        if any(name == known or (isinstance(known, tuple) and name in known) for known in tables[kind].values()):
            return f"AutoModelFor{kind}"
    return "AutoModel"


def check_remote_code(model: nn.Module, who: str) -> None:
    """Raises `NotApplicable` (for the method `who`) where no modelling file could be written for this model."""
    name, config = type(model).__name__, type(getattr(model, "config", None)).__name__
    if getattr(transformers, name, None) is not type(model) or not hasattr(transformers, config):
        raise NotApplicable(
            f"{who}: the result is saved with a modelling file that builds on the model's class, and {name} is not a "
            "public class of transformers",
            fix=f"use a model of a class that transformers exports, or remove {who} from the methods",
        )


def write_remote_code(
    folder: str, model: nn.Module, *, kind: str, body: str, settings: dict[str, Any], auto_class: str | None = None
) -> None:
    """Writes `modeling_{kind}.py` into a folder that holds a saved model, and names it in `config.json`.

    Args:
        folder: Where `save_pretrained` wrote.
        model: The model that was saved; its class is the base of the written one.
        kind: A word for the architecture, e.g. `rezero`.
        body: Source of a function `change(model, settings)` that turns the base model into the changed one.
        settings: JSON-ready; stored in the configuration under `kind`.
        auto_class: The Auto class; found by the model's class otherwise.
    """
    model_config: Any = model.config
    _save_live_names(folder, model)
    base, config_base = type(model).__name__, type(model_config).__name__
    title = kind.replace("-", " ").title().replace(" ", "")
    module = f"modeling_{kind.replace('-', '_')}"
    source = _TEMPLATE.format(
        kind=kind,
        title=title,
        base=base,
        config_base=config_base,
        model_type=model_config.model_type,
        body=body.strip(),
    )
    Path(folder, f"{module}.py").write_text(source, encoding="utf-8")
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    config["model_type"] = f"{kind}-{model_config.model_type}"
    config["architectures"] = [f"{title}{base}"]
    config["auto_map"] = {
        "AutoConfig": f"{module}.{title}{config_base}",
        auto_class or auto_class_name(model): f"{module}.{title}{base}",
    }
    config[kind] = settings
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2, sort_keys=True)
        file.write("\n")


def _save_live_names(folder: str, model: Any) -> None:
    """Saves the weights again under the names they have in the model, where `save_pretrained` used older ones.

    It renames the weights of some families (ViT). `from_pretrained` would rename them back by the `model_type`, which
    is another one now.
    """
    saved: set[str] = set()
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            saved |= set(file.keys())
    if not saved <= set(model.state_dict()):
        model.save_pretrained(folder, save_original_format=False)


_TEMPLATE = '''"""{title}{base}: loads with trust_remote_code=True. Written by thrifty; needs transformers only."""

import torch
from torch import nn
from transformers import {base}, {config_base}


{body}


class {title}{config_base}({config_base}):
    model_type = "{kind}-{model_type}"


class {title}{base}({base}):
    config_class = {title}{config_base}

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        change(self, getattr(config, "{kind}"))
'''
