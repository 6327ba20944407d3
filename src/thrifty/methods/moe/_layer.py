"""The mixture-of-experts layer, and how it takes the place of a model's feed-forward layers.

The source of `MoeFeedForward`, `SkipInner` and `change` is written into the modelling file of the result: it needs
torch and transformers only, and has no annotations.
"""

# pyright: reportArgumentType=false, reportOptionalSubscript=false

from __future__ import annotations

import inspect
import math

import torch
from torch import nn


class MoeFeedForward(nn.Module):
    """A feed-forward layer of several experts, of which each token takes one or two.

    `routing` (None outside of training) says which tokens are padding and collects what was routed where.
    """

    def __init__(self, s, experts, device=None, dtype=None):
        super().__init__()
        from transformers.activations import ACT2FN

        self.s, self.experts, self.routing, self.planned = s, experts, None, False
        self.act = ACT2FN[s["act"]]
        inner = s["inner"] * (2 if s["gated"] else 1)
        made = {"device": device, "dtype": dtype}
        self.router = nn.Linear(s["width"], experts, bias=False, **made)
        self.w_in = nn.Parameter(torch.empty(experts, inner, s["width"], **made))
        self.w_out = nn.Parameter(torch.empty(experts, s["width"], s["inner"], **made))
        self.b_in = nn.Parameter(torch.empty(experts, inner, **made)) if s["bias"] else None
        self.b_out = nn.Parameter(torch.empty(experts, s["width"], **made)) if s["bias"] else None
        if s["residual"]:
            self.shared_in = nn.Parameter(torch.empty(inner, s["width"], **made))
            self.shared_out = nn.Parameter(torch.empty(s["width"], s["inner"], **made))
            self.shared_b_in = nn.Parameter(torch.empty(inner, **made)) if s["bias"] else None
            self.shared_b_out = nn.Parameter(torch.empty(s["width"], **made)) if s["bias"] else None
            self.coefficient = nn.Linear(s["width"], 2, **made)

    def feed_forward(self, x, w_in, b_in, w_out, b_out):
        inner = nn.functional.linear(x, w_in, b_in)
        if self.s["gated"]:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.act(gate) * up
        else:
            inner = self.act(inner)
        return nn.functional.linear(inner, w_out, b_out)

    def expert(self, x, index):
        b_in, b_out = (None, None) if self.b_in is None else (self.b_in[index], self.b_out[index])
        return self.feed_forward(x, self.w_in[index], b_in, self.w_out[index], b_out)

    def route(self, tokens, valid):
        """Logits, probabilities (tokens, experts); chosen experts, their weights, what is kept (tokens, k)."""
        s = self.s
        if self.training and s["jitter"]:
            noise = torch.empty_like(tokens).uniform_(1 - s["jitter"], 1 + s["jitter"])
            tokens = tokens * noise
        kind = "cpu" if tokens.device.type == "meta" else tokens.device.type
        with torch.autocast(kind, enabled=False):
            logits = nn.functional.linear(tokens.float(), self.router.weight.float())
        probabilities = logits.softmax(dim=-1)
        weights, chosen = probabilities.topk(min(s["k"], self.experts), dim=-1)
        if s["renormalise"]:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        wanted = torch.ones_like(chosen, dtype=torch.bool)
        if valid is not None:
            wanted = wanted & valid[:, None]
        if self.training and s["random_second"] and chosen.shape[1] == 2:
            draws = torch.rand(len(tokens), device=tokens.device)
            wanted = torch.stack([wanted[:, 0], wanted[:, 1] & (draws < 2 * weights[:, 1])], dim=1)
        capacity = s["capacity"] if self.training else s["eval_capacity"]
        kept = wanted if capacity is None else wanted & self.has_room(chosen, wanted, capacity)
        return logits, probabilities, chosen, weights, wanted, kept

    def has_room(self, chosen, wanted, factor):
        """Which choices find a free place: all first choices come before the second ones, earlier tokens first."""
        count, k = chosen.shape
        places = math.ceil(k * count / self.experts * factor)
        order = chosen.T.reshape(-1)
        taken = nn.functional.one_hot(order, self.experts) * wanted.T.reshape(-1, 1)
        before = (taken.cumsum(dim=0) - taken).gather(1, order[:, None]).squeeze(1)
        return (before < places).view(k, count).T

    def forward(self, hidden):
        tokens = hidden.reshape(-1, hidden.shape[-1])
        valid = self.routing.valid(tokens) if self.routing is not None and self.training else None
        logits, probabilities, chosen, weights, wanted, kept = self.route(tokens, valid)
        if self.routing is not None:
            self.routing.record(valid, logits, probabilities, chosen, wanted, kept)
        weights = weights * kept
        out = torch.zeros_like(tokens)
        if self.planned:
            copies = tokens.repeat_interleave(chosen.shape[1], dim=0)
            out = out + (self.expert(copies, 0) * weights.reshape(-1, 1)).view(len(tokens), -1, tokens.shape[1]).sum(1)
        else:
            target = chosen.masked_fill(~kept, self.experts)
            for index in range(self.experts):
                token, slot = torch.where(target == index)
                if len(token):
                    part = self.expert(tokens[token], index) * weights[token, slot, None]
                    out = out.index_add(0, token, part.to(out.dtype))
        if self.s["residual"]:
            share = self.coefficient(tokens).softmax(dim=-1)
            same = self.feed_forward(tokens, self.shared_in, self.shared_b_in, self.shared_out, self.shared_b_out)
            out = out * share[:, :1] + same * share[:, 1:]
        return out.to(hidden.dtype).view(hidden.shape)


class SkipInner(nn.Module):
    """Stands for the inner layer of a BERT block, whose outer layer does all the work."""

    def forward(self, hidden):
        return hidden


def change(model, settings):
    """Replaces feed-forward layers of a freshly built model by mixtures of experts, in place."""
    blocks = model.get_submodule(settings["blocks"])
    for index, experts in zip(settings["sparse"], settings["experts"]):  # noqa: B905
        block = blocks[index]
        weight = next(p for p in block.parameters() if p.is_floating_point())
        layer = MoeFeedForward(settings, experts, weight.device, weight.dtype)
        if settings["layout"] == "bert":
            block.intermediate, block.output.dense = SkipInner(), layer
        elif settings["layout"] == "gpt2":
            block.mlp = nn.Sequential(layer, block.mlp.dropout)
        else:
            block.mlp = layer


def body() -> str:
    """The source for a modelling file."""
    source = "\n\n\n".join(inspect.getsource(part) for part in (MoeFeedForward, SkipInner, change))
    return "import math\n\n\n" + source
