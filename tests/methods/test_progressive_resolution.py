"""Progressive resolution: schedules, the resampled patch embedding, and runs whose tokens grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeiTConfig, DeiTForImageClassification

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.growth._shapes import resize_images
from thrifty.methods.growth.progressive_resolution import (
    resize_patches,
    resize_positions,
    set_patch_size,
    side_at,
)

PATCHES = {"progressive-resolution": {"start": 1.0, "patch_sizes": [8], "boundaries": [0.5]}}


def _vit(layers: int = 2) -> Any:
    model: Any = tiny.vit(layers)
    return model


def test_schedule():
    sides = [side_at(t, 100, 224, 16) for t in range(100)]
    assert sides[0] == 112
    assert sides == sorted(sides)
    assert set(sides[80:]) == {224}
    assert all(side % 16 == 0 for side in sides)
    assert {side_at(t, 100, 224, 16, start=1.0) for t in range(100)} == {224}


@pytest.mark.parametrize("size", [4, 6, 8, 12])
def test_enlarged_patches_have_the_same_embedding(size):
    """The oracle of FlexiViT: (B x) w' = x w for every patch x where B enlarges."""
    torch.manual_seed(0)
    weight, x = torch.randn(5, 3, 4, 4).double(), torch.randn(7, 3, 4, 4).double()
    large = nn.functional.interpolate(x, size=(size, size), mode="bilinear")
    new = resize_patches(weight, size)
    torch.testing.assert_close(large.flatten(1) @ new.flatten(1).T, x.flatten(1) @ weight.flatten(1).T)


def test_smaller_patches_are_the_least_squares_fit():
    """Nothing nearby has a smaller error over white noise than the pseudo-inverse."""
    torch.manual_seed(0)
    weight = torch.randn(1, 1, 8, 8).double()
    x = torch.eye(64).double().view(64, 1, 8, 8)
    small = nn.functional.interpolate(x, size=(4, 4), mode="bilinear").flatten(1)

    def error(w: torch.Tensor) -> float:
        return float((small @ w.flatten() - x.flatten(1) @ weight.flatten()).square().sum())

    best = resize_patches(weight, 4)
    for _ in range(20):
        assert error(best) < error(best + 0.01 * torch.randn_like(best))


def test_positions_keep_the_class_token():
    positions = torch.randn(1, 1 + 16, 6)
    new = resize_positions(positions, 2, 1)
    assert new.shape == (1, 5, 6)
    assert torch.equal(new[:, 0], positions[:, 0])
    assert torch.equal(resize_positions(positions, 4, 1), positions)


def _deit() -> Any:
    config = DeiTConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8,
                        patch_size=2, num_channels=1, num_labels=3)  # fmt: skip
    return DeiTForImageClassification(config)


@pytest.mark.parametrize("build", [_vit, _deit])
def test_models_with_other_patches_run_save_and_load(tmp_path, build):
    model = build()
    mapping = set_patch_size(model, 4 if build is _deit else 8)
    assert all(name in dict(model.named_parameters()) for name in mapping)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    pixels = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(pixels).logits, model.eval()(pixels).logits)


class Tokens:
    """Notes the number of tokens of each training pass."""

    def __init__(self, model: Any) -> None:
        self.seen: list[int] = []
        model.vit.layers[0].register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training:
            self.seen.append(args[0].shape[1])


def test_images_grow(tmp_path):
    run = tiny.trainer(tmp_path, [{"progressive-resolution": {"start": 0.5, "end": 0.5}}], _vit(), max_steps=4)
    tokens = Tokens(run.model)
    run.train()
    assert tokens.seen[-4:] == [2, 2, 5, 5]  # one patch of four at first, and the class token


def test_patches_shrink_and_states_start_anew(tmp_path):
    run = tiny.trainer(tmp_path, [PATCHES], _vit(), max_steps=4)
    tokens = Tokens(run.model)
    run.train()
    assert tokens.seen[-4:] == [2, 2, 5, 5]
    assert run.model.config.patch_size == 4
    steps = {n: float(run.ctx.optimizer.state[p]["step"]) for n, p in run.model.named_parameters()}
    assert steps["vit.embeddings.position_embeddings"] == 2
    assert steps["vit.layers.0.mlp.fc1.weight"] == 4


@pytest.mark.parametrize("method", [PATCHES, {"progressive-resolution": {"start": 0.5}}], ids=["patches", "side"])
@pytest.mark.parametrize("step", [1, 3, 4])
def test_resumes(tmp_path, method, step):
    loops.resumes(tmp_path, [method], _vit, max_steps=6, step=step)


def test_full_size_from_the_first_step_is_the_baseline(tmp_path):
    results = []
    for methods in ((), [{"progressive-resolution": {"start": 1.0}}]):
        run = tiny.trainer(tmp_path / str(len(methods)), methods, _vit())
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(*results)


def test_micro_batches_do_not_matter(tmp_path):
    results = []
    for size, accumulation in ((1, 4), (4, 1)):
        run = tiny.trainer(tmp_path / str(size), [{"progressive-resolution": {"start": 0.5}}], _vit(), max_steps=4,
                           optim="sgd", per_device_train_batch_size=size,
                           gradient_accumulation_steps=accumulation)  # fmt: skip
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(*results, atol=1e-6)


def test_phases():
    method: Any = Recipe.parse([PATCHES])["progressive-resolution"]
    patches = [(p.steps, p.description, p.length) for p in method.phases(_vit().config, 10)]
    assert patches == [(5, "8 pixels, patches of 8", 0.25), (5, "8 pixels, patches of 4", 1.0)]
    method = Recipe.parse(["progressive-resolution"])["progressive-resolution"]
    assert [(p.steps, p.length) for p in method.phases(_vit().config, 10)] == [(8, 0.25), (2, 1.0)]


def test_in_ones_own_loop():
    model = _vit()
    set_patch_size(model, 8)
    losses = []
    for patch in (8, 4):
        if patch != 8:
            set_patch_size(model, patch)
        setup = loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses += loops.accelerate_loop(setup) if patch == 4 else loops.plain_loop(setup)
    small = {"pixel_values": resize_images(torch.randn(2, 1, 8, 8), 4), "interpolate_pos_encoding": True}
    assert model(**small).logits.shape == (2, 3)
    assert all(torch.isfinite(torch.tensor(losses)))


def test_refused(tmp_path):
    with pytest.raises(NotApplicable, match="takes no images"):
        tiny.trainer(tmp_path, ["progressive-resolution"])
    with pytest.raises(NotApplicable, match="divisors of 8 above 4"):
        tiny.trainer(tmp_path, [{"progressive-resolution": {"patch_sizes": [6], "boundaries": [0.5]}}], _vit())
    with pytest.raises(NotApplicable, match="too few"):
        tiny.trainer(tmp_path, [PATCHES], _vit(), max_steps=1)
    bad = [{"start": 0.0}, {"end": 1.5}, {"boundaries": [0.5]}, {"patch_sizes": [8, 16], "boundaries": [0.1, 0.2]}]
    for settings in bad:
        with pytest.raises(InputError, match=next(iter(settings))):
            Recipe.parse([{"progressive-resolution": settings}])
