"""bert2BERT.

What it does: trains a narrower and shallower model first, and continues with the full one. Added heads, hidden and
feed-forward units of a block are taken from the next block (advanced knowledge initialisation), blocks by stacking.

Helps: pre-training from scratch: the first part of the run is cheaper. Units from another block differ at once, where
plain copies would have to part first.
Does not help: fine-tuning; and Kaddour et al. (2023) saw no gain of growing over a fully decayed baseline at a fixed
budget.
Limits: training from scratch. Not function preserving: the loss jumps at the growth. The paper's two-stage training of
sub-models after it is left out. Parameters that change shape start with fresh optimizer states.
Source: Chen et al., "bert2BERT: Towards Reusable Pretrained Language Models", ACL 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from thrifty.architecture import main_blocks
from thrifty.method import Paper, register
from thrifty.methods.growth._grow import BEFORE, CONFLICTS, GrowOnce, ParameterMap, fill, old_name
from thrifty.methods.growth._width import expand, growing_axes, is_tied, last_norm, narrowed, unit_maps


@torch.no_grad()
def bert2bert(
    small: Any, full: Any, *, initialisation: str = "aki", rng: torch.Generator | None = None
) -> ParameterMap:
    """Writes the weights of `full` from those of `small`, for one's own loop.

    Args:
        small: The trained model.
        full: A model of the same class with more units or blocks.
        initialisation: `aki` takes added units from the next block, `fpi` from the block itself (as Net2Net does).
        rng: For units that are drawn, where the sizes are no multiples.

    Returns:
        {new parameter name: old one with the same shape and role, or None}.
    """
    rng = rng or torch.Generator().manual_seed(0)
    maps = unit_maps(small.config, full.config, rng)
    axes = growing_axes(small, full, "bert2bert")
    old = dict(small.named_parameters())
    blocks = main_blocks(small, "bert2bert")
    layers = len(blocks)
    head = last_norm(full) if is_tied(full) else None
    hidden = maps.get((small.config.hidden_size, full.config.hidden_size))

    def value(name: str, origin: str) -> torch.Tensor:
        following = None
        if initialisation == "aki" and origin.startswith(f"{blocks.prefix}."):
            following = old[old_name(origin, blocks.prefix, lambda i: min(i + 1, layers - 1))]
        grown = expand(old[origin], axes[origin], maps, following=following)
        if head is not None and hidden is not None and name.startswith(f"{head}."):
            grown = grown / hidden.copies.to(grown)  # a tied head sums over copies
        return grown

    return fill(small, full, "bert2bert", lambda i: i % layers, value)


@register(
    "bert2bert",
    title="bert2BERT growth",
    section="growth",
    sources=[Paper("Chen et al.", 2022, "arXiv:2110.07143")],
    exact=False,
    claims=("growth",),
    conflicts_with=CONFLICTS,
    preset={"at": 0.34},
    runs_before=BEFORE,
)
@dataclass(kw_only=True)
class Bert2Bert(GrowOnce):
    """Growth in width with units of the next block, and in depth by stacking."""

    initialisation: Literal["aki", "fpi"] = "aki"
    """aki: added units come from the next block; fpi: from the block itself."""

    def small_config(self, config: Any) -> Any:
        return narrowed(config, self.width, self.layers_at_start(config.num_hidden_layers), self.name)

    def grow(self, small: Any, full: Any, ctx: Any) -> ParameterMap:
        return bert2bert(small, full, initialisation=self.initialisation, rng=ctx.rng("bert2bert"))
