"""Finds the parts of a Hugging Face model by structure: repeated blocks, residual branches, norms."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from thrifty.errors import NotApplicable

LINEAR = (nn.Linear, Conv1D)

# Names of the last linear layer of a residual branch, relative to the block.
_BRANCH_LEAF = re.compile(
    r"(^|\.)(o_proj|out_proj|c_proj|down_proj|fc2|wo|o|out_lin|lin2|dense_4h_to_h)$"
    r"|(^|\.)output\.dense$"
    r"|^(self_attention|attention)\.dense$"
)
_POST_NORM = re.compile(r"(^|\.)output\.LayerNorm$|^sa_layer_norm$|^output_layer_norm$")


@dataclass(frozen=True)
class Blocks:
    """A stack of equal blocks.

    Args:
        parent: The module that holds the list.
        attribute: The list's name in `parent`.
        prefix: The list's name in the model, e.g. `model.layers`.
    """

    parent: nn.Module
    attribute: str
    prefix: str

    @property
    def layers(self) -> nn.ModuleList:
        return getattr(self.parent, self.attribute)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers)


def find_blocks(model: nn.Module) -> list[Blocks]:
    """All stacks of repeated blocks that are not inside another stack, the largest first."""
    found: list[Blocks] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{blocks.prefix}.") for blocks in found) or not isinstance(module, nn.ModuleList):
            continue
        kinds = {type(child) for child in module}
        if len(kinds) == 1 and sum(isinstance(m, LINEAR) for m in module[0].modules()) >= 2:
            parent_name, _, attribute = name.rpartition(".")
            found.append(Blocks(model.get_submodule(parent_name), attribute, name))
    return sorted(found, key=lambda blocks: -sum(p.numel() for p in blocks.layers.parameters()))


def main_blocks(model: nn.Module, who: str) -> Blocks:
    """The largest stack. Raises `NotApplicable` (for the method `who`) where the model has none."""
    found = find_blocks(model)
    if not found:
        raise NotApplicable(
            f"{who} needs a stack of equal blocks, and {type(model).__name__} has none",
            fix="use a Transformer model",
        )
    return found[0]


def set_layers(model: nn.Module, blocks: Blocks, layers: Sequence[nn.Module]) -> None:
    """Gives the stack other blocks, and brings the configuration and the blocks' indices in line."""
    if not hasattr(model.config, "num_hidden_layers"):
        raise NotApplicable(
            f"{type(model).__name__} is made of several stacks with configurations of their own, none of which can "
            "change its number of blocks alone",
            fix="use a model with one stack of blocks (Llama, GPT-2, BERT, ViT, ...)",
        )
    setattr(blocks.parent, blocks.attribute, nn.ModuleList(layers))
    for index, layer in enumerate(layers):
        for module in layer.modules():
            module: Any
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    config: Any = model.config
    old = config.num_hidden_layers
    config.num_hidden_layers = len(layers)
    for key, value in vars(config).items():
        # Per-layer lists, such as `layer_types`. GPT-2 spells the depth `n_layer`; HF's attribute map handles that.
        if isinstance(value, list) and len(value) == old and key.endswith(("layer_types", "_layers", "_pattern")):
            repeated = value * -(-len(layers) // old)
            setattr(config, key, repeated[: len(layers)])


def copy_layer(layer: nn.Module) -> nn.Module:
    """An independent copy of a block, hooks included."""
    return copy.deepcopy(layer)


def branch_outputs(block: nn.Module, who: str) -> list[str]:
    """Names (relative to the block) of the modules whose output is added to the residual stream.

    Raises:
        NotApplicable: The block's structure is not recognised: anything but one attention and one feed-forward branch.
    """
    names = [name for name, module in block.named_modules() if isinstance(module, LINEAR) and _BRANCH_LEAF.search(name)]
    children = dict(block.named_children())
    if "post_feedforward_layernorm" in children and "post_attention_layernorm" in children:
        # Sandwich norms (Gemma 2 and 3): what is added is the output of the norm behind each branch.
        names = ["post_attention_layernorm", "post_feedforward_layernorm"]
    if len(names) != 2:
        raise NotApplicable(
            f"{who} looks for the last layers of one attention and one feed-forward branch in each block, and found "
            f"{names or 'none'} in {type(block).__name__}",
            fix="use a model family with plain Transformer blocks (Llama, GPT-2, BERT, ViT, ...)",
        )
    return names


def norm_names(block: nn.Module) -> list[str]:
    """Names of the block's normalisations, but not those of queries and keys inside attention."""
    return [
        name
        for name, module in block.named_modules()
        if "norm" in type(module).__name__.lower() and not re.search(r"(^|\.)[qk]_?(layer)?_?norm$", name)
    ]


def is_post_norm(block: nn.Module) -> bool:
    """Does the block normalise after the residual addition (BERT)?"""
    return any(_POST_NORM.search(name) for name in norm_names(block))


def block_linears(blocks: Blocks) -> dict[str, nn.Module]:
    """All linear layers of the blocks by full name: not embeddings, norms or heads."""
    return {
        f"{blocks.prefix}.{index}.{name}": module
        for index, layer in enumerate(blocks)
        for name, module in layer.named_modules()
        if isinstance(module, LINEAR)
    }
