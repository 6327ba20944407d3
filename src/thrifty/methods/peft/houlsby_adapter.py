"""Houlsby (bottleneck) adapters.

What it does: puts a small two-layer network behind the attention and the feed-forward layer of each block, in front of
the residual addition, and trains only these, the normalisations and a classifier's head. They start as the identity.

Helps: fine-tuning many tasks on one model, within half a per cent of full fine-tuning by its authors.
Does not help: fast inference: the adapters cannot be merged and add two layers to each branch.
Limits: the result is another architecture: it loads with trust_remote_code=True. What was trained is written beside it
in a small file of its own, for `load_adapters`.
Source: Houlsby et al., "Parameter-Efficient Transfer Learning for NLP", ICML 2019.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from thrifty.architecture import branch_outputs, main_blocks, norm_names
from thrifty.method import Method, Paper, register
from thrifty.methods.peft._adapters import CONFLICTS, refuse_adapters
from thrifty.methods.peft._heads import head_of
from thrifty.remote_code import check_remote_code, write_remote_code

ADAPTER_FILE = "houlsby_adapter.safetensors"


class Bottleneck(nn.Module):
    """h + W_up act(W_down h), which starts as the identity: W_up is zero."""

    def __init__(self, width, size, activation, device=None, dtype=None):
        super().__init__()
        self.down = nn.Linear(width, size, device=device, dtype=dtype)
        self.up = nn.Linear(size, width, device=device, dtype=dtype)
        self.act = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}[activation]()
        nn.init.trunc_normal_(self.down.weight, std=0.01, a=-0.02, b=0.02)
        nn.init.zeros_(self.down.bias)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, hidden):
        return hidden + self.up(self.act(self.down(hidden)))


class AfterBranch:
    """A forward hook that sends a branch's output through its adapter. Refers to the block: copies follow it."""

    def __init__(self, block, index):
        self.block, self.index = block, index

    def __call__(self, module, inputs, output):
        return self.block.houlsby_adapters[self.index](output)


def change(model, settings):
    """Adds adapters to a freshly built model, in place."""
    for block in model.get_submodule(settings["blocks"]):
        weight = next(p for p in block.parameters() if p.is_floating_point())
        block.houlsby_adapters = nn.ModuleList(
            Bottleneck(settings["width"], settings["size"], settings["activation"], weight.device, weight.dtype)
            for _ in settings["branches"]
        )
        for index, name in enumerate(settings["branches"]):
            block.get_submodule(name).register_forward_hook(AfterBranch(block, index))


def add_adapters(
    model: nn.Module,
    size: int = 64,
    *,
    placement: str = "both",
    activation: str = "gelu",
    norms: bool = True,
    head: bool = True,
) -> dict[str, Any]:
    """Freezes a Hugging Face model and adds adapters in place, for one's own loop.

    Args:
        model: The model.
        size: Width of the bottleneck.
        placement: `both` (Houlsby) or `feed-forward` (Pfeiffer).
        activation: `gelu`, `relu` or `silu`.
        norms: Train the normalisations of the blocks too.
        head: Train a classifier's head too.

    Returns:
        What was changed, as the modelling file needs it.

    Raises:
        NotApplicable: The blocks are not recognised.
    """
    blocks = main_blocks(model, "houlsby-adapter")
    branches = branch_outputs(blocks.layers[0], "houlsby-adapter")
    if placement == "feed-forward":
        branches = branches[1:]
    last: Any = blocks.layers[0].get_submodule(branches[0])
    settings = {
        "blocks": blocks.prefix,
        "branches": branches,
        "width": last.weight.shape[-1] if isinstance(last, Conv1D) else last.weight.shape[0],
        "size": size,
        "activation": activation,
    }
    norm = norm_names(blocks.layers[0]) if norms else []
    trained = [f"{blocks.prefix}.{index}.{name}." for index in range(len(blocks)) for name in norm]
    if head and (found := head_of(model)) is not None:
        trained.append(f"{found}.")
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(tuple(trained)))
    change(model, settings)
    return settings


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What was trained, by name."""
    return {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}


def load_adapters(model: nn.Module, file: str, **settings: Any) -> nn.Module:
    """Adds adapters with the settings of `add_adapters` to a base model, and loads their weights from a file."""
    add_adapters(model, **settings)
    state = load_file(file)
    found = model.load_state_dict(state, strict=False)
    if found.unexpected_keys:
        raise ValueError(f"{file} holds {found.unexpected_keys}, which the model has not")
    return model


@register(
    "houlsby-adapter",
    title="Houlsby adapters",
    section="peft",
    sources=[Paper("Houlsby et al.", 2019, "arXiv:1902.00751")],
    exact=False,
    saves_as="remote_code",
    claims=("adapter", "residual"),
    conflicts_with=CONFLICTS,
    preset={"size": 4},
)
@dataclass(kw_only=True)
class HoulsbyAdapter(Method):
    """Trains small networks behind each branch."""

    size: int = 64
    """Width of the bottleneck."""
    placement: Literal["both", "feed-forward"] = "both"
    """`both` branches (Houlsby), or behind the feed-forward layer only (Pfeiffer)."""
    activation: Literal["gelu", "relu", "silu"] = "gelu"
    """Activation inside."""
    norms: bool = True
    """Train the normalisations of the blocks too, as the paper does."""
    head: bool = True
    """Train a classifier's head too."""

    _settings: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        refuse_adapters(model, "houlsby-adapter")
        check_remote_code(model, "houlsby-adapter")
        self._settings = add_adapters(
            model,
            self.size,
            placement=self.placement,
            activation=self.activation,
            norms=self.norms,
            head=self.head,
        )
        return model

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        body = "\n\n\n".join(inspect.getsource(part) for part in (Bottleneck, AfterBranch, change))
        write_remote_code(folder, model, kind="houlsby", body=body, settings=self._settings)
        save_file(trained_state(model), os.path.join(folder, ADAPTER_FILE), metadata={"format": "pt"})
