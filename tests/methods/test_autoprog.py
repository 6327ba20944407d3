"""AutoProg: schedules, copies of running means, sub-paths that equal the extracted model, and the search of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.architecture import copy_layer, main_blocks
from thrifty.methods.growth._gates import Gate
from thrifty.methods.growth.autoprog import (
    BlockMeans,
    divisible,
    grow_blocks,
    keep_blocks,
    manual_schedule,
    spread,
    sub_path,
)

SEARCHING = {"autoprog": {"stages": 3, "search_steps": 1, "multiple_of": 2}}


def _blocks(model: nn.Module) -> list[Any]:
    return list(main_blocks(model, "test"))


def test_the_papers_manual_schedule():
    sides = [divisible(224 * size, 32) for _, size in manual_schedule(4, 0.5, 12)]
    assert sides == [128, 160, 192, 224]
    assert [layers for layers, _ in manual_schedule(4, 0.5, 12)] == [6, 8, 10, 12]
    assert manual_schedule(1, 0.5, 12) == [(12, 1.0)]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_new_blocks_hold_the_running_mean(family):
    model = tiny.FAMILIES[family](2)
    means = BlockMeans(0.9)
    means.update(_blocks(model))
    expected = [{n: p.detach().clone() for n, p in block.named_parameters()} for block in _blocks(model)]
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
        means.update(_blocks(model))
        for mean, block in zip(expected, _blocks(model), strict=True):
            for name, p in block.named_parameters():
                mean[name] = 0.9 * mean[name] + 0.1 * p.detach()
    live = [tiny.weights(block) for block in _blocks(model)]
    mapping = grow_blocks(model, 4, means)
    grown = [tiny.weights(block) for block in _blocks(model)]
    for source in range(2):
        tiny.assert_same(grown[2 * source], live[source])
        tiny.assert_same(grown[2 * source + 1], expected[source], atol=1e-6)
    prefix = main_blocks(model, "test").prefix
    name = next(iter(live[0]))
    assert [mapping[f"{prefix}.{i}.{name}"] for i in range(4)] == [f"{prefix}.{i // 2}.{name}" for i in range(4)]
    assert len(means.means) == 4  # the means grow in step


@pytest.mark.parametrize("layers", [3, 4, 5, 6])
def test_sub_paths_hold_every_old_block(layers):
    own = spread(3, 6)
    kept = sub_path(own, layers)
    assert len(kept) == layers == len(set(kept))
    assert {own[i] for i in kept} == {0, 1, 2}
    assert {0, 2, 4} <= set(kept)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_sub_path_is_the_extracted_model(family):
    model = tiny.FAMILIES[family](2).eval()
    grow_blocks(model, 4)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    inputs = {k: v for k, v in loops.batch(model).items() if k != "labels"}
    kept = sub_path(spread(2, 4), 3)
    gates = [Gate(block, []) for block in _blocks(model)]
    model.train()  # gates act in training; nothing here drops out
    for index, gate in enumerate(gates):
        gate.keep = index in kept
    with torch.no_grad():
        within = model(**inputs).logits
        for gate in gates:
            gate.remove()
        keep_blocks(model, kept)
        torch.testing.assert_close(model(**inputs).logits, within)
    assert len(_blocks(model)) == 3


def test_one_stage_is_the_baseline(tmp_path):
    results = []
    for methods in ((), [{"autoprog": {"stages": 1}}]):
        run = tiny.trainer(tmp_path / str(len(methods)), methods, tiny.llama(dropout=0.1))
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(*results)


class Shapes:
    """Blocks and tokens of each training pass."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[list[int]] = []
        model.register_forward_pre_hook(self._begin)
        kind = type(_blocks(model)[0].get_submodule(self._inner(model)))
        self.handle = nn.modules.module.register_module_forward_hook(
            lambda m, args, out: self.seen[-1].append(1) if isinstance(m, kind) and m.training else None
        )

    @staticmethod
    def _inner(model: nn.Module) -> str:
        return next(name for name, m in _blocks(model)[0].named_children() if "mlp" in name or "intermediate" in name)

    def _begin(self, module: nn.Module, args: Any) -> None:
        if module.training:
            self.seen.append([])


