"""Visual prompt tuning.

What it does: freezes a vision Transformer and trains a few tokens that stand beside the patches (`shallow`), or other
ones in front of every block (`deep`), and the classification head.

Helps: transfer to small data sets: by its authors deep prompts beat full fine-tuning on most of 24 tasks.
Does not help: speed: each prompt is one token more in every block, and activations are kept as in full training.
Limits: plain vision Transformers with a class token (ViT, DeiT). The result is another architecture: it loads with
trust_remote_code=True.
Source: Jia et al., "Visual Prompt Tuning", ECCV 2022.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thrifty.architecture import main_blocks
from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods.peft._adapters import CONFLICTS, refuse_adapters
from thrifty.methods.peft._heads import head_of
from thrifty.remote_code import check_remote_code, write_remote_code


class Prompts(nn.Module):
    """The prompts of one or of all blocks: (blocks, tokens, width)."""

    def __init__(self, blocks, tokens, width, bound, device=None, dtype=None):
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(blocks, tokens, width, device=device, dtype=dtype))
        nn.init.uniform_(self.tokens, -bound, bound)


class BeforeBlock:
    """Puts prompts behind the class token, in place of those of the block before where there are any."""

    def __init__(self, prompts, index):
        self.prompts, self.index = prompts, index

    def __call__(self, module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        prompts = self.prompts.tokens[self.index].to(hidden.dtype).expand(len(hidden), -1, -1)
        kept = hidden[:, 1 + (prompts.shape[1] if self.index else 0) :]
        hidden = torch.cat([hidden[:, :1], prompts, kept], dim=1)
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}


class AfterLastBlock:
    """Takes the prompts out again, so that heads find the tokens where they were."""

    def __init__(self, prompts):
        self.prompts = prompts

    def __call__(self, module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = torch.cat([hidden[:, :1], hidden[:, 1 + self.prompts.tokens.shape[1] :]], dim=1)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def change(model, settings):
    """Adds prompts to a freshly built model, in place."""
    blocks = model.get_submodule(settings["blocks"])
    weight = next(blocks.parameters())
    count = len(blocks) if settings["deep"] else 1
    prompts = Prompts(
        count, settings["tokens"], settings["width"], settings["bound"], device=weight.device, dtype=weight.dtype
    )
    model.visual_prompts = prompts
    for index in range(count):
        blocks[index].register_forward_pre_hook(BeforeBlock(prompts, index), with_kwargs=True)
    blocks[-1].register_forward_hook(AfterLastBlock(prompts))


def add_visual_prompts(model: nn.Module, tokens: int = 10, *, deep: bool = False, head: bool = True) -> dict[str, Any]:
    """Freezes a vision Transformer and adds prompts in place, for one's own loop.

    Args:
        model: A Hugging Face model with a class token.
        tokens: Prompts in front of a block.
        deep: Other prompts for every block.
        head: Train the classification head too.

    Returns:
        What was changed, as the modelling file needs it.

    Raises:
        NotApplicable: The model is no plain vision Transformer.
    """
    if not any(name.endswith("cls_token") for name, _ in model.named_parameters()):
        raise NotApplicable(
            f"visual-prompt: {type(model).__name__} is no vision Transformer with a class token",
            fix="use ViT or DeiT; prompt-tuning for text",
        )
    config: Any = model.config
    blocks = main_blocks(model, "visual-prompt")
    patch = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
    settings = {
        "blocks": blocks.prefix,
        "tokens": tokens,
        "deep": deep,
        "width": config.hidden_size,
        # As the patch embedding would be drawn, by its fan-in and fan-out.
        "bound": (6 / (config.num_channels * patch**2 + config.hidden_size)) ** 0.5,
    }
    found = head_of(model) if head else None
    for name, p in model.named_parameters():
        p.requires_grad_(found is not None and name.startswith(f"{found}."))
    change(model, settings)
    return settings


@register(
    "visual-prompt",
    title="Visual prompt tuning",
    section="peft",
    sources=[Paper("Jia et al.", 2022, "arXiv:2203.12119")],
    exact=False,
    saves_as="remote_code",
    claims=("adapter",),
    conflicts_with={
        **CONFLICTS,
        "muon": "it makes the updates of hidden matrices orthogonal, and they are frozen",
    },
    tasks=("image-classification",),
    preset={"tokens": 2, "deep": True},
)
@dataclass(kw_only=True)
class VisualPrompt(Method):
    """Trains tokens beside the patches."""

    tokens: int = 10
    """Number of prompts."""
    deep: bool = False
    """Other prompts in front of every block."""
    head: bool = True
    """Train the classification head too."""

    _settings: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        refuse_adapters(model, "visual-prompt")
        check_remote_code(model, "visual-prompt")
        self._settings = add_visual_prompts(model, self.tokens, deep=self.deep, head=self.head)
        return model

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        parts = (Prompts, BeforeBlock, AfterLastBlock, change)
        body = "\n\n\n".join(inspect.getsource(part) for part in parts)
        write_remote_code(folder, model, kind="visual-prompt", body=body, settings=self._settings)
