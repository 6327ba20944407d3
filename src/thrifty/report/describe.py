"""What a summary says, put into words for the report and the model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thrifty.report import text


@dataclass(frozen=True)
class Part:
    """One method of the recipe, as people read it. Texts may be empty."""

    name: str
    title: str
    settings: str
    reason: str
    source: str
    facts: str = ""


def recipe_parts(summary: Mapping[str, Any]) -> list[Part]:
    """Returns the methods in order; a method given by name alone has only a name and a title."""
    parts = []
    for entry in summary.get("methods") or []:
        given = entry if isinstance(entry, Mapping) else {"name": str(entry)}
        name = str(given.get("name", ""))
        source = given.get("source") or ""
        parts.append(
            Part(
                name=name,
                title=str(given.get("title") or name),
                settings=_settings(given.get("settings")),
                reason=str(given.get("reason") or ""),
                source=source if isinstance(source, str) else "; ".join(map(str, source)),
                facts=str(given.get("facts") or ""),
            )
        )
    return parts


def loading_code(summary: Mapping[str, Any], folder: str) -> str:
    """Returns Python code that loads the trained model from `folder`, for the report and the model card."""
    classes = {
        "causal-lm": ("AutoModelForCausalLM", "AutoTokenizer"),
        "masked-lm": ("AutoModelForMaskedLM", "AutoTokenizer"),
        "text-classification": ("AutoModelForSequenceClassification", "AutoTokenizer"),
        "image-classification": ("AutoModelForImageClassification", "AutoImageProcessor"),
        "seq2seq-lm": ("AutoModelForSeq2SeqLM", "AutoTokenizer"),
        "masked-image-modeling": ("AutoModelForPreTraining", "AutoImageProcessor"),
        "image-text": ("AutoModelForZeroShotImageClassification", "AutoProcessor"),
    }
    model, processor = classes.get(str(summary.get("task")), ("AutoModel", "AutoTokenizer"))
    variable = {"AutoImageProcessor": "image_processor", "AutoProcessor": "processor"}.get(processor, "tokenizer")
    trust = ", trust_remote_code=True" if summary.get("saves_as") == "remote_code" else ""
    if summary.get("saves_as") == "peft":
        start = f"from peft import AutoPeft{model[4:]}\nfrom transformers import {processor}\n"
        model = f"AutoPeft{model[4:]}"
    else:
        start = f"from transformers import {', '.join(sorted((model, processor)))}\n"
    return (
        f"{start}\nmodel = {model}.from_pretrained({json.dumps(folder)}{trust})\n"
        f"{variable} = {processor}.from_pretrained({json.dumps(folder)})"
    )


def loss_unit(task: object) -> str:
    """Returns the unit of a task's loss; empty where it has none that people name."""
    return "nats per token" if task in ("causal-lm", "masked-lm", "seq2seq-lm") else ""


def environment_entries(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values of hardware and versions."""
    hardware = summary.get("hardware")
    entries: list[tuple[str, str]] = []
    if isinstance(hardware, dict):
        for key, value in hardware.items():
            entries.append((key.removesuffix("_bytes").replace("_", " "), _shown(key, value)))
    elif hardware:
        entries.append(("hardware", str(hardware)))
    return entries + [(str(k), str(v)) for k, v in (summary.get("versions") or {}).items()]


def _shown(key: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        devices = (
            f"{item.get('name')}, {text.size(item.get('memory_bytes', 0))}" if isinstance(item, Mapping) else str(item)
            for item in value
        )
        return "; ".join(devices) or "none"
    return text.size(value) if key.endswith("_bytes") and isinstance(value, int) else text.number(value)


def _settings(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return str(value or "")
