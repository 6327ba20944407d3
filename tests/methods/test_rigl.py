"""RigL: exact counts, the moves by brute force, and that pruned weights are zero whatever the optimizer does."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import TrainerCallback

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.architecture import block_linears, main_blocks
from thrifty.methods.sparsity.rigl import SparseWeights, drop_fraction, erdos_renyi_kernel, move_connections


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _weights(model: nn.Module) -> dict[str, Any]:
    return {f"{name}.weight": module.weight for name, module in block_linears(main_blocks(model, "test")).items()}


# --- how the non-zeros are distributed ---


def test_densities_of_the_example():
    shapes = {"a": (64, 32), "b": (32, 16), "c": (16, 10)}
    counts = erdos_renyi_kernel(shapes, 0.8)
    assert sum(counts.values()) == 544
    assert [round(counts[n] / math.prod(shapes[n]), 2) for n in "abc"] == [0.15, 0.30, 0.52]


@settings(deadline=None, max_examples=200)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6),
    sparsity=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
)
def test_the_total_is_exact_and_densities_follow_the_rule(shapes, sparsity):
    named = {str(i): shape for i, shape in enumerate(shapes)}
    counts = erdos_renyi_kernel(named, sparsity)
    sizes = {name: math.prod(shape) for name, shape in named.items()}
    assert sum(counts.values()) == round((1 - sparsity) * sum(sizes.values()))
    assert all(0 <= counts[name] <= sizes[name] for name in named)
    # Of the layers that are not full, a higher (sum / product) never means a lower density, to one connection.
    partial = [name for name in named if counts[name] < sizes[name] - 1]
    for first in partial:
        for second in partial:
            if sum(named[first]) / sizes[first] > sum(named[second]) / sizes[second]:
                assert (counts[first] + 1) / sizes[first] >= (counts[second] - 1) / sizes[second]


def test_schedule():
    assert [drop_fraction(t, 100) for t in (0, 50, 100)] == pytest.approx([0.3, 0.15, 0.0])
    assert drop_fraction(170, 100) == 0.0  # no floor after the end, and no second wave of the cosine
    assert drop_fraction(25, 100, alpha=0.4) == pytest.approx(0.2 * (1 + math.cos(math.pi / 4)))


# --- moves ---


@pytest.mark.parametrize("seed", range(5))
def test_moves_by_brute_force(seed):
    generator = _rng(seed)
    mask = torch.rand(6, 5, generator=generator) < 0.4
    weight = torch.randn(6, 5, generator=generator) * mask
    gradient = torch.randn(6, 5, generator=generator)
    count = 3
    new = move_connections(weight, gradient, mask, count)

    alive = sorted((i for i in range(30) if mask.flatten()[i]), key=lambda i: abs(weight.flatten()[i].item()))
    kept = set(alive[count:])
    candidates = sorted(set(range(30)) - kept, key=lambda i: -abs(gradient.flatten()[i].item()))
    expected = kept | set(candidates[:count])
    assert {i for i in range(30) if new.flatten()[i]} == expected
    assert new.sum() == mask.sum()


def test_a_share_of_the_connections_moves_not_of_all_weights():
    weight = nn.Parameter(torch.randn(20, 20, generator=_rng()))
    sparse = SparseWeights({"w": weight}, 0.9, _rng(1))
    before = sparse.masks["w"].clone()
    # The gradient is largest where nothing is connected, so that everything that is dropped stays dropped.
    weight.grad = torch.where(before, 0.0, 1.0) * torch.rand(20, 20, generator=_rng(2))
    assert sparse.move(0.3) == round(0.3 * 40)
    assert (sparse.masks["w"] & ~before).sum() == 12


def test_new_ones_start_at_zero_and_regrown_ones_keep_their_value():
    weight = nn.Parameter(torch.zeros(1, 8))
    sparse = SparseWeights({"w": weight}, 0.5, _rng())
    mask = torch.tensor([[True, True, True, True, False, False, False, False]])
    sparse.masks["w"] = mask
    with torch.no_grad():
        weight.copy_(torch.tensor([[0.1, 0.2, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]]))
    optimizer = torch.optim.AdamW([weight], lr=0.0, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    sparse.apply(optimizer)
    assert torch.equal(weight.detach(), torch.tensor([[0.1, 0.2, 3.0, 4.0, 0, 0, 0, 0]]))
    momentum = optimizer.state[weight]["exp_avg"]
    assert torch.equal(momentum != 0, mask)
    # Drops 0.1 and 0.2; the largest gradients are at 0.1 itself and at a free place.
    weight.grad = torch.tensor([[9.0, 0.1, 0.2, 0.3, 0.4, 8.0, 0.5, 0.6]])
    assert sparse.move(0.5, optimizer) == 1
    assert torch.equal(sparse.masks["w"], torch.tensor([[True, False, True, True, False, True, False, False]]))
    assert torch.equal(weight.detach(), torch.tensor([[0.1, 0.0, 3.0, 4.0, 0, 0.0, 0, 0]]))
    assert torch.equal(momentum != 0, torch.tensor([[True, False, True, True, False, False, False, False]]))
    assert torch.equal(optimizer.state[weight]["exp_avg_sq"] != 0, momentum != 0)


def test_an_overflowed_gradient_moves_nothing():
    weight = nn.Parameter(torch.randn(4, 4, generator=_rng()))
    sparse = SparseWeights({"w": weight}, 0.5, _rng(1))
    before = sparse.masks["w"].clone()
    weight.grad = torch.full((4, 4), float("inf"))
    assert sparse.move(0.5) == 0
    assert torch.equal(sparse.masks["w"], before)


# --- masks in training ---


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_pruned_weights_stay_zero_under_momentum_and_decay(family):
    """20 AdamW steps at 90 % sparsity: momentum and decay revive weights that are masked in their gradients only."""
    model = tiny.FAMILIES[family]()
    parameters = _weights(model)
    sparse = SparseWeights(parameters, 0.9, _rng())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    alive = {name: int(mask.sum()) for name, mask in sparse.masks.items()}
    assert sum(alive.values()) == round(0.1 * sum(p.numel() for p in parameters.values()))
    batches = list(loops.loader(model))
    model.train()
    for step in range(20):
        optimizer.zero_grad()
        model(**batches[step % 4]).loss.backward()
        if step in (5, 10):
            sparse.move(0.3, optimizer)
        else:
            sparse.mask_gradients()
            optimizer.step()
            sparse.apply(optimizer)
        for name, p in parameters.items():
            assert not p[~sparse.masks[name]].any(), name
            assert not any(v[~sparse.masks[name]].any() for v in optimizer.state[p].values() if v.shape == p.shape)
            assert int(sparse.masks[name].sum()) == alive[name]
    assert set(parameters) == set(sparse.masks)
    assert all(p.count_nonzero() > 0 for p in parameters.values())


def test_equals_a_network_whose_weights_were_zeroed():
    model = tiny.llama()
    twin = copy.deepcopy(model)
    sparse = SparseWeights(_weights(model), 0.7, _rng())
    with torch.no_grad():
        for name, mask in sparse.masks.items():
            p = twin.get_parameter(name)
            for index in (~mask).nonzero().tolist():
                p[tuple(index)] = 0.0
    inputs = loops.batch(model)
    assert torch.equal(model(**inputs).logits, twin(**inputs).logits)


def test_only_linear_weights_of_blocks():
    names = set(_weights(tiny.gpt2()))
    assert len(names) == 2 * 4
    assert all(name.startswith("transformer.h.") and name.endswith(".weight") and "ln_" not in name for name in names)


def test_own_loops_agree_and_act():
    sparses = []

    def make() -> loops.Setup:
        model = tiny.gpt2()
        sparse = SparseWeights(_weights(model), 0.5, _rng())
        sparses.append(sparse)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def after_backward(step: int) -> bool:
            if step == 2:
                assert sparse.move(0.3, optimizer) > 0
                return False
            sparse.mask_gradients()
            return True

        return loops.Setup(
            model, optimizer, after_backward=after_backward, after_step=lambda step: sparse.apply(optimizer)
        )

    setup, losses = loops.both_loops(make)
    tiny.assert_same(sparses[0].masks, sparses[1].masks)
    assert losses != loops.baseline(tiny.gpt2)[1]
    for name, p in _weights(setup.model).items():
        assert not p[~sparses[0].masks[name]].any()


# --- in the trainer ---

MOVING = {"rigl": {"sparsity": 0.5, "every": 2, "end": 1.0}}


class Watch(TrainerCallback):
    """Masks and weights after every step."""

    def __init__(self, run: Any) -> None:
        self.run, self.masks, self.weights = run, [], []

    def on_step_end(self, *args, **kwargs):
        method = self.run.recipe["rigl"]
        self.masks.append({name: mask.clone() for name, mask in method.weights.masks.items()})
        self.weights.append(tiny.weights(self.run.model))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trains_moves_and_resumes(tmp_path, family):
    build = tiny.FAMILIES[family]
    watches = []
    run = loops.resumes(
        tmp_path, [MOVING], build, max_steps=6, step=3, watch=lambda r: watches.append(Watch(r)) or watches[0]
    )
    masks, weights = watches[0].masks, watches[0].weights
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(masks)]
    assert moved == [False, True, False, True, False]  # the third and the fifth step
    for (before, after), moves in zip(itertools.pairwise(weights), moved, strict=True):
        embedding = next(name for name in before if name not in masks[0])
        assert torch.equal(before[embedding], after[embedding]) is moves  # a moving step updates nothing
    for name, mask in masks[-1].items():
        final = run.model.get_parameter(name)
        assert not final[~mask].any()
        assert int(mask.sum()) == int(masks[0][name].sum())
    assert run.recipe["rigl"].moved > 0


def test_grows_where_the_dense_gradient_of_the_whole_step_is_largest(tmp_path):
    """With accumulation: not the masked gradient, nor that of the last micro-batch."""
    runs = []
    for size, accumulation in ((4, 1), (1, 4)):
        run = tiny.trainer(
            tmp_path / str(size),
            [MOVING],
            tiny.llama(),
            max_steps=3,
            optim="sgd",
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
        )
        run.add_callback(watch := Watch(run))
        run.train()
        runs.append(watch.masks)
    for first, second in zip(*runs, strict=True):
        tiny.assert_same(first, second)
    assert any(not torch.equal(runs[0][1][n], runs[0][2][n]) for n in runs[0][0])


def test_alpha_zero_is_static_sparse_training(tmp_path):
    """To the bit that of a loop which multiplies by a fixed mask after each step, and loses no step."""
    arguments: dict[str, Any] = {"max_steps": 4, "optim": "sgd", "max_grad_norm": 0.0, "weight_decay": 0.0}
    static = {"rigl": {**MOVING["rigl"], "alpha": 0.0}}
    run = tiny.trainer(tmp_path / "ours", [static], tiny.llama(), **arguments)
    run.add_callback(watch := Watch(run))
    run.train()
    for masks in watch.masks:
        tiny.assert_same(masks, watch.masks[0])

    plain = tiny.trainer(tmp_path / "plain", [], tiny.llama(), **arguments)

    class Mask(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            with torch.no_grad():
                for name, mask in watch.masks[0].items():
                    plain.model.get_parameter(name).mul_(mask)

        on_step_end = on_train_begin

    plain.add_callback(Mask())
    plain.train()
    tiny.assert_same(tiny.weights(run.model), tiny.weights(plain.model))


def test_under_fp16(tmp_path):
    """A moving step tells the scaler, or the next one fails."""
    run = loops.resumes(tmp_path, [MOVING, "fp16"], tiny.llama, max_steps=5, step=2)
    assert run.recipe["rigl"].moved > 0


def test_refused_where_no_weight_is_trained(tmp_path):
    model = tiny.llama().requires_grad_(False)
    model.get_parameter("lm_head.weight").requires_grad_(True)
    with pytest.raises(NotApplicable, match=r"rigl: no linear weight.* Fix: unfreeze"):
        tiny.trainer(tmp_path, ["rigl"], model)


@pytest.mark.parametrize(
    "setting", [{"sparsity": 0.0}, {"sparsity": 1.0}, {"every": 0}, {"alpha": 1.5}, {"alpha": -0.1}, {"end": 1.1}]
)
def test_bad_settings(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Recipe.parse([{"rigl": setting}])
