"""SkipInit.

What it does: multiplies each residual branch by a trained scalar of its own that starts at zero (or at one over the
square root of the depth), and removes the normalisations inside the blocks.

Helps: deep models trained from scratch: norms damp each branch by about the square root of the depth, and the scalar
does that alone.
Does not help: fine-tuning a pre-trained model (its normalisations are gone). Norms also regularise a little, which
`dropout` is meant to replace.
Limits: training from scratch. The result is another architecture: it loads with trust_remote_code=True.
Source: De and Smith, "Batch Normalization Biases Residual Blocks Towards the Identity Function in Deep Networks",
NeurIPS 2020.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thrifty.architecture import main_blocks
from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods.initialization._branches import head_of, norm_free_settings, remove_norms
from thrifty.remote_code import check_remote_code, write_remote_code

SCALE = "skipinit_scale"


class ScaleOutput:
    """A forward hook that multiplies a layer's output by its scalar."""

    def __call__(self, module, inputs, output):
        return output * module.skipinit_scale.to(output.dtype)


def change(model, settings):
    """Turns a freshly built model into its SkipInit form, in place."""
    for block in model.get_submodule(settings["blocks"]):
        remove_norms(block, settings["norms"])
        for name in settings["branches"]:
            module = block.get_submodule(name)
            start = torch.full((1,), settings["alpha"], device=module.weight.device)
            module.register_parameter("skipinit_scale", nn.Parameter(start))
            module.register_forward_hook(ScaleOutput())


def skipinit(model: nn.Module, alpha: float = 0.0) -> dict[str, Any]:
    """Turns a Hugging Face model into its SkipInit form in place, for one's own loop.

    Args:
        model: A model to be trained from scratch.
        alpha: Where the scalars start.

    Returns:
        What was changed, as the modelling file needs it.

    Raises:
        NotApplicable: The blocks are not recognised.
    """
    settings = {**norm_free_settings(model, "skipinit"), "alpha": alpha}
    change(model, settings)
    return settings


@register(
    "skipinit",
    title="SkipInit",
    section="initialization",
    sources=[Paper("De and Smith", 2020, "arXiv:2002.10444")],
    exact=False,
    saves_as="remote_code",
    claims=("residual",),
)
@dataclass(kw_only=True)
class SkipInit(Method):
    """A trained scalar on each residual branch, without normalisation."""

    alpha: float | None = 0.0
    """Where the scalars start; None is one over the square root of the number of branches."""
    dropout: float = 0.0
    """Dropout on the input of the layer that makes the logits."""

    settings_written: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    @property
    def no_decay(self) -> tuple[str, ...]:
        return (SCALE,)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        check_remote_code(model, "skipinit")
        branches = 2 * len(main_blocks(model, "skipinit"))
        self.settings_written = skipinit(model, branches**-0.5 if self.alpha is None else self.alpha)
        if self.dropout > 0:
            head = head_of(model)
            if head is None:
                raise NotApplicable(
                    f"skipinit: the layer that makes the logits of {type(model).__name__} is not found",
                    key="methods.skipinit.dropout",
                    value=self.dropout,
                    fix="set it to 0",
                )
            head.register_forward_pre_hook(Dropout(self.dropout))
        return model

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        body = "\n\n\n".join(inspect.getsource(part) for part in (ScaleOutput, remove_norms, change))
        write_remote_code(folder, model, kind="skipinit", body=body, settings=self.settings_written)


class Dropout:
    """A forward pre-hook: dropout on the first input, in training."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (nn.functional.dropout(inputs[0], self.p, module.training), *inputs[1:])
