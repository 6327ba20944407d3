"""Faults that tests of the safety room inject, and the tiny real models they are injected into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from faults import InjectOom


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THRIFTY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
