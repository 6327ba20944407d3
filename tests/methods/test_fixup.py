"""Fixup: the identity at the start, and first updates that do not grow with depth."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from methods import loops
from thrifty.architecture import block_linears, branch_outputs, main_blocks
from thrifty.methods.initialization.fixup import fixup


def _hidden(model: Any, batch: Any) -> torch.Tensor:
    """What the last block gives out."""
    caught: list[Any] = []
    last = list(main_blocks(model, "test"))[-1]
    handle = last.register_forward_hook(lambda m, i, o: caught.append(o[0] if isinstance(o, tuple) else o))
    model(**batch)
    handle.remove()
    return caught[0]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_blocks_are_the_identity_and_the_loss_is_that_of_guessing(family):
    model: Any = tiny.FAMILIES[family](3)
    torch.manual_seed(0)
    fixup(model)
    batch = loops.batch(model)
    caught: list[torch.Tensor] = []
    main_blocks(model, "test").layers[0].register_forward_pre_hook(
        lambda m, a, k: caught.append(a[0] if a else k["hidden_states"]), with_kwargs=True
    )
    assert torch.equal(_hidden(model.eval(), batch), caught[0])
    if family in ("llama", "vit"):  # heads of their own; the others are tied to the embeddings
        assert not model(**batch).logits.any()
        assert float(model(**batch).loss.detach()) == pytest.approx(math.log(97 if family == "llama" else 3), rel=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_weights_are_drawn_by_depth(family):
    model: Any = tiny.FAMILIES[family](4)
    torch.manual_seed(0)
    fixup(model)
    ends = branch_outputs(main_blocks(model, "test").layers[0], "test")
    inside: dict[str, list[torch.Tensor]] = {"attention": [], "ffn": []}
    for name, module in block_linears(main_blocks(model, "test")).items():
        if any(name.endswith(end) for end in ends):
            assert not module.weight.any()  # type: ignore[union-attr, operator]
        else:
            inside["attention" if "att" in name else "ffn"].append(module.weight.detach().flatten())  # type: ignore[union-attr]
        assert module.bias is None or not module.bias.any()  # type: ignore[union-attr, operator]
    factor = 8**-0.5  # 4 blocks, 8 branches
    assert torch.cat(inside["attention"]).std().item() == pytest.approx(factor * (1 / 16) ** 0.5, rel=0.08)
    assert torch.cat(inside["ffn"]).std().item() == pytest.approx(factor * (2 / 16) ** 0.5, rel=0.08)


def _change_of_one_step(layers: int, rate: float) -> float:
    """How far one step of SGD moves what the stack gives out."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
    model = LlamaForCausalLM(config)
    fixup(model)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.02)  # the gradient must reach the stack in the very first step
    batch = loops.batch(model)
    with torch.no_grad():
        before = _hidden(model, batch)
    model(**batch).loss.backward()
    torch.optim.SGD(main_blocks(model, "test").layers.parameters(), lr=rate).step()
    with torch.no_grad():
        return float((_hidden(model, batch) - before).norm())


def test_the_first_step_moves_the_output_by_the_rate_whatever_the_depth():
    moves = [_change_of_one_step(layers, 0.1) for layers in (4, 16, 64)]
    assert max(moves) < 2 * min(moves)
    assert _change_of_one_step(16, 0.2) == pytest.approx(2 * moves[1], rel=0.05)


def test_the_added_scalars():
    model: Any = tiny.gpt2(2)
    settings = fixup(model)
    assert settings["biases"] == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "mlp.act"]
    block: Any = model.transformer.h[0]
    with torch.no_grad():
        for name in settings["branches"]:
            block.get_submodule(name).weight.normal_()
    x = torch.randn(1, 3, 16)
    plain = block.mlp(x)
    with torch.no_grad():
        block.mlp.c_proj.fixup_scale.fill_(3.0)
    torch.testing.assert_close(block.mlp(x), 3 * plain)
    with torch.no_grad():
        block.mlp.c_fc.fixup_bias.fill_(0.5)
        block.mlp.act.fixup_bias.fill_(-0.25)
        block.mlp.c_proj.fixup_bias.fill_(1.0)
    weight, out = block.mlp.c_fc.weight, block.mlp.c_proj.weight
    inner = torch.nn.functional.gelu((x + 0.5) @ weight - 0.25, approximate="tanh")
    torch.testing.assert_close(block.mlp(x), 3 * ((inner + 1.0) @ out))
