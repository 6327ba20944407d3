"""The cells of the exactness tests: small real models, the ways to train them, and what the CPU allocator says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig

from thrifty.planner._private import profiled_allocations
from thrifty.planner.step import Step, hf_step
from thrifty.planner.tracer import forward_loss


def _llama(*, tied: bool = False) -> PreTrainedConfig:
    return transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=208,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=515,
        tie_word_embeddings=tied,
    )


CONFIGS: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "gpt2": (
        lambda: transformers.GPT2Config(n_embd=96, n_head=4, n_layer=2, vocab_size=515, n_positions=512),
        "causal-lm",
    ),
    "bert": (
        lambda: transformers.BertConfig(
            hidden_size=96, num_attention_heads=4, num_hidden_layers=2, intermediate_size=208, vocab_size=515
        ),
        "text-classification",
    ),
    "llama": (_llama, "causal-lm"),
    "qwen3": (
        lambda: transformers.Qwen3Config(
            hidden_size=96, intermediate_size=208, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
            head_dim=24, vocab_size=515,
        ),
        "causal-lm",
    ),
    "t5": (
        lambda: transformers.T5Config(d_model=96, d_ff=208, d_kv=24, num_heads=4, num_layers=2, vocab_size=515),
        "seq2seq-lm",
    ),
    "vit": (
        lambda: transformers.ViTConfig(
            hidden_size=96, intermediate_size=208, num_hidden_layers=2, num_attention_heads=4,
            image_size=48, patch_size=8,
        ),
        "image-classification",
    ),
    "mixtral": (
        lambda: transformers.MixtralConfig(
            hidden_size=96, intermediate_size=104, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
            vocab_size=515, num_local_experts=4,
        ),
        "causal-lm",
    ),
    "tied-llama": (lambda: _llama(tied=True), "causal-lm"),
}  # fmt: skip


def cell_step(name: str, **fields: Any) -> Step:
    """The step of one small model; `fields` as for `hf_step`."""
    make, task = CONFIGS[name]
    return hf_step(make(), task, dialect="cpu", **fields)


def real_peak(step: Step, batch: int, seq: int, layers: dict[str, int], *, accumulation: int = 1) -> int:
    """Trains two real steps and returns the peak of the second from the allocator's own events, in bytes.

    The base is the bytes of parameters, buffers, batch, optimizer state and (when accumulating) gradients.
    """
    assert step.build_optimizer is not None
    model = step.prepared_model(layers).to_empty(device="cpu")
    model.tie_weights()  # type: ignore[operator]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for buffer in model.buffers():
        buffer.zero_()
    optimizer = step.build_optimizer([p for p in model.parameters() if p.requires_grad])
    inputs = step.build_batch(batch, seq)

    def micro_batch() -> None:
        loss = forward_loss(step, model, inputs)
        loss.backward()

    def whole_step() -> None:
        for _ in range(accumulation):
            micro_batch()
        if step.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], step.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    whole_step()
    held: dict[int, int] = {}
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    for tensor in [*model.parameters(), *model.buffers(), *inputs.values(), *state]:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        whole_step()
    return sum(held.values()) + int(np.cumsum(profiled_allocations(profile)).max())
