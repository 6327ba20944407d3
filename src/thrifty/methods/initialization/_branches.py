"""What the initialisation methods share: the parts of a block by their role, and scales that fold into a layer."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from thrifty.architecture import LINEAR, branch_outputs, main_blocks, norm_names
from thrifty.method import NotApplicable

_QUERY_KEY = re.compile(r"(^|\.)(q_proj|k_proj|query|key|q_lin|k_lin|q|k)$")
_VALUE = re.compile(r"(^|\.)(v_proj|value|v_lin|v)$")
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


def norm_free_settings(model: nn.Module, who: str) -> dict[str, Any]:
    """Names of the blocks, and in each block of the norms to take away and the last layers of the branches.

    Raises:
        NotApplicable: The blocks are not recognised.
    """
    blocks = main_blocks(model, who)
    first = blocks.layers[0]
    settings = {"blocks": blocks.prefix, "norms": norm_names(first), "branches": branch_outputs(first, who)}
    if not settings["norms"] or set(settings["norms"]) & set(settings["branches"]):
        raise NotApplicable(
            f"{who}: the norms of {type(first).__name__} are {settings['norms'] or 'not found'}",
            fix="use a model family with plain pre-norm or post-norm blocks",
        )
    return settings


def remove_norms(block, names):
    """Takes the norms of these names out of a block, in place."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(block.get_submodule(parent), leaf, nn.Identity())


def activations(block: nn.Module) -> list[str]:
    """Names of the block's activation functions."""
    return [name for name, module in block.named_modules() if type(module).__module__ in _ACTIVATIONS]


def roles(block: nn.Module, who: str) -> dict[str, str]:
    """The role of each linear layer: `query_key`, `value`, `qkv` (GPT-2's three in one), `out` or `ffn`.

    Raises:
        NotApplicable: A layer's role is not known.
    """
    attention_out, ffn_out = branch_outputs(block, who)
    found = {}
    for name, module in block.named_modules():
        if not isinstance(module, LINEAR):
            continue
        if name == attention_out:
            found[name] = "out"
        elif name == ffn_out or not re.search(r"attn|attention", name):
            found[name] = "ffn"
        elif name.endswith("c_attn"):
            found[name] = "qkv"
        elif _QUERY_KEY.search(name):
            found[name] = "query_key"
        elif _VALUE.search(name):
            found[name] = "value"
        else:
            raise NotApplicable(
                f"{who}: whether '{name}' of {type(block).__name__} makes queries, keys or values is not known",
                fix="use a model family such as Llama, GPT-2, BERT or ViT",
            )
    return found


@torch.no_grad()
def xavier(module: Any, gain: float, role: str = "") -> None:
    """Draws a linear layer's weight uniformly with std gain * sqrt(2 / (in + out)), and zeroes its bias.

    Of three projections in one (`qkv`) each is drawn by its own size, and only the values' has the gain.
    """
    if role == "qkv":
        for part, part_gain in zip(module.weight.chunk(3, dim=1), (1.0, 1.0, gain), strict=True):
            part.copy_(nn.init.xavier_uniform_(torch.empty_like(part), part_gain))
    else:
        nn.init.xavier_uniform_(module.weight, gain)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def fan_in_normal(module: Any, variance: float) -> None:
    """Draws a linear layer's weight from N(0, variance / inputs), and zeroes its bias."""
    inputs = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
    nn.init.normal_(module.weight, std=math.sqrt(variance / inputs))
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def head_of(model: Any) -> nn.Module | None:
    """The layer that makes the logits."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name in ("classifier", "score", "lm_head"):
        head = head if head is not None else getattr(model, name, None)
    return head


def check_linear(model: nn.Module, names: Iterable[str], who: str) -> None:
    """Raises `NotApplicable` unless the last layers of the branches are linear, so that scales fold into them."""
    block = main_blocks(model, who).layers[0]
    for name in names:
        if not isinstance(block.get_submodule(name), LINEAR):
            raise NotApplicable(
                f"{who}: a branch of {type(block).__name__} ends with the norm '{name}', into which no scale folds",
                fix=f"use a model without sandwich norms, or remove {who}",
            )


@torch.no_grad()
def scale_outputs(module: Any, factor: Tensor | float) -> None:
    """Multiplies a linear layer's outputs (all, or each by its own factor) by scaling its weight and bias."""
    wide = torch.as_tensor(factor, dtype=torch.float64, device=module.weight.device)
    by_output = wide if wide.ndim == 0 or isinstance(module, Conv1D) else wide[:, None]
    module.weight.copy_(module.weight.double() * by_output)
    if module.bias is not None:
        module.bias.copy_(module.bias.double() * wide)


@contextlib.contextmanager
def kept_weights(modules: Iterable[Any]) -> Iterator[None]:
    """Afterwards the layers have the weights and biases again that they had before, to the bit."""
    kept = [(p, p.detach().clone()) for module in modules for p in (module.weight, module.bias) if p is not None]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in kept:
                p.copy_(value)
