"""bert2BERT: what is taken from where, against a direct transcription, and runs that grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.architecture import main_blocks
from thrifty.methods.growth._grow import build
from thrifty.methods.growth._width import narrowed
from thrifty.methods.growth.bert2bert import bert2bert
from thrifty.methods.growth.net2net import net2net

GROWING = {"bert2bert": {"at": 0.34}}


def _pair(family: str, width: float, layers: int, depth: int = 2) -> tuple[Any, Any]:
    full = tiny.FAMILIES[family](depth)
    small = build(full, narrowed(full.config, width, layers, "test"))
    with torch.no_grad():
        rng = torch.Generator().manual_seed(1)
        for p in small.parameters():
            p.add_(torch.randn(p.shape, generator=rng) * 0.1)
    return small.eval(), full.eval()


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**{k: v for k, v in loops.batch(model).items() if k != "labels"}).logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_fpi_is_net2net(family):
    """Function preserving initialisation and Net2Net's copies are the same where the sizes double."""
    small, full = _pair(family, 0.5, 2)
    expected = _logits(small)
    bert2bert(small, full, initialisation="fpi")
    torch.testing.assert_close(_logits(full), expected, rtol=0, atol=2e-6)
    other = build(full, full.config)
    net2net(small, other)
    tiny.assert_same(tiny.weights(full), tiny.weights(other))


def test_aki_takes_new_rows_from_the_next_block():
    """A transcription for one matrix: columns copied and halved in both blocks, then rows of one over the other's."""
    small, full = _pair("bert", 0.5, 2)
    bert2bert(small, full)
    for name in ("intermediate.dense", "attention.self.query", "output.dense"):
        first, second = (main_blocks(small, "t").layers[i].get_submodule(name).weight for i in range(2))
        wide = [torch.cat([w, w], dim=1) / 2 for w in (first, second)]
        got = [main_blocks(full, "t").layers[i].get_submodule(name).weight for i in range(2)]
        assert torch.equal(got[0], torch.cat([wide[0], wide[1]]))
        assert torch.equal(got[1], torch.cat([wide[1], wide[1]]))  # the last block has no next one
    norm = main_blocks(full, "t").layers[0].output.LayerNorm.weight
    parts = [main_blocks(small, "t").layers[i].output.LayerNorm.weight for i in range(2)]
    assert torch.equal(norm, torch.cat(parts))
    assert torch.equal(full.bert.embeddings.word_embeddings.weight,
                       small.bert.embeddings.word_embeddings.weight.repeat(1, 2))  # fmt: skip


def test_fused_projections_grow_part_by_part():
    small, full = _pair("gpt2", 0.5, 2)
    bert2bert(small, full)
    first, second = (main_blocks(small, "t").layers[i].attn.c_attn.weight for i in range(2))
    got = main_blocks(full, "t").layers[0].attn.c_attn.weight
    pieces = [torch.cat([a, b], dim=1) for a, b in zip(first.chunk(3, 1), second.chunk(3, 1), strict=True)]
    assert torch.equal(got, torch.cat(pieces, dim=1).repeat(2, 1) / 2)


def test_units_differ_at_once():
    for initialisation, equal in (("fpi", True), ("aki", False)):
        small, full = _pair("llama", 0.5, 2)
        bert2bert(small, full, initialisation=initialisation)
        rows = full.model.layers[0].mlp.gate_proj.weight
        assert torch.equal(rows[:16], rows[16:]) is equal


def test_depth_is_stacked():
    small, full = _pair("bert", 1.0, 2, depth=4)
    mapping = bert2bert(small, full, initialisation="fpi")
    for i, block in enumerate(main_blocks(full, "t")):
        tiny.assert_same(tiny.weights(block), tiny.weights(main_blocks(small, "t").layers[i % 2]))
    assert mapping["bert.encoder.layer.3.output.dense.weight"] == "bert.encoder.layer.1.output.dense.weight"
    assert mapping["bert.embeddings.LayerNorm.bias"] == "bert.embeddings.LayerNorm.bias"


def test_sizes_that_are_no_multiples():
    """From 3 heads to 4: whole heads are copied, and what sums over them is divided by its own number of copies."""
    full = tiny.bert()
    small = build(full, narrowed(full.config, 0.75, 2, "test"))
    bert2bert(small, full, initialisation="fpi", rng=torch.Generator().manual_seed(3))
    old = main_blocks(small, "t").layers[0].attention.self.value.weight
    new = main_blocks(full, "t").layers[0].attention.self.value.weight
    torch.testing.assert_close(new[:12].sum(dim=1), old.sum(dim=1))
    heads = [(new[12:].sum(dim=1) - old[4 * h : 4 * h + 4].sum(dim=1)).abs().max() for h in range(3)]
    assert min(heads) < 1e-6


@pytest.mark.parametrize(("family", "step"), [(family, 2) for family in tiny.FAMILIES])
def test_trains_grows_and_resumes(tmp_path, family, step):
    run = loops.resumes(tmp_path, [GROWING], lambda: tiny.FAMILIES[family](2), max_steps=5, step=step)
    shapes = {n: p.shape for n, p in run.model.named_parameters()}
    assert shapes == {n: p.shape for n, p in tiny.FAMILIES[family](2).named_parameters()}


def test_in_ones_own_loop():
    model = tiny.llama(2)
    small = build(model, narrowed(model.config, 0.5, 1, "test"))
    losses = loops.plain_loop(loops.Setup(small, torch.optim.AdamW(small.parameters(), lr=1e-2)))
    bert2bert(small, model)
    losses += loops.accelerate_loop(loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    assert all(torch.isfinite(torch.tensor(losses)))


def test_refused(tmp_path):
    with pytest.raises(NotApplicable, match="nothing to grow"):
        tiny.trainer(tmp_path, [{"bert2bert": {"width": 1.0, "start_layers": 2}}])
    for name in ("bert2bert", "net2net", "ligo"):
        with pytest.raises(NotApplicable, match=f"{name}: T5ForConditionalGeneration has no single hidden size"):
            tiny.trainer(tmp_path, [name], tiny.t5())
    with pytest.raises(NotApplicable, match="too few to grow"):
        tiny.trainer(tmp_path, ["bert2bert"], max_steps=1)
    with pytest.raises(InputError, match="initialisation"):
        Recipe.parse([{"bert2bert": {"initialisation": "akj"}}])
