"""Net2Net: the grown model computes what the small one did, in every family and in every direction."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, Qwen3Config

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.architecture import main_blocks
from thrifty.methods.growth._grow import build
from thrifty.methods.growth._width import UnitMap, expand, growing_axes, narrowed, unit_maps
from thrifty.methods.growth.net2net import net2net

GROWING = {"net2net": {"at": 0.34}}


def _qwen3() -> Any:
    """Heads whose sizes do not add up to the hidden size, and norms inside attention."""
    config = Qwen3Config(vocab_size=tiny.VOCABULARY, hidden_size=16, intermediate_size=40, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=6)  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


FAMILIES: dict[str, Any] = {
    **tiny.FAMILIES,
    "tied": lambda layers=2: tiny.llama(layers, tie_word_embeddings=True),
    "qwen3": lambda layers=2: _qwen3(),
    "one group": lambda layers=2: tiny.llama(layers),
}


def _pair(family: str, width: float, layers: int) -> tuple[Any, Any]:
    full = FAMILIES[family]()
    if family == "one group":
        full.config.num_key_value_heads = 1
        full = build(full, full.config)
    small = build(full, narrowed(full.config, width, layers, "test"))
    with torch.no_grad():
        rng = torch.Generator().manual_seed(1)
        for p in small.parameters():  # as after some training: no bias is zero, no norm is one
            p.add_(torch.randn(p.shape, generator=rng) * 0.1)
    return small.eval(), full.eval()


def _logits(model: nn.Module) -> torch.Tensor:
    inputs = loops.batch(model)
    with torch.no_grad():
        return model(**{k: v for k, v in inputs.items() if k != "labels"}).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_wider_is_the_same_function(family, noise):
    small, full = _pair(family, 0.5, 2)
    expected = _logits(small)
    net2net(small, full, noise=noise)
    torch.testing.assert_close(_logits(full), expected, rtol=0, atol=2e-6)
    assert sum(p.numel() for p in full.parameters()) > 1.5 * sum(p.numel() for p in small.parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2", "vit", "qwen3"])
@pytest.mark.parametrize("width", [1.0, 0.5])
def test_deeper_is_the_same_function(family, width):
    small, full = _pair(family, width, 1)
    expected = _logits(small)
    mapping = net2net(small, full)
    torch.testing.assert_close(_logits(full), expected, rtol=0, atol=2e-6)
    assert len(main_blocks(full, "test")) == 2
    if width == 1.0:
        prefix = main_blocks(full, "test").prefix
        inherited = {new: old for new, old in mapping.items() if old is not None}
        assert all(old == new.replace(f"{prefix}.1.", f"{prefix}.0.") for new, old in inherited.items())
        fresh = {name for name, old in mapping.items() if old is None}
        assert fresh  # the outputs of the identity block's branches
        assert all(name.startswith(f"{prefix}.1.") for name in fresh)


def test_any_replication_of_feed_forward_units():
    """The paper's theorem on its own: 5 units to 12, picked at random, in float64."""
    rng = torch.Generator().manual_seed(0)
    index = torch.cat([torch.arange(5), torch.randint(5, (7,), generator=rng)])
    maps = {(5, 12): UnitMap(index, 5)}
    small = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 4)).double()
    full = nn.Sequential(nn.Linear(3, 12), nn.GELU(), nn.Linear(12, 4)).double()
    axes = growing_axes(small, full, "test")
    with torch.no_grad():
        for name, p in full.named_parameters():
            p.copy_(expand(small.get_parameter(name), axes[name], maps, noise=0.5, rng=rng))
    x = torch.randn(10, 3).double()
    assert (full(x) - small(x)).abs().max() < 1e-14


def test_uneven_copies_of_hidden_units_would_change_norms():
    """Why the hidden size grows by whole multiples: mean and variance stay under even copies only."""
    x = torch.randn(4, 6).double()
    norm = nn.functional.layer_norm
    even = torch.arange(6).repeat(2)
    assert (norm(x[:, even], (12,)) - norm(x, (6,))[:, even]).abs().max() < 1e-12  # 4e-16 without epsilon
    uneven = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 0])
    assert (norm(x[:, uneven], (9,)) - norm(x, (6,))[:, uneven]).abs().max() > 0.05


def test_heads_are_copied_whole_and_with_their_group():
    full = tiny.llama().config
    maps = unit_maps(narrowed(full, 0.5, 2, "test"), full, torch.Generator())
    assert maps[(8, 16)].index.tolist() == [*range(8), *range(8)]  # 2 heads of 4, and the hidden units alike
    assert maps[(4, 8)].index.tolist() == [*range(4), *range(4)]  # their keys and values
    assert maps[(16, 32)].is_even


