"""Faults that tests of the safety room inject, and the tiny real models they are injected into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM


class InjectOom(TorchDispatchMode):
    """Raises an out-of-memory error at the n-th operation (1-based) that allocates, forward and backward alike."""

    def __init__(self, at_allocation: int, error: BaseException | None = None, times: int = 1) -> None:
        super().__init__()
        self.at, self.error, self.count, self.left = at_allocation, error, 0, times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views_or_writes = func.is_view or func._schema.is_mutable
        if isinstance(out, torch.Tensor) and not views_or_writes:
            self.count += 1
            if self.left and self.count >= self.at:
                self.left -= 1
                self.at = 1
                raise self.error or torch.OutOfMemoryError("Tried to allocate 20.00 MiB. GPU 0 is full (injected)")
        return out


@pytest.fixture
def inject_oom() -> Callable[..., InjectOom]:
    return InjectOom


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, **heads}
    settings: dict[str, Any] = {**sizes, "vocab_size": 97, "max_position_embeddings": 64, "use_cache": False, **changes}
    return LlamaForCausalLM(LlamaConfig(**settings))


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def make_llama() -> Callable[..., LlamaForCausalLM]:
    return tiny_llama
