"""Compiled blocks in a dry run: what the compiler's partitioner keeps, and what a fused kernel never writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thrifty.planner._private import partitioned
from thrifty.planner.plan import estimate
from thrifty.planner.regions import _Fused

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "vocab_size": 211,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_cache")


def activations(*methods: Any) -> int:
    found = estimate(LLAMA, task="causal-lm", device="a100", seq_len=256, micro_batch=4, methods=["adamw", *methods])
    return found.breakdown["activations"]


def test_compiled_blocks_keep_less_and_checkpointed_ones_less_still() -> None:
    """`test_every_method.py` holds the peak to that of real compiled steps; it takes a minute, so `make soak` does."""
    plain, compiled = activations(), activations("compile")
    assert 0.6 * plain < compiled < 0.9 * plain
    assert activations("compile", "gradient-checkpointing") < 0.4 * compiled


def test_a_back_end_without_a_partitioner_keeps_what_the_written_model_keeps() -> None:
    assert activations({"compile": {"backend": "eager"}}) == activations()


def test_chains_of_elementwise_operations_take_no_memory_inside() -> None:
    graphs = []

    def runner(graph: Any, inputs: Any) -> Any:
        graphs.append(_Fused(graph))
        return graph

    weight = torch.randn(8, 8, requires_grad=True)

    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x * 2 + 1).exp() @ w).sum()

    partitioned(function, runner)(weight, torch.randn(4, 8))
    inside = {str(node.target).split(".")[1] for node in graphs[0].inside}
    # What the product reads is written; the sum of it reads the product, which no kernel fuses.
    assert inside == {"mul", "add", "tanh"}
