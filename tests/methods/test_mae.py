"""MAE: which patches the encoder sees, which the loss counts, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import ViTMAEConfig, ViTMAEForPreTraining

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.selection._patches import keep_patches, sample_noise
from thrifty.methods.selection.mae import set_masking
from thrifty.tasks.masked_image_modeling import fill_position_tables


def pixels(count: int = 3) -> torch.Tensor:
    return torch.stack([sample["pixel_values"] for sample in tiny.bare_images()[:count]])


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 0.9])
def test_the_encoder_runs_on_the_visible_patches_only(ratio):
    model: Any = tiny.vitmae()
    visible = set_masking(model, ratio)
    lengths: list[int] = []
    for layer in model.vit.layers:
        layer.register_forward_hook(lambda m, inputs, out: lengths.append(out.shape[1]))
    out = model(pixel_values=pixels())
    assert visible == int(16 * (1 - ratio))
    assert lengths == [1 + visible] * 2
    assert out.mask.sum(1).tolist() == [16 - visible] * 3
    assert out.logits.shape[1] == 16


def test_the_loss_is_that_of_the_paper():
    """Mean squared error on normalised pixels, masked patches only, by hand."""
    model: Any = tiny.vitmae()
    set_masking(model, 0.5)
    noise = torch.rand(3, 16, generator=torch.Generator().manual_seed(0))
    out = model(pixel_values=pixels(), noise=noise)
    total, count = 0.0, 0
    for image, row, hidden in zip(pixels(), out.logits, noise.argsort(1)[:, 8:], strict=True):
        for index in hidden.tolist():
            y, x = divmod(index, 4)
            patch = image[0, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].flatten()
            target = (patch - patch.mean()) / (patch.var() + 1e-6).sqrt()
            total += float((row[index].detach() - target).square().mean())
            count += 1
    assert out.loss.item() == pytest.approx(total / count, rel=1e-5)


def test_visible_patches_get_no_gradient_from_the_loss():
    model: Any = tiny.vitmae()
    set_masking(model, 0.5)
    noise = torch.rand(3, 16, generator=torch.Generator().manual_seed(0))
    kept: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, out: Any) -> None:
        out.logits.retain_grad()
        kept.append(out.logits)

    model.decoder.register_forward_hook(keep)
    out = model(pixel_values=pixels(), noise=noise)
    out.loss.backward()
    per_patch = kept[0].grad.abs().sum(-1)  # type: ignore[union-attr]
    assert torch.equal(per_patch > 0, out.mask > 0)


def test_keeping_patches_keeps_order_and_class_token():
    sequence = torch.arange(2 * 6).reshape(2, 6, 1).float()
    noise = torch.tensor([[0.9, 0.1, 0.5, 0.2, 0.8], [0.0, 0.3, 0.2, 0.1, 0.4]])
    assert keep_patches(sequence, noise, 2)[..., 0].tolist() == [[0, 2, 4], [6, 7, 10]]
    assert torch.equal(keep_patches(sequence, noise, 5), sequence)


def test_noise_belongs_to_sample_and_step():
    first = sample_noise(torch.tensor([4, 9]), 50, seed=1, step=3)
    assert torch.equal(sample_noise(torch.tensor([9]), 50, seed=1, step=3), first[1:])
    for other in (sample_noise(torch.tensor([4, 9]), 50, seed=1, step=4), sample_noise(torch.tensor([4, 9]), 50, seed=2, step=3)):  # fmt: skip  # noqa: E501
        assert not torch.equal(other, first)
    assert sample_noise(torch.arange(400), 50, seed=1, step=0).mean().item() == pytest.approx(0.5, abs=0.01)


def test_flops_of_the_encoder_fall_with_the_patches():
    """Counted by torch; 64 patches, 16 visible. The linear layers see 17 tokens instead of 64."""
    config = ViTMAEConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=2,
        num_channels=1, decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        decoder_intermediate_size=32, mask_ratio=0.0,
    )  # fmt: skip
    model: Any = ViTMAEForPreTraining(config)
    flops = []
    for ratio in (0.001, 0.75):
        set_masking(model, ratio)
        with FlopCounterMode(display=False) as counter:
            model(pixel_values=torch.randn(2, 1, 16, 16)).loss.backward()
        flops.append(sum(counter.flop_counts["ViTMAEForPreTraining.vit.layers.1"].values()))
    assert flops[1] / flops[0] <= 17 / 64


@pytest.mark.parametrize("family", ["vitmae"])
def test_trains_and_resumes(tmp_path, family):
    lengths: list[int] = []

    def build() -> Any:
        model: Any = tiny.vitmae(dropout=0.1)
        model.vit.layers[0].register_forward_hook(lambda m, inputs, out: lengths.append(out.shape[1]))
        return model

    run = loops.resumes(tmp_path, [{"mae": {"mask_ratio": 0.75}}], build)
    assert set(lengths) == {5}
    assert run.model.config.mask_ratio == 0.75
    assert run.model.config.norm_pix_loss is True


def test_each_step_masks_anew_and_each_sample_on_its_own(tmp_path):
    run = tiny.trainer(tmp_path, [{"mae": {"mask_ratio": 0.5}}], tiny.vitmae(), max_steps=2)
    method = run.recipe["mae"]
    batch = tiny.collate_images(tiny.bare_images()[:2])
    first = method.shape_batch(batch, run.ctx)["noise"]
    assert not torch.equal(first[0], first[1])
    run.state.global_step = 1
    assert not torch.equal(method.shape_batch(batch, run.ctx)["noise"], first)
    assert method.shape_batch({**batch, "noise": first}, run.ctx)["noise"] is first


def test_zero_tables_are_filled_and_trained_ones_left():
    raw: Any = ViTMAEForPreTraining(tiny.vitmae().config)
    set_masking(raw, 0.5)
    for table in (raw.vit.embeddings.position_embeddings, raw.decoder.decoder_pos_embed):
        assert table.abs().sum() > 0
        assert table[0, 0].abs().sum() == 0, "the class token has no place"
        with torch.no_grad():
            table.mul_(2)
    assert not fill_position_tables(raw)


def test_own_loops():
    def make() -> loops.Setup:
        model = tiny.vitmae()
        set_masking(model, 0.75)
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    _, losses = loops.both_loops(make)
    assert losses[-1] != losses[0]


def test_refusals():
    with pytest.raises(NotApplicable, match="masked auto-encoders"):
        set_masking(tiny.vit(), 0.5)
    with pytest.raises(NotApplicable, match="leaves 0 visible"):
        set_masking(tiny.vitmae(), 0.99)
    with pytest.raises(InputError, match="mask_ratio"):
        Recipe.parse([{"mae": {"mask_ratio": 1.0}}])
