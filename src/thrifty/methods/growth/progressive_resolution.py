"""Progressive resolution.

What it does: trains a vision Transformer on small images first and enlarges them during the run; or on large patches
first, that are then made smaller, with the patch embedding resampled. Either way early steps have fewer tokens.

Helps: training image classifiers: tokens fall with the square of the side, and attention with its fourth power.
Does not help: runs so short that the full resolution is hardly trained; details that only show in large images.
Limits: images are square. Smaller images need a model that interpolates its position embeddings (ViT, DeiT, ...);
other patches one whose patch embedding is a convolution with learned positions. A new patch size starts with fresh
optimizer states for the patch embedding and the positions.
Source: Howard, fast.ai, 2018; Tan and Le, "EfficientNetV2", ICML 2021; Beyer et al., "FlexiViT: One Model for All Patch
Sizes", CVPR 2023.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import Batch, Method, NotApplicable, Paper, Phase, register
from thrifty.methods.growth._shapes import resize_images


def side_at(step: int, total_steps: int, full: int, multiple: int, start: float = 0.5, end: float = 0.8) -> int:
    """The side of the images in a step, in pixels: from `start` x full at the beginning to full at `end` of the run.

    >>> [side_at(t, 100, 224, 32) for t in (0, 20, 40, 60, 79, 80, 99)]
    [96, 128, 160, 192, 192, 224, 224]
    """
    share = 1.0 if step >= end * total_steps else start + (1 - start) * step / (end * total_steps)
    return full if share == 1.0 else max(multiple, int(full * share) // multiple * multiple)


def resize_patches(weight: Tensor, size: int) -> Tensor:
    """A patch embedding for patches of another size (the pseudo-inverse resize of FlexiViT).

    With B the matrix that resizes a patch, the result w' makes (B x) w' as near as it can be to x w for all patches x,
    and equal to it where B enlarges.

    Args:
        weight: Shape (features, channels, old size, old size).
        size: Of the new patches.

    Returns:
        Shape (features, channels, size, size).
    """
    old = weight.shape[-1]
    if old == size:
        return weight.clone()
    basis = torch.eye(old * old, dtype=torch.float64, device=weight.device).view(old * old, 1, old, old)
    resize = nn.functional.interpolate(basis, size=(size, size), mode="bilinear").flatten(1)  # (old^2, size^2): B^T
    new = weight.double().flatten(2) @ torch.linalg.pinv(resize).T
    return new.view(*weight.shape[:2], size, size).to(weight.dtype)


def resize_positions(positions: Tensor, grid: int, extra: int) -> Tensor:
    """Position embeddings of shape (1, extra + old grid^2, features) for another grid; the extra tokens keep theirs."""
    own, patches = positions[:, :extra], positions[:, extra:]
    old = round(patches.shape[1] ** 0.5)
    square = patches.reshape(1, old, old, -1).permute(0, 3, 1, 2)
    new = nn.functional.interpolate(square.float(), size=(grid, grid), mode="bicubic", align_corners=False)
    return torch.cat([own, new.permute(0, 2, 3, 1).reshape(1, grid * grid, -1).to(positions.dtype)], dim=1)


def find_embeddings(model: nn.Module) -> tuple[str, Any]:
    """Name and module that hold `patch_embeddings.projection` and `position_embeddings`.

    Raises:
        NotApplicable: There is none, or its patches or grid are not square.
    """
    for name, module in model.named_modules():
        found: Any = module
        projection = getattr(getattr(found, "patch_embeddings", None), "projection", None)
        if isinstance(projection, nn.Conv2d) and isinstance(getattr(found, "position_embeddings", None), nn.Parameter):
            rows, columns = projection.kernel_size
            height, width = found.patch_embeddings.image_size
            if rows == columns and height == width:
                return name, found
    raise NotApplicable(
        f"progressive-resolution: {type(model).__name__} has no square patch embedding with learned positions",
        key="methods.progressive-resolution.patch_sizes",
        fix="use ViT or DeiT, or schedule the image side only",
    )


@torch.no_grad()
def set_patch_size(model: Any, size: int) -> dict[str, str | None]:
    """Gives a vision Transformer patches of another size, in place, for one's own loop.

    Returns:
        {new parameter name: None} for the parameters whose shape has changed.
    """
    name, embeddings = find_embeddings(model)
    patches = embeddings.patch_embeddings
    old: nn.Conv2d = patches.projection
    side = patches.image_size[0]
    extra = embeddings.position_embeddings.shape[1] - (side // old.kernel_size[0]) ** 2
    new = nn.Conv2d(old.in_channels, old.out_channels, size, stride=size, bias=old.bias is not None)
    new = new.to(device=old.weight.device, dtype=old.weight.dtype)
    new.weight.copy_(resize_patches(old.weight, size))
    if old.bias is not None and new.bias is not None:
        new.bias.copy_(old.bias)
    for key, p in new.named_parameters():
        p.requires_grad_(old.get_parameter(key).requires_grad)
    grid = side // size
    positions = resize_positions(embeddings.position_embeddings, grid, extra)
    embeddings.position_embeddings = nn.Parameter(positions, requires_grad=embeddings.position_embeddings.requires_grad)
    patches.projection, patches.patch_size, patches.num_patches = new, (size, size), grid * grid
    if hasattr(embeddings, "patch_size"):
        embeddings.patch_size = size
    model.config.patch_size = size
    prefix = f"{name}." if name else ""
    return {f"{prefix}patch_embeddings.projection.weight": None, f"{prefix}position_embeddings": None}


@register(
    "progressive-resolution",
    title="Progressive resolution",
    section="growth",
    sources=[
        Paper("Howard", 2018, "fast.ai, DAWNBench"),
        Paper("Tan and Le", 2021, "arXiv:2104.00298"),
        Paper("Beyer et al.", 2023, "arXiv:2212.08013"),
    ],
    exact=False,
    tasks=("image-classification", "masked-image-modeling"),
    claims=("length-schedule",),
    preset={"start": 0.5},
    runs_before=("section:sparsity",),
)
@dataclass(kw_only=True)
class ProgressiveResolution(Method):
    """Small images or large patches first."""

    start: float = 0.5
    """Side of the first images, as a share of the full one; 1 leaves them alone."""
    end: float = 0.8
    """Share of the run after which images have their full size."""
    patch_sizes: tuple[int, ...] = ()
    """Patch sizes before the model's own, largest first, e.g. [32]."""
    boundaries: tuple[float, ...] = ()
    """Shares of the run at which the next patch size begins, one for each of `patch_sizes`."""

    patch: int = field(default=0, init=False, repr=False)
    plan: list[tuple[int, int]] = field(default_factory=list, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for key in ("start", "end"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"{key} must be above 0 and at most 1, got {getattr(self, key)}")
        if len(self.boundaries) != len(self.patch_sizes):
            raise ValueError(
                f"boundaries needs one entry for each of patch_sizes, got {list(self.boundaries)} for "
                f"{list(self.patch_sizes)}"
            )
        if list(self.boundaries) != sorted(set(self.boundaries)) or not all(0 < b < 1 for b in self.boundaries):
            raise ValueError(f"boundaries must rise between 0 and 1, got {list(self.boundaries)}")
        if list(self.patch_sizes) != sorted(set(self.patch_sizes), reverse=True):
            raise ValueError(f"patch_sizes must fall, got {list(self.patch_sizes)}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.ctx = ctx
        accepted = inspect.signature(model.forward).parameters
        if "pixel_values" not in accepted:
            raise NotApplicable(
                f"progressive-resolution: {type(model).__name__} takes no images",
                fix="use sequence-length-warmup for text",
            )
        if self.start < 1 and "interpolate_pos_encoding" not in accepted:
            raise NotApplicable(
                f"progressive-resolution: {type(model).__name__} does not interpolate its position embeddings",
                key="methods.progressive-resolution.start",
                value=self.start,
                fix="set it to 1 and schedule patch_sizes, or use ViT or DeiT",
            )
        if not self.patch_sizes:
            return model
        self._check_patches(model)
        own = find_embeddings(model)[1].patch_embeddings.projection.kernel_size[0]
        firsts = [0, *(max(1, round(b * ctx.total_steps)) for b in self.boundaries)]
        self.plan = list(zip(firsts, [*self.patch_sizes, own], strict=True))
        if any(a >= b for a, b in itertools.pairwise([*firsts, ctx.total_steps])) and not ctx.planning:
            raise NotApplicable(
                f"progressive-resolution: the run has {ctx.total_steps} steps, too few for its patch sizes",
                key="methods.progressive-resolution.boundaries",
                value=list(self.boundaries),
                fix="train longer, or with fewer patch sizes",
            )
        # The dry run is that of the last phase, which needs the most memory.
        self.patch = own
        if not ctx.planning:
            self.patch = self.patch_sizes[0]
            set_patch_size(model, self.patch)
        return model

    def _check_patches(self, model: Any) -> None:
        embeddings = find_embeddings(model)[1]
        own = embeddings.patch_embeddings.projection.kernel_size[0]
        side = embeddings.patch_embeddings.image_size[0]
        bad = [size for size in self.patch_sizes if size <= own or side % size]
        if bad:
            raise NotApplicable(
                f"progressive-resolution: images have {side} pixels a side and the model's own patches {own}",
                key="methods.progressive-resolution.patch_sizes",
                value=bad,
                fix=f"give divisors of {side} above {own}",
            )

    def phases(self, model_config: Any, total_steps: int) -> list[Phase]:
        own, full = model_config.patch_size, model_config.image_size
        if not isinstance(own, int) or not isinstance(full, int):
            return []
        sizes = [*self.patch_sizes, own]
        firsts = [0, *(max(1, round(b * total_steps)) for b in self.boundaries), total_steps]

        def tokens(step: int) -> tuple[str, float]:
            patch = next(size for size, after in zip(sizes, firsts[1:], strict=True) if step < after)
            side = side_at(step, total_steps, full, patch, self.start, self.end)
            return f"{side} pixels, patches of {patch}", (side // patch) ** 2 / (full // own) ** 2

        return [
            Phase(steps=len(list(steps)), description=description, length=length)
            for (description, length), steps in itertools.groupby(range(total_steps), tokens)
        ]

    def shape_batch(self, batch: Batch, ctx: Any) -> Batch:
        pixels = batch["pixel_values"]
        patch = self.patch or ctx.model.config.patch_size
        multiple = patch if isinstance(patch, int) else max(patch)
        side = side_at(ctx.step, ctx.total_steps, pixels.shape[-1], multiple, self.start, self.end)
        if side == pixels.shape[-1] or len(pixels) == 0:
            return batch
        return {**batch, "pixel_values": resize_images(pixels, side), "interpolate_pos_encoding": True}

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        due = [size for first, size in self.plan if first == state.global_step]
        if due and due[0] != self.patch:
            self.patch = due[0]
            self.ctx.replace_model(kw["model"], set_patch_size(kw["model"], self.patch))

    def state_dict(self) -> dict[str, Any]:
        return {"patch": self.patch, "plan": [list(stage) for stage in self.plan]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.patch, self.plan = state["patch"], [(first, size) for first, size in state["plan"]]

    def restore_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if self.patch and find_embeddings(model)[1].patch_embeddings.projection.kernel_size[0] != self.patch:
            set_patch_size(model, self.patch)
        return model