def test_copies_part_ways(tmp_path):
    """Without noise two copies get the same gradients for ever; with it they do not."""
    for noise, differ in ((0.0, False), (0.3, True)):
        small, full = _pair("llama", 0.5, 2)
        net2net(small, full, noise=noise)
        loops.plain_loop(loops.Setup(full, torch.optim.AdamW(full.parameters(), lr=1e-2)))
        units = full.model.layers[0].mlp.gate_proj.weight
        assert (not torch.allclose(units[:16], units[16:], atol=1e-4)) is differ


@pytest.mark.parametrize(("family", "step"), [("llama", 1), ("llama", 3), *((family, 2) for family in tiny.FAMILIES)])
def test_trains_grows_and_resumes(tmp_path, family, step):
    build_it = lambda: tiny.FAMILIES[family](2)  # noqa: E731
    run = loops.resumes(tmp_path, [GROWING], build_it, max_steps=5, step=step)
    shapes = {n: p.shape for n, p in run.model.named_parameters()}
    assert shapes == {n: p.shape for n, p in build_it().named_parameters()}
    assert run.recipe["net2net"].grown


def test_the_loss_does_not_jump(tmp_path):
    """Growing in the middle of a run: the loss of the next step is that of the small model going on."""
    results = []
    for at in (0.5, 0.9):
        run = tiny.trainer(tmp_path / str(at), [{"net2net": {"at": at, "noise": 0.0}}], max_steps=6)
        run.train()
        results.append(tiny.losses(run))
    grown, waiting = results
    assert grown[:3] == waiting[:3]
    assert grown[3] == pytest.approx(waiting[3], abs=1e-5)


def test_what_is_saved_loads(tmp_path):
    run = tiny.trainer(tmp_path, [GROWING], tiny.bert(), max_steps=4)
    run.train()
    run.save_model(str(tmp_path / "out"))
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(_logits(loaded.eval()), _logits(run.model.eval()))


def test_averages_and_checkpointing_go_along(tmp_path):
    methods = [GROWING, {"ema": {"decay": 0.5}}, "gradient-checkpointing"]
    run = loops.resumes(tmp_path, methods, tiny.llama, max_steps=5, step=3)
    assert all(layer.gradient_checkpointing for layer in run.model.model.layers)


def test_phases_and_cost():
    method: Any = Recipe.parse(["net2net"])["net2net"]
    phases = method.phases(tiny.llama(4).config, 100)
    assert [(p.steps, p.depth) for p in phases] == [(30, 0.125), (70, 1.0)]


def test_in_ones_own_loop():
    model = tiny.llama(2)
    small, losses = build(model, narrowed(model.config, 0.5, 1, "test")), []
    losses += loops.plain_loop(loops.Setup(small, torch.optim.AdamW(small.parameters(), lr=1e-2)))
    net2net(small, model, noise=0.1)
    losses += loops.accelerate_loop(loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    assert all(torch.isfinite(torch.tensor(losses)))
    assert all(abs(a - b) < 1 for a, b in itertools.pairwise(losses))


def test_refused(tmp_path):
    with pytest.raises(NotApplicable, match=r"normalises its output.* Fix: leave it out"):
        tiny.trainer(tmp_path, [{"net2net": {"start_layers": 1}}], tiny.bert())
    with pytest.raises(NotApplicable, match="no multiple"):
        tiny.trainer(tmp_path, [{"net2net": {"width": 0.75}}], _four_groups())
    with pytest.raises(NotApplicable, match=r"cannot be cut .* Fix: one of \[1.0, 0.5\]"):
        tiny.trainer(tmp_path, [{"net2net": {"width": 0.3}}])
    with pytest.raises(NotApplicable, match="nothing to grow"):
        tiny.trainer(tmp_path, [{"net2net": {"width": 1.0, "start_layers": 2}}])
    frozen = tiny.llama()
    frozen.get_input_embeddings().requires_grad_(False)
    with pytest.raises(NotApplicable, match="frozen"):
        tiny.trainer(tmp_path, ["net2net"], frozen)
    for settings in ({"width": 0.0}, {"start_layers": 0}, {"at": 1.0}, {"noise": -1.0}):
        with pytest.raises(InputError, match=next(iter(settings))):
            Recipe.parse([{"net2net": settings}])


def _four_groups() -> Any:
    model: Any = tiny.llama()
    model.config.num_key_value_heads = 4
    return build(model, model.config)
