"""LayerScale.

What it does: multiplies the output of each residual branch by a trained vector of small numbers, so that a deep model
starts close to the identity. At the end the vectors are multiplied into the branches' last layers: nothing is left.

Helps: vision Transformers (and others) of 24 and more layers trained from scratch.
Does not help: shallow models; and fine-tuning, where small vectors silence what the branches have learned.
Limits: norms and warm-up stay. The vectors are kept in float32, since updates of numbers this small are lost in lower
precision. A branch that ends with a norm (Gemma 2 and 3) is refused.
Source: Touvron et al., "Going deeper with Image Transformers", ICCV 2021.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thrifty.architecture import branch_outputs, main_blocks
from thrifty.method import Method, Paper, register
from thrifty.methods.initialization._branches import check_linear, kept_weights, scale_outputs
from thrifty.remote_code import check_remote_code, write_remote_code

SCALE = "layerscale"


class ScaleOutput:
    """A forward hook that multiplies a layer's output by its vector, where it has one."""

    def __call__(self, module, inputs, output):
        scale = module._parameters.get("layerscale")
        return None if scale is None else output * scale.to(output.dtype)


def change(model, settings):
    """Gives the branches of a freshly built model their vectors, in place."""
    for block in model.get_submodule(settings["blocks"]):
        for name in settings["branches"]:
            module = block.get_submodule(name)
            size = module.nf if hasattr(module, "nf") else module.out_features
            start = torch.full((size,), settings["epsilon"], device=module.weight.device)
            module.register_parameter("layerscale", nn.Parameter(start))
            module.register_forward_hook(ScaleOutput())


def default_epsilon(layers: int) -> float:
    """Where the vectors start, by depth.

    >>> [default_epsilon(layers) for layers in (12, 18, 24, 36)]
    [0.1, 0.1, 1e-05, 1e-06]
    """
    return 0.1 if layers <= 18 else 1e-5 if layers <= 24 else 1e-6


def scaled_layers(model: nn.Module) -> list[Any]:
    """The layers that have vectors."""
    return [module for module in model.modules() if SCALE in module._parameters]


def layerscale(model: nn.Module, epsilon: float | None = None) -> dict[str, Any]:
    """Gives a Hugging Face model vectors on its branches in place, for one's own loop; `fold` takes them away.

    Args:
        model: A model to be trained from scratch.
        epsilon: Where the vectors start; None is by depth.

    Returns:
        What was changed, as the modelling file needs it.

    Raises:
        NotApplicable: The blocks are not recognised, or a branch ends with a norm.
    """
    blocks = main_blocks(model, "layerscale")
    branches = branch_outputs(blocks.layers[0], "layerscale")
    check_linear(model, branches, "layerscale")
    epsilon = default_epsilon(len(blocks)) if epsilon is None else epsilon
    settings = {"blocks": blocks.prefix, "branches": branches, "epsilon": epsilon}
    change(model, settings)
    return settings


def fold(model: nn.Module) -> None:
    """Multiplies the vectors into the layers, and takes them away."""
    for module in scaled_layers(model):
        scale_outputs(module, module._parameters.pop(SCALE).detach())


@contextlib.contextmanager
def folded(model: nn.Module) -> Iterator[None]:
    """Inside, the model is a plain one with the same function; afterwards it has its vectors again."""
    vectors = [(module, module._parameters[SCALE]) for module in scaled_layers(model)]
    with kept_weights(module for module, _ in vectors):
        fold(model)
        try:
            yield
        finally:
            for module, vector in vectors:
                module._parameters[SCALE] = vector


@register(
    "layerscale",
    title="LayerScale",
    section="initialization",
    sources=[Paper("Touvron et al.", 2021, "arXiv:2103.17239")],
    exact=False,
    claims=("residual",),
)
@dataclass(kw_only=True)
class LayerScale(Method):
    """A trained vector on each residual branch."""

    epsilon: float | None = None
    """Where the vectors start; None is 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond."""

    settings_written: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.epsilon is not None and self.epsilon < 0:
            raise ValueError(f"epsilon must not be negative, got {self.epsilon}")

    @property
    def no_decay(self) -> tuple[str, ...]:
        return (SCALE,)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        check_remote_code(model, "layerscale")
        self.settings_written = layerscale(model, self.epsilon)
        return model

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        with folded(model):
            yield

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        fold(model)
        return model

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        # A checkpoint holds the vectors. Loaded as the plain model it would lose them without a word.
        if scaled_layers(model):
            body = "\n\n\n".join(inspect.getsource(part) for part in (ScaleOutput, change))
            write_remote_code(folder, model, kind="layerscale", body=body, settings=self.settings_written)
