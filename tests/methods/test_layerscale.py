"""LayerScale: one and zero, exact folding, and vectors that are kept in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from methods import loops
from thrifty.architecture import main_blocks
from thrifty.methods.initialization.layerscale import fold, folded, layerscale, scaled_layers


def _logits(model: Any) -> torch.Tensor:
    inputs = {key: value for key, value in loops.batch(model).items() if key != "labels"}
    inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        return model.eval()(**inputs).logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_is_the_plain_model_and_folding_is_exact(family):
    model: Any = tiny.FAMILIES[family](3).double()
    plain = _logits(model)
    layerscale(model, epsilon=1.0)
    assert torch.equal(_logits(model), plain)
    with torch.no_grad():
        for module in scaled_layers(model):
            module.layerscale.copy_(torch.randn_like(module.layerscale))
            if module.bias is not None:
                module.bias.normal_()  # it is part of the branch too
    expected, own = _logits(model), tiny.weights(model)
    assert not torch.allclose(expected, plain)
    names = {name for name, _ in tiny.FAMILIES[family](3).named_parameters()}
    with folded(model):
        torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-12)
        assert {name for name, _ in model.named_parameters()} == names
    tiny.assert_same(tiny.weights(model), own)
    fold(model)
    assert {name for name, _ in model.named_parameters()} == names
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2", "vit"])  # BERT's norms come after the addition
def test_zero_is_the_identity(family):
    model: Any = tiny.FAMILIES[family](2)
    layerscale(model, epsilon=0.0)
    caught: list[torch.Tensor] = []
    for block in main_blocks(model, "test"):
        block.register_forward_pre_hook(
            lambda m, a, k: caught.append(a[0] if a else k["hidden_states"]), with_kwargs=True
        )
        block.register_forward_hook(lambda m, i, o: caught.append(o[0] if isinstance(o, tuple) else o))
    _logits(model)
    assert len(caught) == 4
    assert all(torch.equal(x, caught[0]) for x in caught)


def test_a_vector_for_each_branch_of_its_width():
    model: Any = tiny.llama(2)
    layerscale(model)
    assert [module.layerscale.shape for module in scaled_layers(model)] == [torch.Size([16])] * 4
    assert all((module.layerscale == 0.1).all() for module in scaled_layers(model))


def test_small_numbers_move_in_a_model_of_low_precision():
    model: Any = tiny.llama(2).bfloat16()
    layerscale(model, epsilon=1e-6)
    vectors = [module.layerscale for module in scaled_layers(model)]
    assert {vector.dtype for vector in vectors} == {torch.float32}
    model(**loops.batch(model)).loss.backward()
    torch.optim.SGD(vectors, lr=1e-7).step()
    assert any((vector != torch.tensor(1e-6)).any() for vector in vectors)
    assert model.model.layers[0].mlp.down_proj(torch.zeros(1, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
