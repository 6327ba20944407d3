"""Net2Net: growth that keeps the function.

What it does: trains a narrower and shallower model first, and continues with the full one, whose weights are made so
that it computes the same: units are copied and what sums over them is divided by the number of copies; new blocks
begin as identities.

Helps: pre-training from scratch: the first part of the run is cheaper, and the loss does not jump at the growth.
Does not help: fine-tuning; and Kaddour et al. (2023) saw no gain of growing over a fully decayed baseline at a fixed
budget.
Limits: training from scratch. The hidden size grows by whole multiples (normalisation would not keep its statistics
otherwise), heads keep their size, and post-norm models (BERT) do not get deeper. Copies start with a little noise that
cancels in their sum, or they would stay equal. Parameters that change shape start with fresh optimizer states.
Source: Chen, Goodfellow and Shlens, "Net2Net: Accelerating Learning via Knowledge Transfer", ICLR 2016.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from thrifty.architecture import branch_outputs, is_post_norm, main_blocks, norm_names
from thrifty.method import NotApplicable, Paper, register
from thrifty.methods.growth._grow import BEFORE, CONFLICTS, GrowOnce, ParameterMap, fill
from thrifty.methods.growth._width import expand, growing_axes, is_tied, last_norm, narrowed, unit_maps


@torch.no_grad()
def net2net(small: Any, full: Any, *, noise: float = 0.0, rng: torch.Generator | None = None) -> ParameterMap:
    """Writes the weights of `full` so that it computes what `small` does, for one's own loop.

    Args:
        small: The trained model.
        full: A model of the same class with more units or blocks.
        noise: Of the copies' outgoing weights, relative to their standard deviation; it cancels in their sum.
        rng: For the noise.

    Returns:
        {new parameter name: old one with the same shape and role, or None}.
    """
    rng = rng or torch.Generator().manual_seed(0)
    maps = unit_maps(small.config, full.config, rng)
    axes = growing_axes(small, full, "net2net")
    old = dict(small.named_parameters())
    depth, layers = len(main_blocks(full, "net2net")), len(main_blocks(small, "net2net"))
    sources = [j * layers // depth for j in range(depth)]
    head = last_norm(full) if is_tied(full) else None
    hidden = maps.get((small.config.hidden_size, full.config.hidden_size))

    def value(name: str, origin: str) -> torch.Tensor:
        grown = expand(old[origin], axes[origin], maps, noise=noise, rng=rng)
        if head is not None and hidden is not None and name.startswith(f"{head}."):
            # A tied head sums over copies, but as an embedding it may not be divided: the norm before it is.
            grown = grown / hidden.copies.to(grown)
        return grown

    mapping = fill(small, full, "net2net", sources.__getitem__, value)
    blocks = main_blocks(full, "net2net")
    for index, block in enumerate(blocks):
        if index and sources[index] == sources[index - 1]:
            for branch in branch_outputs(block, "net2net"):
                for key, p in block.get_submodule(branch).named_parameters():
                    p.zero_()
                    mapping[f"{blocks.prefix}.{index}.{branch}.{key}"] = None
    return mapping


@register(
    "net2net",
    title="Net2Net growth",
    section="growth",
    sources=[Paper("Chen, Goodfellow and Shlens", 2016, "arXiv:1511.05641")],
    exact=False,
    claims=("growth",),
    conflicts_with=CONFLICTS,
    preset={"at": 0.34},
    runs_before=BEFORE,
)
@dataclass(kw_only=True)
class Net2Net(GrowOnce):
    """Function-preserving growth in width and depth."""

    noise: float = 0.1
    """Of the copies' outgoing weights, relative to their standard deviation; it cancels in their sum."""

    _post_norm: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise < 0:
            raise ValueError(f"noise must not be negative, got {self.noise}")

    def small_config(self, config: Any) -> Any:
        layers = self.layers_at_start(config.num_hidden_layers)
        small = narrowed(config, self.width, layers, self.name)
        if config.hidden_size % small.hidden_size:
            raise NotApplicable(
                f"net2net: the hidden size grows from {small.hidden_size} to {config.hidden_size}, which is no "
                "multiple, and no copy of units would keep the function",
                key="methods.net2net.width",
                value=self.width,
                fix="use 0.5, or another share 1/n; or bert2bert, which does not keep the function",
            )
        return small

    def layers_at_start(self, depth: int) -> int:
        return self.start_layers or (depth if self._post_norm else max(1, depth // 2))

    def prepare_model(self, model: torch.nn.Module, ctx: Any) -> torch.nn.Module:
        block = main_blocks(model, self.name).layers[0]
        self._post_norm = is_post_norm(block)
        sandwich = any("post_feedforward" in name for name in norm_names(block))
        layers = self.layers_at_start(len(main_blocks(model, self.name)))
        if layers < len(main_blocks(model, self.name)) and (self._post_norm or sandwich):
            raise NotApplicable(
                f"net2net: a block of {type(model).__name__} normalises its output, so that none can begin as an "
                "identity",
                key="methods.net2net.start_layers",
                value=layers,
                fix="leave it out and grow in width; or use stacking or bert2bert",
            )
        return super().prepare_model(model, ctx)

    def grow(self, small: Any, full: Any, ctx: Any) -> ParameterMap:
        return net2net(small, full, noise=self.noise, rng=ctx.rng("net2net"))
