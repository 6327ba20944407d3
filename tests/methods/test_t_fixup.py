"""T-Fixup: each weight's size by its role and the depth, and a deep model that stays finite without warm-up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from methods import loops
from thrifty.architecture import main_blocks
from thrifty.methods.initialization._branches import roles
from thrifty.methods.initialization.t_fixup import t_fixup

LAYERS = 3
MODELS: dict[str, Any] = {
    "llama": lambda n: LlamaForCausalLM(
        LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=n, num_attention_heads=4)
    ),
    "gpt2": lambda n: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=64, n_layer=n, n_head=4, n_positions=32)),
    "bert": lambda n: BertForMaskedLM(
        BertConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=n, num_attention_heads=4)
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_the_ratio_to_xavier_is_the_factor(family):
    torch.manual_seed(0)
    model = MODELS[family](LAYERS)
    t_fixup(model)
    decoder, encoder = (9 * LAYERS) ** -0.25, 0.67 * LAYERS**-0.25
    factor = encoder if family == "bert" else decoder
    block = main_blocks(model, "test").layers[1]
    for name, role in roles(block, "test").items():
        module: Any = block.get_submodule(name)
        parts = [(module.weight, 1.0 if role == "query_key" else factor)]
        if role == "qkv":  # of GPT-2's three projections in one, only the values are scaled
            parts = list(zip(module.weight.chunk(3, dim=1), (1.0, 1.0, factor), strict=True))
        for weight, expected in parts:
            xavier = math.sqrt(2 / sum(weight.shape))
            assert weight.std().item() / xavier == pytest.approx(expected, rel=0.04), name
    embedding = model.get_input_embeddings().weight
    assert embedding.std().item() == pytest.approx(decoder * 64**-0.5, rel=0.04)
    if family != "llama":
        assert model.get_output_embeddings().weight is embedding  # tied, and scaled once
    assert not any("norm" in type(m).__name__.lower() for b in main_blocks(model, "test") for m in b.modules())


def test_two_hundred_layers_stay_finite_at_the_full_rate():
    """Of this depth and without norms, an ordinary start is not finite even before the first step."""
    for prepare, finite, steps in ((t_fixup, True, 3), (_ordinary, False, 1)):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=16, n_layer=200, n_head=2, n_positions=32,
                                           resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))  # fmt: skip
        prepare(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss: Any = model(**loops.batch(model)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert all(math.isfinite(loss) for loss in losses) is finite
        assert not finite or losses[-1] < losses[0] < 6


def _ordinary(model: nn.Module) -> None:
    t_fixup(model, factor=1.0)
