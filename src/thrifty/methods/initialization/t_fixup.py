"""T-Fixup.

What it does: removes the normalisations inside the blocks and draws all weights by Xavier's rule, with values, output
projections, feed-forward layers and embeddings scaled down by the depth, so that Adam's first updates stay bounded
without warm-up.

Helps: Transformers trained from scratch without normalisation and without learning-rate warm-up.
Does not help: fine-tuning a pre-trained model (its weights and norms are gone).
Limits: training from scratch. The constants were derived for encoder-decoder models; for a decoder without
cross-attention `factor` may need tuning. The result is another architecture: it loads with trust_remote_code=True.
Source: Huang et al., "Improving Transformer Optimization Through Better Initialization", ICML 2020.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from thrifty.architecture import main_blocks
from thrifty.method import Method, Paper, register
from thrifty.methods.initialization._branches import head_of, norm_free_settings, remove_norms, roles, xavier
from thrifty.remote_code import auto_class_name, check_remote_code, write_remote_code


def decoder_factor(layers: int) -> float:
    """The scale of a decoder's weights and of embeddings.

    >>> round(decoder_factor(6), 4), round(decoder_factor(12), 4)
    (0.3689, 0.3102)
    """
    return (9 * layers) ** -0.25


def encoder_factor(layers: int) -> float:
    """The scale of an encoder's weights.

    >>> round(encoder_factor(6), 4), round(encoder_factor(12), 4)
    (0.4281, 0.36)
    """
    return 0.67 * layers**-0.25


def change(model, settings):
    """Turns a freshly built model into its norm-free form, in place."""
    for block in model.get_submodule(settings["blocks"]):
        remove_norms(block, settings["norms"])


def t_fixup(model: nn.Module, factor: float | None = None) -> dict[str, Any]:
    """Turns a Hugging Face model into its T-Fixup form in place, weights drawn anew, for one's own loop.

    Args:
        model: A model to be trained from scratch.
        factor: Scale of values, output projections and feed-forward layers; None is the paper's, by kind and depth.

    Returns:
        What was changed, as the modelling file needs it.

    Raises:
        NotApplicable: The blocks are not recognised.
    """
    settings = norm_free_settings(model, "t-fixup")
    blocks = main_blocks(model, "t-fixup")
    causal = auto_class_name(model) == "AutoModelForCausalLM"
    if factor is None:
        factor = (decoder_factor if causal else encoder_factor)(len(blocks))
    for block in blocks:
        for name, role in roles(block, "t-fixup").items():
            xavier(block.get_submodule(name), 1.0 if role == "query_key" else factor, role)
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for module in embeddings:
        nn.init.normal_(module.weight, std=decoder_factor(len(blocks)) * module.embedding_dim**-0.5)
    head: Any = head_of(model)
    if isinstance(head, nn.Linear) and id(head.weight) not in {id(module.weight) for module in embeddings}:
        xavier(head, 1.0)
    change(model, settings)
    return settings


@register(
    "t-fixup",
    title="T-Fixup",
    section="initialization",
    sources=[Paper("Huang et al.", 2020, "ICML 2020, PMLR 119:4475")],
    exact=False,
    saves_as="remote_code",
    claims=("residual",),
    conflicts_with={
        "stacking": "its constants follow from the depth, which would grow",
        "autoprog": "its constants follow from the depth, which would grow",
    },
)
@dataclass(kw_only=True)
class TFixup(Method):
    """Transformers without normalisation and warm-up, by initialisation."""

    factor: float | None = None
    """Scale of values, output projections and feed-forward layers; None is the paper's."""

    settings_written: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.factor is not None and self.factor <= 0:
            raise ValueError(f"factor must be positive, got {self.factor}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        check_remote_code(model, "t-fixup")
        self.settings_written = t_fixup(model, self.factor)
        return model

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        body = "\n\n\n".join(inspect.getsource(part) for part in (remove_norms, change))
        write_remote_code(folder, model, kind="t-fixup", body=body, settings=self.settings_written)
