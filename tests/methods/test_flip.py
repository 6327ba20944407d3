"""FLIP: the image tower sees some patches in training, all at the end and in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.selection.flip import PatchDropper


def siglip() -> Any:
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**tower, "vocab_size": 97, "max_position_embeddings": 64}
    vision = {**tower, "image_size": 8, "patch_size": 2, "num_channels": 1}
    return SiglipModel(SiglipConfig(text_config=text, vision_config=vision))


def batch(count: int = 3) -> dict[str, Any]:
    inputs = tiny.collate_pairs(tiny.pair_samples()[:count])
    del inputs["sample_id"]
    return inputs


def lengths_of(model: Any) -> list[int]:
    seen: list[int] = []
    model.vision_model.encoder.layers[0].register_forward_hook(
        lambda m, i, out: seen.append((out[0] if isinstance(out, tuple) else out).shape[1])
    )
    return seen


@pytest.mark.parametrize(("build", "prefix"), [(tiny.clip, 1), (siglip, 0)], ids=["clip", "siglip"])
@pytest.mark.parametrize("ratio", [0.5, 0.75])
def test_the_image_tower_is_shorter_and_the_class_token_stays(build, prefix, ratio):
    model = build()
    dropper, seen = PatchDropper(model, ratio), lengths_of(model)
    whole = model(**batch())
    with dropper.masking(torch.rand(3, 16)):
        part = model(**batch())
    again = model(**batch())
    assert seen == [prefix + 16, prefix + round(16 * (1 - ratio)), prefix + 16]
    assert torch.equal(whole.logits_per_text, again.logits_per_text)
    assert not torch.allclose(whole.logits_per_text, part.logits_per_text)
    torch.testing.assert_close(part.text_embeds, whole.text_embeds)


def test_the_kept_patches_are_those_of_least_noise_for_each_image():
    model: Any = tiny.clip()
    dropper = PatchDropper(model, 0.5)
    noise = torch.rand(3, 16, generator=torch.Generator().manual_seed(1))
    embeddings = model.vision_model.embeddings
    whole = embeddings(batch()["pixel_values"])
    with dropper.masking(noise):
        part = embeddings(batch()["pixel_values"])
    for i in range(3):
        kept = sorted(noise[i].argsort()[:8].tolist())
        assert torch.equal(part[i], whole[i, [0, *(1 + k for k in kept)]])


def test_mean_pooled_linear_encoder_is_unbiased():
    """The expected embedding over masks is the unmasked one."""
    model: Any = tiny.clip()
    dropper = PatchDropper(model, 0.5)
    embeddings, images = model.vision_model.embeddings, batch(1)["pixel_values"]
    with torch.no_grad():
        whole = embeddings(images)[:, 1:].mean(1)
        with dropper.masking(torch.rand(4000, 16, generator=torch.Generator().manual_seed(0))):
            mean = embeddings(images.expand(4000, -1, -1, -1))[:, 1:].mean(1).mean(0, keepdim=True)
    torch.testing.assert_close(mean, whole, atol=0.02, rtol=0)


def test_flops_of_the_tower_halve():
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {**tower, "image_size": 32, "patch_size": 2, "num_channels": 1}
    config = CLIPConfig(text_config={**tower, "vocab_size": 97, "eos_token_id": 0}, vision_config=vision)
    model: Any = CLIPModel(config)
    dropper = PatchDropper(model, 0.5)
    images, flops = torch.randn(2, 1, 32, 32), []
    for noise in (None, torch.rand(2, 256)):
        with dropper.masking(noise), FlopCounterMode(display=False) as counter:
            model.vision_model(pixel_values=images).pooler_output.sum().backward()
        layers = [v for k, v in counter.flop_counts.items() if k.endswith("encoder.layers.1")]
        flops.append(sum(layers[0].values()))
    assert flops[1] / flops[0] < 0.51


def test_masked_then_whole_then_resumed(tmp_path):
    """6 steps of which the last third is unmasked; resumed just before and after the change."""
    seen: list[int] = []

    def build() -> Any:
        model = tiny.clip(dropout=0.1)
        seen.extend([0])
        model.vision_model.encoder.layers[0].register_forward_hook(lambda m, i, out: seen.append(out.shape[1]))  # type: ignore[union-attr, operator]
        return model

    for step in (3, 4):
        seen.clear()
        folder = tmp_path / str(step)
        loops.resumes(folder, [{"flip": {"unmasked_share": 0.34}}], build, step=step, max_steps=6)
        full = seen[1 : seen.index(0, 1)]
        assert [length for length in full if length != 17] == [9] * 4
        assert full[-2:] == [17, 17]


def test_evaluation_sees_whole_images(tmp_path):
    run = tiny.trainer(tmp_path, ["flip"], tiny.clip(), max_steps=2, eval_strategy="steps", eval_steps=1)
    seen = lengths_of(run.model)
    run.can_return_loss = True
    run.train()
    assert seen.count(9) == 2
    assert any("eval_loss" in row for row in run.state.log_history)
    assert seen[-1] == 17


def test_own_loops_agree():
    inputs = [batch(), {**batch(2)}]

    def train(accelerate: bool) -> list[float]:
        torch.manual_seed(0)
        model = net = tiny.clip()
        dropper = PatchDropper(model, 0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        backward = torch.Tensor.backward
        if accelerate:
            accelerator = loops.new_accelerator()
            net, optimizer = accelerator.prepare(model, optimizer)
            backward = accelerator.backward
        losses = []
        for part in inputs:
            optimizer.zero_grad()
            with dropper.masking(torch.rand(len(part["pixel_values"]), 16)):
                loss = net(**part).loss
            backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert train(False) == train(True)


def test_refusals():
    with pytest.raises(NotApplicable, match="image tower"):
        PatchDropper(tiny.bert(), 0.5)
    with pytest.raises(NotApplicable, match="leaves 0"):
        PatchDropper(tiny.clip(), 0.99)
    for setting in ({"mask_ratio": 0.0}, {"unmasked_share": 1.0}):
        with pytest.raises(InputError, match=next(iter(setting))):
            Recipe.parse([{"flip": setting}])
