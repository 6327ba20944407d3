"""DeepNorm: the formula by hand on every family, its constants, and updates that stay bounded with depth."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification

import tiny
from methods import loops
from thrifty import NotApplicable
from thrifty.architecture import main_blocks
from thrifty.methods.initialization._branches import roles
from thrifty.methods.initialization.deepnorm import deepnorm, fold, folded


def _logits(model: Any) -> torch.Tensor:
    inputs = {key: value for key, value in loops.batch(model).items() if key != "labels"}
    with torch.no_grad():
        return model.eval()(**inputs).logits


def _catch(model: nn.Module, names: list[str]) -> dict[str, Any]:
    """Inputs and outputs of these modules in one forward pass, as they are without hooks of ours after them."""
    seen: dict[str, Any] = {}
    handles = []
    for name in names:

        def note(m: Any, a: Any, k: Any, o: Any, name: str = name) -> None:
            x = a[0] if a else k["hidden_states"]
            seen[name] = (x.detach().clone(), (o[0] if isinstance(o, tuple) else o).detach().clone())

        handles.append(model.get_submodule(name).register_forward_hook(note, with_kwargs=True, prepend=True))
    _logits(model)
    for handle in handles:
        handle.remove()
    return seen


PARTS = {
    "llama": ("model.layers", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"),
    "gpt2": ("transformer.h", "attn", "mlp", "ln_1", "ln_2"),
    "vit": ("vit.layers", "attention", "mlp", "layernorm_before", "layernorm_after"),
    "bert": (
        "bert.encoder.layer",
        "attention.output.dense",
        "output.dense",
        "attention.output.LayerNorm",
        "output.LayerNorm",
    ),
}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_blocks_compute_the_formula(family):
    """x1 = LN(alpha x + attention(x)); x2 = LN(alpha x1 + ffn(x1))."""
    model: Any = tiny.FAMILIES[family](2)
    torch.manual_seed(0)
    settings = deepnorm(model, alpha=1.7)
    prefix, first, second, norm1, norm2 = (PARTS[family][0], *PARTS[family][1:])
    for index in range(2):
        at = f"{prefix}.{index}"
        with torch.no_grad():
            for norm in (norm1, norm2):
                model.get_submodule(f"{at}.{norm}").weight.normal_(1.0, 0.3)
        seen = _catch(model, [at, f"{at}.{first}", f"{at}.{second}"])
        x = seen[at][0]
        norms = [model.get_submodule(f"{at}.{norm}") for norm in (norm1, norm2)]
        run = [type(norm).forward for norm in norms]
        middle = run[0](norms[0], 1.7 * x + seen[f"{at}.{first}"][1])
        out = run[1](norms[1], 1.7 * middle + seen[f"{at}.{second}"][1])
        torch.testing.assert_close(seen[at][1], out, rtol=1e-4, atol=1e-5)
    assert bool(settings["damped"]) is (family == "bert")


def test_with_one_and_one_a_post_norm_model_is_what_it_was():
    model, twin = tiny.bert(2), tiny.bert(2)
    deepnorm(model, alpha=1.0, beta=1.0)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(_logits(model), _logits(twin))


def test_folds_into_a_plain_post_norm_model():
    model: Any = tiny.bert(2).double()
    settings = deepnorm(model)
    expected, own = _logits(model), tiny.weights(model)
    with folded(model, settings):
        torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-12)
    tiny.assert_same(tiny.weights(model), own)
    fold(model, settings)
    twin = tiny.bert(2).double()
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(_logits(twin), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gains_by_role(family):
    model: Any = tiny.FAMILIES[family](12)
    torch.manual_seed(0)
    settings = deepnorm(model)
    assert settings["alpha"] == pytest.approx(2.2134, abs=1e-4)
    sums: dict[str, list[torch.Tensor]] = {}
    for block in main_blocks(model, "test"):
        for name, role in roles(block, "test").items():
            weight: Any = block.get_submodule(name).weight
            parts = [(role, weight)]
            if role == "qkv":
                parts = list(zip(("query_key", "query_key", "value"), weight.chunk(3, dim=1), strict=True))
            for key, part in parts:
                sums.setdefault(key, []).append(part.detach().flatten() / math.sqrt(2 / sum(part.shape)))
    for role, values in sums.items():
        expected = 1.0 if role == "query_key" else 0.3195
        assert torch.cat(values).std().item() == pytest.approx(expected, rel=0.05), role


def _move(layers: int, deep: bool, rate: float = 1e-4) -> float:
    """How far a small step of gradient descent moves the stack's output, for each unit of the rate."""
    torch.manual_seed(1)
    config = BertConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
                        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    model: Any = BertForMaskedLM(config)
    deepnorm(model, *(() if deep else (1.0, 1.0)))
    batch = loops.batch(model)
    caught: list[torch.Tensor] = []
    list(main_blocks(model, "test"))[-1].register_forward_hook(lambda m, i, o: caught.append(o.detach()))
    model(**batch).loss.backward()
    torch.optim.SGD(model.bert.encoder.parameters(), lr=rate).step()
    model(**batch)
    return float((caught[1] - caught[0]).norm()) / rate


def test_updates_stay_bounded_with_depth_where_those_of_post_norm_explode():
    deep, plain = ([_move(layers, kind) for layers in (6, 24, 96)] for kind in (True, False))
    assert deep[1] < 2 * deep[0]
    assert deep[2] < 10 * deep[0]
    assert plain[1] > 3 * plain[0]
    assert plain[2] > 100 * plain[0]


def test_dropout_behind_the_branches_is_refused(tmp_path):
    """It would fall on the norm's output in place of the branch's."""
    config = ViTConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=8,
                       patch_size=4, num_channels=1, num_labels=3, hidden_dropout_prob=0.1)  # fmt: skip
    with pytest.raises(NotApplicable, match=r"deepnorm moves two norms.*dropout.* Fix: "):
        tiny.trainer(tmp_path, ["deepnorm"], ViTForImageClassification(config))
