"""Cuts attention heads and feed-forward units out of a model's blocks, for good: smaller matrices, fewer kernels' work.

`Slim`, `slim`, `select`, `cut` and `change` are copied into the modelling file of a saved model: they use torch only.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from thrifty.architecture import LINEAR, branch_outputs, main_blocks
from thrifty.method import NotApplicable


class Slim:
    """A pre-hook that multiplies the inputs of a linear layer by its coefficients, each for a group of inputs."""

    def __call__(self, module, inputs):
        slimming = getattr(module, "slimming", None)
        if slimming is None:
            return None
        x = inputs[0]
        size = x.shape[-1] // len(slimming)
        return (x * slimming[:, None].expand(-1, size).reshape(-1).to(x.dtype),)


def slim(block, parts):
    """Gives the last layers of both branches coefficients that start at one, for heads and for units."""
    for name, count in ((parts["attention_out"], parts["heads"]), (parts["ffn_out"], parts["units"])):
        module = block.get_submodule(name)
        module.register_parameter("slimming", nn.Parameter(torch.ones(count, device=module.weight.device)))
        module.register_forward_pre_hook(Slim())


def select(module, index, outputs):
    """Keeps the outputs (or inputs) `index` of a linear layer, in place."""
    by_input = type(module).__name__ == "Conv1D"  # its weight is (inputs, outputs)
    index = torch.as_tensor(index, device=module.weight.device)
    dim = int(outputs == by_input)
    kept = module.weight.data.index_select(dim, index)
    module.weight = nn.Parameter(kept, requires_grad=module.weight.requires_grad)
    if outputs and module.bias is not None:
        kept = module.bias.data.index_select(0, index)
        module.bias = nn.Parameter(kept, requires_grad=module.bias.requires_grad)
    name = {(True, True): "nf", (True, False): "nx", (False, True): "out_features", (False, False): "in_features"}
    setattr(module, name[by_input, outputs], len(index))


def cut(block, parts, heads, units):
    """Keeps the heads and units of these numbers in a block, in place."""

    def spread(size, parallel=1):
        each = size // parallel // parts["heads"]
        return [p * size // parallel + h * each + i for p in range(parallel) for h in heads for i in range(each)]

    if len(heads) < parts["heads"]:
        for name in parts["attention_in"]:
            module = block.get_submodule(name)
            size = module.weight.shape[1 if type(module).__name__ == "Conv1D" else 0]
            select(module, spread(size, 3 if parts["fused"] else 1), True)
        out = block.get_submodule(parts["attention_out"])
        select(out, spread(out.weight.shape[0 if type(out).__name__ == "Conv1D" else 1]), False)
        attention = block.get_submodule(parts["attention"])
        for name in ("num_heads", "num_attention_heads", "num_key_value_heads", "all_head_size", "split_size"):
            if hasattr(attention, name):
                setattr(attention, name, getattr(attention, name) * len(heads) // parts["heads"])
    if len(units) < parts["units"]:
        for name in parts["ffn_in"]:
            select(block.get_submodule(name), units, True)
        select(block.get_submodule(parts["ffn_out"]), units, False)


def change(model, settings):
    """Gives a freshly built model the recorded shapes, in place."""
    for block, (heads, units) in zip(model.get_submodule(settings["blocks"]), settings["kept"], strict=True):
        if settings["slimming"]:
            slim(block, settings["parts"])
        cut(block, settings["parts"], range(heads), range(units))


def find_parts(model: nn.Module, who: str) -> dict[str, Any]:
    """Names and sizes of what can be cut in each block.

    `heads` counts groups: where several queries share a key and a value, they come and go together.

    Raises:
        NotApplicable: The attention is not one with separate queries, keys and values (or GPT-2's fused ones).
    """
    block = main_blocks(model, who).layers[0]
    attention_out, ffn_out = branch_outputs(block, who)
    linears = [name for name, module in block.named_modules() if isinstance(module, LINEAR)]
    inside = [name for name in linears if re.search("attn|attention", name) and name != attention_out]
    outside = [name for name in linears if not re.search("attn|attention", name) and name != ffn_out]
    sized = [n for n, m in block.named_modules() if hasattr(m, "head_dim") or hasattr(m, "attention_head_size")]
    fused = len(inside) == 1 and inside[0].endswith("c_attn")
    if not sized or not outside or not (fused or len(inside) == 3):
        raise NotApplicable(
            f"{who} cuts heads out of attention with separate queries, keys and values, and found {inside or 'none'} "
            f"in {type(block).__name__}",
            fix="use a model family such as Llama, GPT-2, BERT or ViT",
        )
    attention: Any = block.get_submodule(sized[0])
    head_size = getattr(attention, "head_dim", None) or attention.attention_head_size
    widths = [_outputs(block.get_submodule(name)) for name in inside]
    return {
        "attention": sized[0],
        "attention_in": inside,
        "attention_out": attention_out,
        "ffn_in": outside,
        "ffn_out": ffn_out,
        "fused": fused,
        "heads": (widths[0] // 3 if fused else min(widths)) // head_size,
        "units": _inputs(block.get_submodule(ffn_out)),
    }


def shrink(model: nn.Module, parts: dict[str, Any], keep: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Keeps, in each block, the heads and units of the given numbers, in place, for one's own loop.

    Args:
        model: A Hugging Face model.
        parts: From `find_parts`.
        keep: For each block the kept heads and units, in rising order.

    Returns:
        Whether the configuration can say the new shapes (and now does), so that the model saves as a plain one.
    """
    for block, (heads, units) in zip(main_blocks(model, "shrink"), keep, strict=True):
        cut(block, parts, list(heads), list(units))
    return _say_in_config(model, parts, keep)


def _say_in_config(model: Any, parts: dict[str, Any], keep: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    if len({(len(heads), len(units)) for heads, units in keep}) > 1:
        return False
    heads, units = map(len, keep[0])
    config, blocks = model.config, main_blocks(model, "shrink")
    said = copy.deepcopy(config)
    for name in ("num_attention_heads", "num_key_value_heads"):
        if heads < parts["heads"] and isinstance(getattr(said, name, None), int):
            setattr(said, name, getattr(said, name) * heads // parts["heads"])
    if heads < parts["heads"]:
        attention: Any = blocks.layers[0].get_submodule(parts["attention"])
        said.head_dim = getattr(attention, "head_dim", None) or attention.attention_head_size
    if units < parts["units"]:
        setattr(said, "n_inner" if hasattr(said, "n_inner") else "intermediate_size", units)
    with torch.device("meta"):
        try:
            twin = type(model)(said)
        except ValueError:  # e.g. BERT: the hidden size is not a multiple of the number of heads
            return False
    if {n: p.shape for n, p in twin.named_parameters()} != {n: p.shape for n, p in model.named_parameters()}:
        return False
    # In place: the blocks hold on to the same object.
    vars(config).update(vars(said))
    return True


def _outputs(module: Any) -> int:
    return module.weight.shape[1 if isinstance(module, Conv1D) else 0]


def _inputs(module: Any) -> int:
    return module.weight.shape[0 if isinstance(module, Conv1D) else 1]
