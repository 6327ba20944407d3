"""ReZero.

What it does: multiplies the branches of each block by one trained scalar that starts at zero, and removes the
normalisations inside the blocks. The network starts as the identity, whatever its depth.

Helps: very deep models trained from scratch, which plain initialisation cannot start; no warm-up is needed.
Does not help: fine-tuning a pre-trained model (its normalisations are gone), or shallow models, where norms train as
well.
Limits: training from scratch. The result is another architecture: it loads with trust_remote_code=True.
Source: Bachlechner et al., "ReZero is All You Need: Fast Convergence at Large Depth", 2020.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thrifty.method import Method, Paper, register
from thrifty.methods.initialization._branches import norm_free_settings, remove_norms
from thrifty.remote_code import check_remote_code, write_remote_code

ALPHA = "rezero_alpha"


class ScaleBranch:
    """A forward hook that multiplies a branch by its block's scalar. Refers to the block, so that copies follow it."""

    def __init__(self, block):
        self.block = block

    def __call__(self, module, inputs, output):
        return output * self.block.rezero_alpha.to(output.dtype)


def change(model, settings):
    """Turns a freshly built model into its ReZero form, in place."""
    for block in model.get_submodule(settings["blocks"]):
        device = next(block.parameters()).device
        remove_norms(block, settings["norms"])
        block.register_parameter("rezero_alpha", nn.Parameter(torch.zeros(1, device=device)))
        for name in settings["branches"]:
            block.get_submodule(name).register_forward_hook(ScaleBranch(block))


def rezero(model: nn.Module) -> dict[str, Any]:
    """Turns a Hugging Face model into its ReZero form in place, for one's own loop.

    Returns:
        What was changed, as the modelling file needs it: names of the blocks, norms and branches.

    Raises:
        NotApplicable: The blocks are not recognised.
    """
    settings = norm_free_settings(model, "rezero")
    change(model, settings)
    return settings


@register(
    "rezero",
    title="ReZero",
    section="initialization",
    sources=[Paper("Bachlechner et al.", 2020, "arXiv:2003.04887")],
    exact=False,
    saves_as="remote_code",
    claims=("residual",),
)
@dataclass(kw_only=True)
class ReZero(Method):
    """Residual branches that start at zero, without normalisation."""

    alpha_lr: float = 1.0
    """The scalars' learning rate, as a multiple of the run's."""

    @property
    def no_decay(self) -> tuple[str, ...]:
        return (ALPHA,)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        check_remote_code(model, "rezero")
        self._settings = rezero(model)
        return model

    def adjust_groups(self, groups: list[dict[str, Any]], ctx: Any) -> list[dict[str, Any]]:
        if self.alpha_lr == 1.0:
            return groups
        adjusted = []
        for group in groups:
            pairs = list(zip(group["names"], group["params"], strict=True))
            for is_alpha in (False, True):
                chosen = [(name, p) for name, p in pairs if (ALPHA in name) is is_alpha]
                part = {**group, "names": [name for name, _ in chosen], "params": [p for _, p in chosen]}
                if is_alpha:
                    part["lr"] = ctx.args.learning_rate * self.alpha_lr
                if chosen:
                    adjusted.append(part)
        return adjusted

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        body = "\n\n\n".join(inspect.getsource(part) for part in (ScaleBranch, remove_norms, change))
        write_remote_code(folder, model, kind="rezero", body=body, settings=self._settings)
