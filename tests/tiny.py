"""Small real models, data and runs that the tests share."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForZeroShotImageClassification,
    BertConfig,
    CLIPConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    T5Config,
    TrainingArguments,
    ViTConfig,
    ViTMAEConfig,
)

import thrifty
from thrifty.method import registry
from thrifty.tasks.masked_image_modeling import fill_position_tables

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


def mixtral(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=64,
        attention_dropout=dropout,
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


def bert_classifier(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    return _build(AutoModelForSequenceClassification, bert(layers, dropout).config)


def vitmae(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    config = ViTMAEConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=8,
        patch_size=2,
        num_channels=1,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=32,
        hidden_dropout_prob=dropout,
    )
    model = _build(AutoModelForPreTraining, config)
    fill_position_tables(model)
    return model


def clip(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4}
    tower["attention_dropout"] = dropout
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 0}
    vision = {"image_size": 8, "patch_size": 2, "num_channels": 1}
    config = CLIPConfig(text_config={**tower, **text}, vision_config={**tower, **vision}, projection_dim=8)
    return _build(AutoModelForZeroShotImageClassification, config)


def t5(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_ff=32,
        d_kv=4,
        num_layers=layers,
        num_heads=4,
        dropout_rate=dropout,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return _build(AutoModelForSeq2SeqLM, config)


FAMILIES = {"llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit}

# The family on which a method is tested that names the task among those it works on.
BY_TASK = {
    "causal-lm": llama,
    "masked-lm": bert,
    "text-classification": bert_classifier,
    "image-classification": vit,
    "seq2seq-lm": t5,
    "masked-image-modeling": vitmae,
    "image-text": clip,
}


def task_for(*names: str) -> str | None:
    """The first task that all these methods work on; None where there is none."""
    allowed = [registry.get(name).spec.tasks or tuple(BY_TASK) for name in names if name]
    return next((task for task in (allowed[0] if allowed else BY_TASK) if all(task in a for a in allowed)), None)


def for_method(*names: str, **settings: Any) -> nn.Module:
    """The smallest model that these methods work on."""
    task = task_for(*names)
    assert task is not None, names
    if task == "image-classification":
        settings = {key: value for key, value in settings.items() if key != "dropout"}
    if "moe-distill" in names and task == "causal-lm":  # it starts from a mixture
        return mixtral(**settings)
    return BY_TASK[task](**settings)


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
    batch = {"pixel_values": torch.stack([sample["pixel_values"] for sample in samples])}
    for key in ("labels", "sample_id"):
        if key in samples[0]:
            batch[key] = torch.tensor([sample[key] for sample in samples])
    return batch


@functools.cache
def bare_images() -> list[dict[str, Any]]:
    return [{key: value for key, value in sample.items() if key != "labels"} for sample in image_samples()]


@functools.cache
def classified_texts() -> list[dict[str, Any]]:
    return [{**sample, "labels": index % 2} for index, sample in enumerate(text_samples())]


def collate_classes(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Texts with one class each."""
    batch = collate_text([{**sample, "labels": sample["input_ids"]} for sample in samples])
    return {**batch, "labels": torch.tensor([sample["labels"] for sample in samples])}


@functools.cache
def pair_samples() -> list[dict[str, Any]]:
    """Images with captions that end with token 0."""
    texts, images = text_samples(), bare_images()
    return [{**image, "input_ids": [*text["input_ids"], 0]} for text, image in zip(texts, images, strict=True)]


def collate_pairs(samples: list[dict[str, Any]]) -> dict[str, Any]:
    text = collate_text([{**sample, "labels": sample["input_ids"]} for sample in samples])
    del text["labels"]
    return {**text, **collate_images(samples), "return_loss": True}


def data_of(model: nn.Module) -> tuple[list[dict[str, Any]], Any]:
    """Samples for this model, and what collates them."""
    takes, kind = set(inspect.signature(model.forward).parameters), type(model).__name__
    if {"pixel_values", "input_ids"} <= takes:
        return pair_samples(), collate_pairs
    if "pixel_values" in takes:
        return (image_samples() if "labels" in takes else bare_images()), collate_images
    return (classified_texts(), collate_classes) if "Classification" in kind else (text_samples(), collate_text)


def fixed_inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """The same inputs every time, without labels and without chance: for comparing outputs."""
    takes = inspect.signature(model.forward).parameters
    inputs: dict[str, torch.Tensor] = {}
    if "input_ids" in takes:
        inputs["input_ids"] = torch.arange(3, 11)[None]
    if "pixel_values" in takes:
        inputs["pixel_values"] = image_samples()[0]["pixel_values"][None]
    if "noise" in takes:
        inputs["noise"] = torch.arange(16.0)[None] % 7
    if "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = torch.arange(3, 8)[None]
    return inputs


def scores_of(output: Any) -> torch.Tensor:
    """The numbers of a model's output that are compared: its logits, or its similarities."""
    return output.logits if "logits" in output else output.logits_per_text


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
    usual, collate = data_of(model)
    samples = samples or usual
    return thrifty.Trainer(
        model,
        arguments(folder, **overrides),
        train_dataset=samples,
        eval_dataset=samples[:4],
        data_collator=collate,
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
