"""What all methods with masks share: pruned weights are zero whenever anybody looks, whatever the optimizer does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.sparsity._masks import MaskedWeights, block_weights, keep_best, random_masks

METHODS: dict[str, dict[str, Any]] = {
    "set": {"sparsity": 0.6, "every": 2},
    "snip": {"sparsity": 0.6, "samples": 3},
    "grasp": {"sparsity": 0.6, "samples": 3},
    "synflow": {"sparsity": 0.6, "iterations": 4},
}


class Watch(TrainerCallback):
    """After every step: how many weights are kept, and that all others and their optimizer states are zero."""

    def __init__(self, run: Any, name: str) -> None:
        self.run, self.name, self.kept = run, name, []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        masks = self.run.recipe[self.name].weights.masks
        assert set(masks) == set(block_weights(self.run.model, "test"))
        for name, mask in masks.items():
            p = self.run.model.get_parameter(name)
            assert not p[~mask].any()
            for value in self.run.ctx.optimizer.state[p].values():
                assert value.shape != p.shape or not value[~mask].any()
        self.kept.append(sum(int(mask.sum()) for mask in masks.values()))


@pytest.mark.parametrize(
    ("name", "family"), [("set", "gpt2"), ("set", "vit"), ("snip", "bert"), ("grasp", "vit"), ("synflow", "bert")]
)
def test_density_is_exact_and_never_drifts(tmp_path, name, family):
    watches: list[Watch] = []
    run = loops.resumes(
        tmp_path,
        [{name: METHODS[name]}],
        tiny.FAMILIES[family],
        max_steps=4,
        step=2,
        watch=lambda r: watches.append(Watch(r, name)) or watches[0],
    )
    weights = block_weights(run.model, "test")
    size = sum(p.numel() for p in weights.values())
    assert watches[0].kept == [round(0.4 * size)] * 4
    assert sum(int((p != 0).sum()) for p in weights.values()) <= round(0.4 * size)
    assert run.recipe[name].weights.density == pytest.approx(0.4, abs=1 / size)


def test_ties_remove_no_more_than_asked():
    scores = {"a": torch.ones(4, 5), "b": torch.ones(3, 2)}
    masks = keep_best(scores, 7)
    assert sum(int(mask.sum()) for mask in masks.values()) == 7
    assert {name: mask.shape for name, mask in masks.items()} == {name: s.shape for name, s in scores.items()}


def test_the_best_are_kept_over_all_layers():
    scores = {"a": torch.tensor([[5.0, 1.0]]), "b": torch.tensor([[4.0], [0.5], [3.0]])}
    masks = keep_best(scores, 3)
    assert masks["a"].tolist() == [[True, False]]
    assert masks["b"].tolist() == [[True], [False], [True]]


def test_own_loops_agree_and_act():
    def make() -> loops.Setup:
        model = tiny.gpt2()
        weights = block_weights(model, "test")
        counts = {name: p.numel() // 4 for name, p in weights.items()}
        masked = MaskedWeights(weights, random_masks(weights, counts, torch.Generator().manual_seed(1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return loops.Setup(
            model,
            optimizer,
            after_backward=lambda step: masked.mask_gradients(),
            after_step=lambda step: masked.apply(optimizer),
        )

    setup, losses = loops.both_loops(make)
    assert losses != loops.baseline(tiny.gpt2)[1]
    for p in block_weights(setup.model, "test").values():
        assert int((p == 0).sum()) == p.numel() - p.numel() // 4


@pytest.mark.parametrize("name", METHODS)
def test_the_batch_size_does_not_change_the_masks(tmp_path, name):
    masks = []
    for size in (1, 2):
        run = tiny.trainer(tmp_path / str(size), [{name: METHODS[name]}], per_device_train_batch_size=size)
        masks.append(run.recipe[name].weights.masks)  # type: ignore[attr-defined]
    tiny.assert_same(masks[0], masks[1])


@pytest.mark.parametrize("name", METHODS)
def test_refused_where_no_weight_is_trained(tmp_path, name):
    model: nn.Module = tiny.llama().requires_grad_(False)
    model.get_parameter("lm_head.weight").requires_grad_(True)
    with pytest.raises(NotApplicable, match=rf"{name}: no linear weight.* Fix: unfreeze"):
        tiny.trainer(tmp_path, [name], model)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *[(name, {"sparsity": value}) for name in METHODS for value in (0.0, 1.0)],
        ("set", {"zeta": 1.5}),
        ("set", {"every": 0}),
        ("set", {"end": -1.0}),
        ("snip", {"samples": 0}),
        ("grasp", {"samples": 0}),
        ("grasp", {"temperature": 0.0}),
        ("synflow", {"iterations": 0}),
    ],
)
def test_bad_settings(name, setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Recipe.parse([{name: setting}])
