"""Prompt tuning.

What it does: freezes the model and trains the embeddings of a few virtual tokens that stand in front of every input.

Helps: many tasks on one large model: each needs a few thousand numbers.
Does not help: models below some ten billion parameters, where it stays behind full fine-tuning; and the activations of
the virtual tokens come on top.
Limits: causal language models, sequence-to-sequence models and text classifiers. Cannot be merged: the result is an
adapter in peft's format.
Source: Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning", EMNLP 2021.
Library: peft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel, PromptTuningConfig
from torch import nn

from thrifty.method import Paper, register
from thrifty.methods.peft._adapters import CONFLICTS
from thrifty.methods.peft._prompts import VirtualTokens


@torch.no_grad()
def start_from_words(model: PeftModel, generator: torch.Generator) -> None:
    """Starts the virtual tokens from the embeddings of words drawn from the vocabulary, as the paper advises."""
    table: Any = model.get_base_model().get_input_embeddings()  # type: ignore[operator]
    encoder: Any = model.prompt_encoder[str(model.active_adapter)]
    prompt = encoder.embedding.weight
    drawn = torch.randint(table.weight.shape[0], (len(prompt),), generator=generator)
    prompt.copy_(table.weight[drawn.to(table.weight.device)])


@register(
    "prompt-tuning",
    title="Prompt tuning",
    section="peft",
    sources=[Paper("Lester et al.", 2021, "arXiv:2104.08691")],
    exact=False,
    saves_as="peft",
    claims=("adapter",),
    conflicts_with={
        **CONFLICTS,
        "muon": "it makes the updates of the blocks' matrices orthogonal, and only embeddings are trained",
    },
    tasks=("causal-lm", "seq2seq-lm", "text-classification"),
    library="peft",
    preset={"tokens": 3},
)
@dataclass(kw_only=True)
class PromptTuning(VirtualTokens):
    """Trains embeddings in front of the input."""

    def peft_config(self, model: nn.Module, task_type: str) -> Any:
        return PromptTuningConfig(task_type=task_type, num_virtual_tokens=self.tokens)  # type: ignore[arg-type]

    def prepare_model(self, model: nn.Module, ctx: Any) -> PeftModel:
        prompted = super().prepare_model(model, ctx)
        if not ctx.planning:
            start_from_words(prompted, ctx.rng("prompt-tuning"))
        return prompted
