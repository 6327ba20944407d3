"""Masked auto-encoder.

What it does: takes a random 75 % of an image's patches out before the encoder, which runs on the visible rest alone; a
light decoder then reconstructs the pixels of the missing ones. It sets the share and the target of transformers'
ViTMAE, chooses the patches by sample, and repairs the position tables of a model from scratch.

Helps: self-supervised pre-training of vision transformers: the encoder processes a quarter of the tokens.
Does not help: supervised fine-tuning, where all patches are needed, and small images with few patches.
Limits: models of the class ViTMAEForPreTraining. The decoder still runs on all positions, so that a wide one eats the
gain. transformers leaves the frozen position tables of a model from scratch at zero; here they are filled.
Source: He et al., "Masked Autoencoders Are Scalable Vision Learners", CVPR 2022.
Library: transformers (ViTMAEForPreTraining).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from thrifty.method import Batch, Method, NotApplicable, Paper, register
from thrifty.methods.selection._patches import noise_of
from thrifty.tasks.masked_image_modeling import fill_position_tables, patch_count


def set_masking(model: Any, mask_ratio: float = 0.75, norm_pix_loss: bool = True) -> int:
    """Prepares a ViTMAE for pre-training, in place, for one's own loop.

    Args:
        model: A `ViTMAEForPreTraining`.
        mask_ratio: Share of the patches that the encoder does not see.
        norm_pix_loss: Whether the target is each patch's pixels with mean 0 and variance 1.

    Returns:
        Patches that stay visible: the encoder's sequence has one token more, the class token.

    Raises:
        NotApplicable: The model is of another class, or nothing would be masked or visible.
    """
    config = model.config
    if not hasattr(model, "patchify") or not hasattr(config, "mask_ratio"):
        raise NotApplicable(
            f"mae trains masked auto-encoders of images, not {type(model).__name__}",
            fix="task: masked-image-modeling with model_type: vit_mae",
        )
    patches = patch_count(config)
    visible = int(patches * (1 - mask_ratio))
    if not 0 < visible < patches:
        raise NotApplicable(
            f"mae: with {patches} patches an image, mask_ratio={mask_ratio} leaves {visible} visible",
            fix="another mask_ratio, or a smaller patch_size",
        )
    if norm_pix_loss and config.patch_size == 1 and config.num_channels == 1:
        raise NotApplicable(
            "mae: a patch of one pixel and one channel has no variance to divide by",
            fix="norm_pix_loss: false, or a larger patch_size",
        )
    config.mask_ratio, config.norm_pix_loss = mask_ratio, norm_pix_loss
    fill_position_tables(model)
    return visible


@register(
    "mae",
    title="Masked auto-encoder",
    section="selection",
    sources=[Paper("He et al.", 2022, "arXiv:2111.06377")],
    exact=False,
    claims=("patches",),
    conflicts_with={
        "autoprog": "it changes the number of patches, among which this method chooses",
        "progressive-resolution": "it changes the number of patches, among which this method chooses",
    },
    tasks=("masked-image-modeling",),
    library="transformers",
    preset={"mask_ratio": 0.5},
)
@dataclass(kw_only=True)
class Mae(Method):
    """Encodes the visible patches only."""

    mask_ratio: float = 0.75
    """Share of the patches that the encoder does not see."""
    norm_pix_loss: bool = True
    """Whether the target is each patch's pixels with mean 0 and variance 1, the better one in the paper."""

    visible: int = field(default=0, init=False, repr=False)
    patches: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise ValueError(f"mask_ratio must be above 0 and below 1, got {self.mask_ratio}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.visible = set_masking(model, self.mask_ratio, self.norm_pix_loss)
        self.patches = patch_count(model.config)
        return model

    def shape_batch(self, batch: Batch, ctx: Any) -> Batch:
        if "noise" in batch:  # the task's collator chose the patches
            return batch
        return {**batch, "noise": noise_of(batch, self.patches, ctx)}
