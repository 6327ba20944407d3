"""Small real models, data and runs that the tests share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    TrainingArguments,
    ViTConfig,
)

import thrifty

VOCABULARY = 97


def llama(layers: int = 2, dropout: float = 0.0, **overrides: Any) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=dropout,
        **overrides,
    )
    return _build(AutoModelForCausalLM, config)


def gpt2(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=layers,
        n_head=4,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _build(AutoModelForCausalLM, config)


def bert(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _build(AutoModelForMaskedLM, config)


def vit(layers: int = 2) -> nn.Module:
    config = ViTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=3,
    )
    return _build(AutoModelForImageClassification, config)


FAMILIES = {"llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit}


def _build(auto: Any, config: Any) -> nn.Module:
    transformers.set_seed(1)
    return auto.from_config(config)


@functools.cache
def text_samples(count: int = 24, longest: int = 12) -> list[dict[str, Any]]:
    """Token samples of unequal lengths with their ids; never mutated."""
    generator = torch.Generator().manual_seed(7)
    samples = []
    for index in range(count):
        length = int(torch.randint(4, longest + 1, (1,), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        samples.append({"input_ids": ids, "labels": ids, "sample_id": index})
    return samples


@functools.cache
def image_samples(count: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    return [
        {"pixel_values": torch.randn(1, 8, 8, generator=generator), "labels": index % 3, "sample_id": index}
        for index in range(count)
    ]


def collate_text(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads to the longest sample, by position."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch: dict[str, list] = {"input_ids": [], "labels": [], "attention_mask": []}
    for sample in samples:
        pad = longest - len(sample["input_ids"])
        batch["input_ids"].append([*sample["input_ids"], *[0] * pad])
        batch["labels"].append([*sample["labels"], *[-100] * pad])
        batch["attention_mask"].append([1] * len(sample["input_ids"]) + [0] * pad)
    tensors = {key: torch.tensor(rows) for key, rows in batch.items()}
    if "sample_id" in samples[0]:
        tensors["sample_id"] = torch.tensor([sample["sample_id"] for sample in samples])
    return tensors


def collate_images(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def arguments(folder: Path | str, **overrides: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "warmup_steps": 1,
        "weight_decay": 0.1,
        "disable_tqdm": True,
        "seed": 3,
    }
    return TrainingArguments(str(folder), **{**settings, **overrides})


def trainer(
    folder: Path | str, methods: Any = (), model: nn.Module | None = None, samples: Any = None, **overrides: Any
) -> thrifty.Trainer:
    """A trainer on the smallest suitable model and data."""
    model = llama() if model is None else model
    images = "pixel_values" in __import__("inspect").signature(model.forward).parameters
    samples = samples or (image_samples() if images else text_samples())
    return thrifty.Trainer(
        model,
        arguments(folder, **overrides),
        train_dataset=samples,
        eval_dataset=samples[:4],
        data_collator=collate_images if images else collate_text,
        methods=methods,
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def losses(trained: Any) -> list[float]:
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert first.keys() == second.keys()
    for name in first:
        if atol:
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(first[name], second[name]), name