def test_without_search_the_schedule_is_followed(tmp_path):
    method = {"autoprog": {"stages": 3, "search_steps": 0, "resize": False}}
    run = tiny.trainer(tmp_path, [method], tiny.llama(4), max_steps=6)
    shapes = Shapes(run.model)
    run.train()
    shapes.handle.remove()
    assert [len(step) for step in shapes.seen[-6:]] == [2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("family", ["llama", "vit"])
def test_the_best_rating_is_taken(tmp_path, family):
    run = tiny.trainer(tmp_path, [SEARCHING], tiny.FAMILIES[family](4), max_steps=9)
    method: Any = run.recipe["autoprog"]
    chosen: list[Any] = []
    original = method._choose

    def choose(model: Any) -> None:
        candidates = list(method.candidates)
        original(model)
        chosen.append((candidates, list(method.ratings), method.now))

    method._choose = choose
    run.train()
    ((candidates, ratings, now),) = chosen
    assert {layers for layers, _ in candidates} == {2, 3, 4}
    assert len({round(size, 3) for _, size in candidates}) == 3
    assert now == candidates[ratings.index(min(ratings))]
    assert len(_blocks(run.model)) == 4
    assert not any(isinstance(vars(block).get("forward"), Gate) for block in _blocks(run.model))


@pytest.mark.parametrize("weight", [0.0, 50.0])
def test_cost_decides_when_it_weighs_enough(tmp_path, weight):
    method = {"autoprog": {**SEARCHING["autoprog"], "cost_weight": weight, "resize": False}}
    run = tiny.trainer(tmp_path, [method], tiny.llama(4), max_steps=9)
    taken: list[Any] = []
    original = run.recipe["autoprog"]._choose
    run.recipe["autoprog"]._choose = lambda model: (original(model), taken.append(run.recipe["autoprog"].now))
    run.train()
    assert (taken[0][0] == 2) or weight == 0.0


@pytest.mark.parametrize(("family", "step"), [("llama", 2), ("llama", 3), ("llama", 4), ("bert", 3), ("vit", 3)])
def test_resumes_before_within_and_after_a_search(tmp_path, family, step):
    loops.resumes(tmp_path, [SEARCHING], lambda: tiny.FAMILIES[family](4), max_steps=7, step=step)


def test_candidates_are_rated_without_the_blocks_they_lack(tmp_path):
    """The loss of a candidate is that of the model cut out of the super-network, in eval mode."""
    method = {"autoprog": {**SEARCHING["autoprog"], "cost_weight": 0.0, "resize": False}}
    run = tiny.trainer(tmp_path, [method], tiny.llama(4, dropout=0.1), max_steps=9)
    auto: Any = run.recipe["autoprog"]
    original, expected = auto._choose, []

    def choose(model: Any) -> None:
        for layers, _ in auto.candidates:
            alone = copy_layer(model)
            for block in _blocks(alone):
                vars(block)["forward"].remove()
            keep_blocks(alone, sub_path(auto.own, layers))
            with torch.no_grad():
                losses = [float(alone.eval()(**batch).loss) for batch in auto.ctx.batches(4, model)]
            expected.append(sum(losses) / 4)
        original(model)

    auto._choose = choose
    run.train()
    assert auto.ratings == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) == 3


def test_phases():
    method: Any = Recipe.parse(["autoprog"])["autoprog"]
    phases = method.phases(tiny.llama(12).config, 100)
    assert [(p.steps, p.depth) for p in phases] == [(25, 0.5), (25, 8 / 12), (25, 10 / 12), (25, 1.0)]
    assert phases[0].length == 0.5
    assert method.phases(tiny.vit(4).config, 100)[0].length == 0.25


def test_in_ones_own_loop():
    model, means, losses = tiny.llama(1), BlockMeans(0.9), []
    for layers in (1, 2):
        grow_blocks(model, layers, means)
        setup = loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2),
                            after_step=lambda step: means.update(_blocks(model)))  # fmt: skip
        losses += (loops.plain_loop if layers == 1 else loops.accelerate_loop)(setup)
    assert len(_blocks(model)) == 2
    assert all(torch.isfinite(torch.tensor(losses)))


def test_refused(tmp_path):
    with pytest.raises(NotApplicable, match="too few for its stages"):
        tiny.trainer(tmp_path, ["autoprog"], max_steps=6)
    with pytest.raises(NotApplicable, match="do not reach 8"):
        tiny.trainer(tmp_path, [{"autoprog": {"stages": 2, "start": 0.1}}], tiny.llama(8), max_steps=9)
    bad = {"stages": 0, "start": 0.0, "search_steps": -1, "multiple_of": 0, "cost_weight": -1.0, "decay": 1.0}
    for key, value in bad.items():
        with pytest.raises(InputError, match=key):
            Recipe.parse([{"autoprog": {key: value}}])
