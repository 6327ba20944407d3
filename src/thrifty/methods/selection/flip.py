"""FLIP: CLIP on masked images.

What it does: drops a random half (or more) of the patches before the image encoder of a contrastive image-text model,
so that each step costs about half there; the last part of the run sees whole images again.

Helps: pre-training on many pairs: more pairs in the same time, and larger batches in the same memory.
Does not help: small data, where the encoder sees every pair many times anyway; images with few patches.
Limits: the batch that now fits is larger, and its learning rate is yours to set. The saved memory is not there in the
unmasked part at the end: with unmasked_share 0 it never comes. Class tokens are never dropped; evaluation sees whole
images.
Source: Li et al., "Scaling Language-Image Pre-training via Masking", CVPR 2023.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import Batch, Method, NotApplicable, Paper, register
from thrifty.methods.selection._patches import keep_patches, noise_of

_NOISE = "patch_noise"


class PatchDropper:
    """Drops patches of the image tower of a CLIP-like model, for one's own loop: `with dropper.masking(noise): ...`.

    Args:
        model: Has a `vision_model` whose `embeddings` give one token a patch.
        mask_ratio: Share of the patches that is dropped.

    Raises:
        NotApplicable: The model has no such tower, or nothing would be dropped or left.
    """

    def __init__(self, model: Any, mask_ratio: float = 0.5) -> None:
        self.mask_ratio = mask_ratio
        self.noise: Tensor | None = None
        self._handles: list[Any] = []
        self.attach(model)

    def attach(self, model: Any) -> None:
        """Serves this model too, with what `masking` is given (a dry run looks at several)."""
        embeddings = getattr(getattr(model, "vision_model", None), "embeddings", None)
        if embeddings is None or not hasattr(embeddings, "num_patches"):
            raise NotApplicable(
                f"flip drops patches of an image tower, and {type(model).__name__} has none that it knows",
                fix="task: image-text with a CLIP-like model",
            )
        self.patches = int(embeddings.num_patches)
        self.kept = self.patches - round(self.mask_ratio * self.patches)
        if not 0 < self.kept < self.patches:
            raise NotApplicable(
                f"flip: with {self.patches} patches an image, mask_ratio={self.mask_ratio} leaves {self.kept}",
                fix="another mask_ratio, or a smaller patch_size",
            )
        self._handles.append(embeddings.register_forward_hook(self._drop))

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchDropper:
        return self  # a copied embedding is served by the same dropper

    def _drop(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if self.noise is None:
            return None
        return keep_patches(output, self.noise.to(output.device), self.kept)

    @contextlib.contextmanager
    def masking(self, noise: Tensor | None) -> Iterator[None]:
        """Inside, the image tower sees the patches with the smallest noise, shape (batch, patches); None: all."""
        self.noise = noise
        try:
            yield
        finally:
            self.noise = None

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@register(
    "flip",
    title="FLIP: masked images for CLIP",
    section="selection",
    sources=[Paper("Li et al.", 2023, "arXiv:2212.00794")],
    exact=False,
    # The contrastive loss compares a pair with the others of its own micro-batch and process.
    micro_batch_invariant=False,
    processes=False,
    claims=("patches",),
    conflicts_with={
        "autoprog": "it changes the number of patches, among which this method chooses",
        "progressive-resolution": "it changes the number of patches, among which this method chooses",
    },
    tasks=("image-text",),
    preset={"unmasked_share": 0.34},
)
@dataclass(kw_only=True)
class Flip(Method):
    """Encodes some of the patches of each image."""

    mask_ratio: float = 0.5
    """Share of the patches that is dropped; the paper uses 0.5 and 0.75."""
    unmasked_share: float = 0.01
    """Share of the run, at its end, that sees whole images."""

    dropper: PatchDropper | None = field(default=None, init=False, repr=False)
    masked_steps: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise ValueError(f"mask_ratio must be above 0 and below 1, got {self.mask_ratio}")
        if not 0 <= self.unmasked_share < 1:
            raise ValueError(f"unmasked_share must be at least 0 and below 1, got {self.unmasked_share}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if self.dropper is None:
            self.dropper = PatchDropper(model, self.mask_ratio)
        else:
            self.dropper.attach(model)
        self.masked_steps = ctx.total_steps - round(self.unmasked_share * ctx.total_steps)
        return model

    def shape_batch(self, batch: Batch, ctx: Any) -> Batch:
        assert self.dropper is not None
        if ctx.step >= self.masked_steps:
            return batch
        return {**batch, _NOISE: noise_of(batch, self.dropper.patches, ctx)}

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        def masked(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            dropper = self.dropper
            assert dropper is not None
            inputs = dict(inputs)
            noise = inputs.pop(_NOISE, None)
            if ctx.planning:
                noise = torch.rand(len(inputs["pixel_values"]), dropper.patches)
            with dropper.masking(noise):
                return compute_loss(model, inputs, num_items_in_batch)

        return masked

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        assert self.dropper is not None
        self.dropper.remove()
        self.dropper.attach(model)

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        assert self.dropper is not None
        self.dropper.remove()
        return model
