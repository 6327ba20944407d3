"""SET: what is dropped, where it grows, and what a new connection starts with."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import tiny
from thrifty.methods.sparsity._masks import erdos_renyi_kernel
from thrifty.methods.sparsity.set import EvolvingWeights, replace_connections


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(5))
def test_smallest_go_and_random_free_places_come(seed):
    mask = torch.rand(9, 7, generator=_rng(seed)) < 0.4
    weight = torch.randn(9, 7, generator=_rng(seed + 50)) * mask
    new, grown = replace_connections(weight, mask, 0.3, _rng(1))
    count = round(0.3 * int(mask.sum()))
    alive = sorted((i for i in range(63) if mask.flatten()[i]), key=lambda i: abs(weight.flatten()[i].item()))
    kept = {i for i in range(63) if (new & ~grown).flatten()[i]}
    assert kept == set(alive[count:])
    assert int(grown.sum()) == count
    assert not (grown & mask).any()  # neither what is kept nor what was just dropped
    assert int(new.sum()) == int(mask.sum())
    other = replace_connections(weight, mask, 0.3, _rng(2))[1]
    assert not torch.equal(other, grown)


def test_new_connections_are_drawn_anew_with_fresh_states():
    torch.manual_seed(0)
    layer = nn.Linear(100, 100, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    evolving = EvolvingWeights({"w": layer.weight}, 0.8, _rng())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    for _ in range(3):
        layer(torch.randn(4, 100)).square().mean().backward()
        evolving.mask_gradients()
        optimizer.step()
        evolving.apply(optimizer)
    before = evolving.masks["w"].clone()
    assert evolving.evolve(0.5, _rng(3), optimizer) == round(0.5 * int(before.sum()))
    grown = evolving.masks["w"] & ~before
    assert layer.weight[grown].std().item() == pytest.approx(0.02, rel=0.1)
    assert (layer.weight[grown] != 0).all()
    state = optimizer.state[layer.weight]
    assert not state["exp_avg"][grown].any()
    assert not state["exp_avg_sq"][grown].any()
    assert state["exp_avg"][evolving.masks["w"] & before].any()


class Masks(TrainerCallback):
    def __init__(self, run: Any) -> None:
        self.run, self.masks = run, []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.masks.append({n: m.clone() for n, m in self.run.recipe["set"].weights.masks.items()})


def _changes(folder: Any, **settings: Any) -> tuple[list[bool], Any]:
    run = tiny.trainer(folder, [{"set": {"sparsity": 0.6, **settings}}], max_steps=6, per_device_train_batch_size=8)
    run.add_callback(watch := Masks(run))
    run.train()
    return [any(not torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(watch.masks)], run


def test_by_epochs_and_an_end(tmp_path):
    """24 samples in batches of 8 make an epoch of 3 steps."""
    changes, run = _changes(tmp_path / "epochs", end=1.0)
    assert changes == [False, True, False, False, False]  # after step 3; after step 6 there is nothing left to train
    counts = erdos_renyi_kernel({n: tuple(m.shape) for n, m in run.recipe["set"].weights.masks.items()}, 0.6)
    assert {n: int(m.sum()) for n, m in run.recipe["set"].weights.masks.items()} == counts
    changes, _ = _changes(tmp_path / "steps", every=1, end=0.7)
    assert changes == [True, True, True, False, False]


def test_zeta_zero_is_static(tmp_path):
    changes, run = _changes(tmp_path, every=1, zeta=0.0)
    assert not any(changes)
    assert run.recipe["set"].replaced == 0
