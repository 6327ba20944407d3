"""Fixup.

What it does: removes the normalisations inside the blocks, starts each residual branch at zero, and scales the layers
inside the branches down by the depth, so that the first updates change the output by the same amount at any depth.
Scalar biases and a scalar multiplier for each branch take over what norms could express.

Helps: very deep models trained from scratch at ordinary learning rates, without normalisation.
Does not help: fine-tuning a pre-trained model (its weights and norms are gone), or shallow models.
Limits: training from scratch: all weights of the blocks are drawn anew. A head that is tied to the embeddings is left
alone, so that the first logits are not zero. The result is another architecture: it loads with trust_remote_code=True.
Source: Zhang, Dauphin and Ma, "Fixup Initialization: Residual Learning Without Normalization", ICLR 2019.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thrifty.architecture import LINEAR, main_blocks
from thrifty.method import Method, Paper, register
from thrifty.methods.initialization._branches import (
    activations,
    fan_in_normal,
    head_of,
    norm_free_settings,
    remove_norms,
)
from thrifty.remote_code import check_remote_code, write_remote_code


class AddBias:
    """A forward pre-hook that adds a module's scalar bias to its input."""

    def __call__(self, module, inputs):
        return (inputs[0] + module.fixup_bias.to(inputs[0].dtype), *inputs[1:])


class ScaleOutput:
    """A forward hook that multiplies a layer's output by its scalar."""

    def __call__(self, module, inputs, output):
        return output * module.fixup_scale.to(output.dtype)


def change(model, settings):
    """Turns a freshly built model into its Fixup form, in place."""
    for block in model.get_submodule(settings["blocks"]):
        remove_norms(block, settings["norms"])
        device = next(block.parameters()).device
        for name in settings["biases"]:
            module = block.get_submodule(name)
            module.register_parameter("fixup_bias", nn.Parameter(torch.zeros(1, device=device)))
            module.register_forward_pre_hook(AddBias())
        for name in settings["branches"]:
            module = block.get_submodule(name)
            module.register_parameter("fixup_scale", nn.Parameter(torch.ones(1, device=device)))
            module.register_forward_hook(ScaleOutput())


def depth_factor(branches: int, layers: int = 2) -> float:
    """The scale of the weights inside the branches: branches^(-1 / (2 layers - 2)).

    >>> round(depth_factor(12), 3), round(depth_factor(24), 3)
    (0.289, 0.204)
    """
    return branches ** (-1 / (2 * layers - 2))


def fixup(model: nn.Module, branch_depth: int = 2) -> dict[str, Any]:
    """Turns a Hugging Face model into its Fixup form in place, weights drawn anew, for one's own loop.

    Args:
        model: A model to be trained from scratch.
        branch_depth: Layers that follow one another in a branch.

    Returns:
        What was changed, as the modelling file needs it.

    Raises:
        NotApplicable: The blocks are not recognised.
    """
    settings = norm_free_settings(model, "fixup")
    blocks = main_blocks(model, "fixup")
    first = blocks.layers[0]
    linears = [name for name, module in first.named_modules() if isinstance(module, LINEAR)]
    settings["biases"] = [*linears, *activations(first)]
    factor = depth_factor(2 * len(blocks), branch_depth)
    for block in blocks:
        for name in linears:
            # Before an activation half of the variance is lost.
            gain = 1.0 if re.search(r"attn|attention", name) else 2.0
            fan_in_normal(block.get_submodule(name), 0.0 if name in settings["branches"] else gain * factor**2)
    head: Any = head_of(model)
    tied = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    if head is not None and id(head.weight) not in tied:
        for p in head.parameters():
            nn.init.zeros_(p)
    change(model, settings)
    return settings


@register(
    "fixup",
    title="Fixup",
    section="initialization",
    sources=[Paper("Zhang, Dauphin and Ma", 2019, "arXiv:1901.09321")],
    exact=False,
    saves_as="remote_code",
    claims=("residual",),
    conflicts_with={
        "stacking": "its constants follow from the depth, which would grow",
        "autoprog": "its constants follow from the depth, which would grow",
    },
)
@dataclass(kw_only=True)
class Fixup(Method):
    """Initialisation by depth in place of normalisation."""

    branch_depth: int = 2
    """Layers that follow one another in a branch: value and output, or both of the feed-forward part."""

    settings_written: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.branch_depth < 2:
            raise ValueError(f"branch_depth must be at least 2, got {self.branch_depth}")

    @property
    def no_decay(self) -> tuple[str, ...]:
        return ("fixup_bias", "fixup_scale")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        check_remote_code(model, "fixup")
        self.settings_written = fixup(model, self.branch_depth)
        return model

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        body = "\n\n\n".join(inspect.getsource(part) for part in (AddBias, ScaleOutput, remove_norms, change))
        write_remote_code(folder, model, kind="fixup", body=body, settings=self.settings_written)
