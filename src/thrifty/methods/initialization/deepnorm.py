"""DeepNorm.

What it does: normalises after each residual addition, of the input scaled up and the branch as it is:
LN(alpha * x + F(x)), and draws values, output projections and feed-forward layers with a gain below one. Both constants
follow from the depth, and bound how far an update can move the output.

Helps: very deep post-norm models (BERT) trained from scratch, which diverge otherwise; post-norm often ends better than
pre-norm.
Does not help: fine-tuning a pre-trained model, and shallow ones.
Limits: training from scratch. In a post-norm model the constant folds into the branches' last layers at the end, and
the result is plain (up to the epsilon inside the norm). A pre-norm model (Llama, GPT-2, ViT) is turned into a post-norm
one, which loads with trust_remote_code=True.
Source: Wang et al., "DeepNet: Scaling Transformers to 1,000 Layers", 2022.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from thrifty.architecture import branch_outputs, is_post_norm, main_blocks, norm_names
from thrifty.method import Method, NotApplicable, Paper, SavesAs, register
from thrifty.methods.initialization._branches import check_linear, kept_weights, roles, scale_outputs, xavier
from thrifty.remote_code import check_remote_code, write_remote_code


class Damp:
    """A forward hook that divides a layer's output: LN(x + F / alpha) is LN(alpha * x + F)."""

    def __init__(self, alpha):
        self.alpha = alpha
        self.on = True

    def __call__(self, module, inputs, output):
        return output / self.alpha if self.on else None


class PostNorm:
    """Moves a norm from before a branch to behind the residual addition.

    In the block's own code the norm then passes its input on, and the branch gives out what, added to that input, is
    LN(alpha * x + F(x)).
    """

    def __init__(self, norm, alpha):
        self.norm, self.alpha, self.x = norm, alpha, None

    def enter(self, x):
        self.x = x
        return x

    def leave(self, module, inputs, output):
        f = output[0] if isinstance(output, tuple) else output
        x, self.x = self.x, None
        added = type(self.norm).forward(self.norm, self.alpha * x + f) - x
        return (added, *output[1:]) if isinstance(output, tuple) else added


def change(model, settings):
    """Turns a freshly built model into its DeepNorm form, in place."""
    for block in model.get_submodule(settings["blocks"]):
        for norm_name, branch_name in settings["moved"]:
            norm = block.get_submodule(norm_name)
            post = PostNorm(norm, settings["alpha"])
            norm.forward = post.enter
            block.get_submodule(branch_name).register_forward_hook(post.leave)
        for name in settings["damped"]:
            block.get_submodule(name).register_forward_hook(Damp(settings["alpha"]))


def constants(layers: int) -> tuple[float, float]:
    """Alpha and beta of a stack of encoder or of decoder blocks.

    >>> tuple(round(value, 4) for value in constants(12))
    (2.2134, 0.3195)
    """
    return (2 * layers) ** 0.25, (8 * layers) ** -0.25


def deepnorm(model: nn.Module, alpha: float | None = None, beta: float | None = None) -> dict[str, Any]:
    """Turns a Hugging Face model into its DeepNorm form in place, weights drawn anew, for one's own loop.

    Args:
        model: A model to be trained from scratch.
        alpha: Scale of the skip; None is by depth.
        beta: Gain of values, output projections and feed-forward layers; None is by depth.

    Returns:
        What was changed, as the modelling file needs it.

    Raises:
        NotApplicable: The blocks are not recognised.
    """
    blocks = main_blocks(model, "deepnorm")
    first = blocks.layers[0]
    by_depth = constants(len(blocks))
    alpha, beta = by_depth[0] if alpha is None else alpha, by_depth[1] if beta is None else beta
    branches, norms = branch_outputs(first, "deepnorm"), norm_names(first)
    check_linear(model, branches, "deepnorm")
    settings: dict[str, Any] = {"blocks": blocks.prefix, "alpha": alpha, "moved": [], "damped": []}
    if is_post_norm(first):
        settings["damped"] = branches
    else:
        holders = [name.partition(".")[0] for name in branches]
        outside = [name for name, m in first.named_children() if isinstance(m, nn.Dropout) and m.p > 0]
        outside += [
            name for name, value in vars(first).items() if "dropout" in name and isinstance(value, float) and value
        ]
        if len(norms) != 2 or len(set(holders)) != 2 or outside:
            raise NotApplicable(
                f"deepnorm moves two norms behind two branches, and {type(first).__name__} has the norms {norms}, the "
                f"branches {holders} and behind them {outside or 'no dropout'}",
                fix="use a model family such as Llama, GPT-2, BERT or ViT (ViT without hidden dropout)",
            )
        settings["moved"] = list(zip(norms, holders, strict=True))
    for block in blocks:
        for name, role in roles(block, "deepnorm").items():
            xavier(block.get_submodule(name), 1.0 if role == "query_key" else beta, role)
    change(model, settings)
    return settings


def _damped(model: nn.Module, settings: dict[str, Any]) -> list[Any]:
    blocks: Any = model.get_submodule(settings["blocks"])
    return [block.get_submodule(name) for block in blocks for name in settings["damped"]]


def _dampers(module: nn.Module) -> list[Damp]:
    return [hook for hook in module._forward_hooks.values() if isinstance(hook, Damp)]


def fold(model: nn.Module, settings: dict[str, Any]) -> None:
    """Multiplies the constant of a post-norm model into its layers, for good."""
    for module in _damped(model, settings):
        scale_outputs(module, 1 / settings["alpha"])
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, Damp):
                del module._forward_hooks[key]


@contextlib.contextmanager
def folded(model: nn.Module, settings: dict[str, Any]) -> Iterator[None]:
    """Inside, a post-norm model has the constant in its layers; afterwards it is as before."""
    modules = _damped(model, settings)
    dampers = [damper for module in modules for damper in _dampers(module)]
    with kept_weights(modules):
        for module in modules:
            scale_outputs(module, 1 / settings["alpha"])
        for damper in dampers:
            damper.on = False
        try:
            yield
        finally:
            for damper in dampers:
                damper.on = True


@register(
    "deepnorm",
    title="DeepNorm",
    section="initialization",
    sources=[Paper("Wang et al.", 2022, "arXiv:2203.00555")],
    exact=False,
    saves_as="remote_code",
    claims=("residual",),
    conflicts_with={
        "stacking": "its constants follow from the depth, which would grow",
        "autoprog": "its constants follow from the depth, which would grow",
    },
)
@dataclass(kw_only=True)
class DeepNorm(Method):
    """Post-norm with a scaled skip and an initialisation by depth."""

    alpha: float | None = None
    """Scale of the skip; None is (2 N)^(1/4)."""
    beta: float | None = None
    """Gain of values, output projections and feed-forward layers; None is (8 N)^(-1/4)."""

    settings_written: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")

    @property
    def saves_as(self) -> SavesAs:
        return "plain" if self.settings_written.get("damped") else "remote_code"

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        check_remote_code(model, "deepnorm")
        self.settings_written = deepnorm(model, self.alpha, self.beta)
        return model

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        with folded(model, self.settings_written):
            yield

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        fold(model, self.settings_written)
        return model

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        dampers = [damper for module in _damped(model, self.settings_written) for damper in _dampers(module)]
        if self.settings_written["moved"] or any(damper.on for damper in dampers):
            body = "\n\n\n".join(inspect.getsource(part) for part in (Damp, PostNorm, change))
            write_remote_code(folder, model, kind="deepnorm", body=body, settings=self.settings_written)
