"""Early-bird tickets (EarlyBERT).

What it does: trains a coefficient for each attention head and each feed-forward unit with an L1 penalty in the first
part of the run, until the set of the smallest ones stops changing. Then it cuts them out: the matrices really become
smaller, and the ticket is trained from the first weights.

Helps: fine-tuning and pre-training of models that are larger than the task needs: the rest of the run, and inference,
cost less in time and memory.
Does not help: when the search takes a large part of the run, or the model is small for its task already.
Limits: blocks with one attention and one feed-forward branch and separate queries, keys and values (or GPT-2's). Where
the configuration can say the new sizes the result is plain; where it cannot (units are ranked over all layers, BERT's
and GPT-2's heads) it loads with trust_remote_code=True.
Source: You et al., "Drawing Early-Bird Tickets: Towards More Efficient Training of Deep Networks", ICLR 2020; Chen et
al., "EarlyBERT: Efficient BERT Training via Early-bird Lottery Tickets", ACL 2021.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from thrifty.architecture import main_blocks
from thrifty.method import Method, NotApplicable, Paper, Phase, SavesAs, register
from thrifty.methods.sparsity._shrink import Slim, change, cut, find_parts, select, shrink, slim
from thrifty.remote_code import check_remote_code, write_remote_code

Keep = list[tuple[list[int], list[int]]]


def mask_distance(first: Tensor, second: Tensor) -> float:
    """The share of places where two masks differ (normalised Hamming distance)."""
    return float((first != second).float().mean())


class Detector:
    """Says when masks have stopped changing: the largest distance to the last few is below a bound.

    Args:
        epsilon: The bound.
        length: How many masks to look back on.
    """

    def __init__(self, epsilon: float = 0.1, length: int = 5) -> None:
        self.epsilon = epsilon
        self.masks: deque[Tensor] = deque(maxlen=length)

    def __call__(self, mask: Tensor) -> bool:
        """Takes in a mask. True where it is close to all of the last ones, of which there must be enough."""
        full = len(self.masks) == self.masks.maxlen
        settled = full and max(mask_distance(mask, other) for other in self.masks) < self.epsilon
        self.masks.append(mask)
        return settled


def choose(
    heads: Sequence[Tensor],
    units: Sequence[Tensor],
    head_fraction: float = 1 / 3,
    unit_fraction: float = 0.4,
    unit_scope: Literal["global", "layer"] = "global",
) -> Keep:
    """The heads and units with the largest coefficients: heads in each layer, units over all layers (or in each).

    Args:
        heads: The coefficients of each layer's heads.
        units: The coefficients of each layer's units.
        head_fraction: Share of each layer's heads that goes; at least one stays.
        unit_fraction: Share of the units that goes; at least one a layer stays.
        unit_scope: Whether units compete with those of other layers.
    """

    def best(scores: Tensor, count: int) -> list[int]:
        return sorted(scores.abs().topk(max(1, count)).indices.tolist())

    kept_heads = [best(c, len(c) - round(head_fraction * len(c))) for c in heads]
    if unit_scope == "layer":
        return list(zip(kept_heads, [best(c, len(c) - round(unit_fraction * len(c))) for c in units], strict=True))
    every = torch.cat([c.abs() for c in units])
    # The best unit of each layer is out of competition.
    spans = list(itertools.pairwise(itertools.accumulate((len(c) for c in units), initial=0)))
    for start, stop in spans:
        every[start + int(every[start:stop].argmax())] = float("inf")
    left = set(best(every, max(len(units), len(every) - round(unit_fraction * len(every)))))
    kept_units = [[i - start for i in range(start, stop) if i in left] for start, stop in spans]
    return list(zip(kept_heads, kept_units, strict=True))


class Slimming:
    """Coefficients on a model's heads and units, for one's own loop.

    Make it before the optimizer, add `pull` to the gradients after each backward, and `draw` the ticket when a
    `Detector` is satisfied; then make a new optimizer.

    Args:
        model: A Hugging Face model.

    Raises:
        NotApplicable: Its attention is not understood.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parts = find_parts(model, "early-bird")
        for block in main_blocks(model, "early-bird"):
            slim(block, self.parts)

    def outputs(self, model: nn.Module) -> list[tuple[Any, Any]]:
        """Each block's layers that carry coefficients: of heads and of units."""
        names = self.parts["attention_out"], self.parts["ffn_out"]
        return [(b.get_submodule(names[0]), b.get_submodule(names[1])) for b in main_blocks(model, "early-bird")]

    def coefficients(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Those of the heads and those of the units, a tensor a block."""
        pairs = self.outputs(model)
        return [a.slimming.detach() for a, _ in pairs], [f.slimming.detach() for _, f in pairs]

    @torch.no_grad()
    def pull(self, model: nn.Module, l1: float) -> None:
        """Adds the gradient of l1 * sum |coefficient|."""
        for pair in self.outputs(model):
            for module in pair:
                if module.slimming.grad is not None:
                    module.slimming.grad.add_(module.slimming.sign(), alpha=l1)

    def as_mask(self, keep: Keep) -> Tensor:
        """What is kept, as one boolean vector."""
        rows = []
        for chosen in keep:
            for index, size in zip(chosen, (self.parts["heads"], self.parts["units"]), strict=True):
                rows.append(torch.zeros(size, dtype=torch.bool).index_fill_(0, torch.tensor(index), True))
        return torch.cat(rows)

    @contextlib.contextmanager
    def folded(self, model: nn.Module) -> Iterator[None]:
        """Inside, the coefficients are multiplied into the weights and gone; afterwards everything is as before."""
        kept = []
        for pair in self.outputs(model):
            for module in pair:
                if "slimming" in module._parameters:
                    kept.append((module, module.slimming, module.weight.detach().clone()))
                    _fold(module)
        try:
            yield
        finally:
            with torch.no_grad():
                for module, slimming, weight in kept:
                    module.register_parameter("slimming", slimming)
                    module.weight.copy_(weight)

    def draw(self, model: nn.Module, keep: Keep, first: dict[str, Tensor] | None = None) -> bool:
        """Cuts the model down to the ticket, in place.

        Args:
            model: The model with coefficients.
            keep: From `choose`.
            first: Weights to set back to by name; None folds the coefficients into the weights as they are.

        Returns:
            Whether the configuration can say the new sizes.
        """
        for pair in self.outputs(model):
            for module in pair:
                if first is None:
                    _fold(module)
                else:
                    del module._parameters["slimming"]
        if first is not None:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(first[name])
        return shrink(model, self.parts, keep)


@torch.no_grad()
def _fold(module: Any) -> None:
    slimming = module._parameters.pop("slimming")
    by_input = isinstance(module, Conv1D)
    size = module.weight.shape[0 if by_input else 1] // len(slimming)
    factor = slimming.repeat_interleave(size)
    module.weight.mul_(factor[:, None] if by_input else factor)


@register(
    "early-bird",
    title="Early-bird ticket",
    section="sparsity",
    sources=[Paper("You et al.", 2020, "arXiv:1909.11957"), Paper("Chen et al.", 2021, "arXiv:2101.00063")],
    exact=False,
    saves_as="remote_code",
    claims=("mask",),
    conflicts_with={
        "section:initialization": "both save the model as another architecture, each with a modelling file of its own",
        "stacking": "a ticket of a shallow model does not fit the deeper one",
        "autoprog": "a ticket of a shallow model does not fit the deeper one",
    },
    preset={"every": 1, "latest": 0.3},
)
@dataclass(kw_only=True)
class EarlyBird(Method):
    """Finds heads and feed-forward units that are not needed early in the run, and cuts them out."""

    head_fraction: float = 1 / 3
    """Share of the heads of each layer that goes."""
    unit_fraction: float = 0.4
    """Share of the feed-forward units that goes."""
    unit_scope: Literal["global", "layer"] = "global"
    """Rank units over all layers, or in each; layer keeps them equally wide, which a configuration can say."""
    l1: float = 1e-4
    """Weight of the penalty on the coefficients."""
    every: int = 10
    """Optimizer steps between two looks at the coefficients."""
    epsilon: float = 0.1
    """The ticket is drawn when the share of changed heads and units stays below this."""
    latest: float = 0.2
    """The ticket is drawn at this share of the run in any case."""
    rewind: bool = True
    """Train the ticket from the first weights; False goes on from those of the search."""

    slimming: Slimming | None = field(default=None, init=False, repr=False)
    detector: Detector = field(init=False, repr=False)
    keep: Keep = field(default_factory=list, init=False, repr=False)
    drawn_at: int | None = field(default=None, init=False, repr=False)
    plain: bool = field(default=False, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)
    _first: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    _config: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("head_fraction", "unit_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.unit_scope not in ("global", "layer"):
            raise ValueError(f"unit_scope is 'global' or 'layer', got {self.unit_scope!r}")
        if self.l1 < 0:
            raise ValueError(f"l1 must not be negative, got {self.l1}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        if self.epsilon <= 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}")
        if not 0 < self.latest < 1:
            raise ValueError(f"latest must be between 0 and 1, got {self.latest}")
        self.detector = Detector(self.epsilon)

    @property
    def saves_as(self) -> SavesAs:
        return "plain" if self.plain else "remote_code"

    @property
    def no_decay(self) -> tuple[str, ...]:
        return ("slimming",)

    def held_bytes(self, trainable: int, itemsize: float, device: str) -> int:
        return int(itemsize * trainable) if device == "cpu" and self.rewind else 0  # the first weights

    def _last_look(self, total_steps: int) -> int:
        return max(1, round(self.latest * total_steps))

    def phases(self, model_config: Any, total_steps: int) -> list[Phase]:
        # The share of a block's multiplications that are left in the ticket.
        hidden = model_config.hidden_size
        inner = getattr(model_config, "intermediate_size", None) or 4 * hidden
        attention, ffn = 4 * hidden, 2 * inner
        left = ((1 - self.head_fraction) * attention + (1 - self.unit_fraction) * ffn) / (attention + ffn)
        search = self._last_look(total_steps)
        return [
            Phase(steps=search, description="search, all heads and units"),
            Phase(steps=total_steps - search, description="the ticket", depth=left),
        ]

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        check_remote_code(model, "early-bird")
        self.ctx = ctx
        if self._last_look(ctx.total_steps) >= ctx.total_steps:
            raise NotApplicable(
                f"early-bird: a run of {ctx.total_steps} steps has none left for the ticket", fix="train longer"
            )
        self._config = copy.deepcopy(model.config)
        if self.rewind and not ctx.planning:
            self._first = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        self.slimming = Slimming(model)
        return model

    def wrap_training_step(self, step: Callable[..., Tensor], ctx: Any) -> Callable[..., Tensor]:
        def penalised(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = step(model, inputs, num_items_in_batch)
            if ctx.syncing and not self.keep:
                assert self.slimming is not None
                # Under fp16 the gradients are scaled at this point.
                scaler = ctx.trainer.accelerator.scaler
                self.slimming.pull(ctx.model, self.l1 * (scaler.get_scale() if scaler is not None else 1.0))
            return loss

        return penalised

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        step = state.global_step
        last = step >= self._last_look(self.ctx.total_steps)
        if self.keep or not (last or step % self.every == 0):
            return
        assert self.slimming is not None
        model = kw["model"]
        heads, units = self.slimming.coefficients(model)
        keep = choose(heads, units, self.head_fraction, self.unit_fraction, self.unit_scope)
        if not self.detector(self.slimming.as_mask(keep)) and not last:
            return
        self.keep, self.drawn_at = keep, step
        shapes = {name: p.shape for name, p in model.named_parameters()}
        self.plain = self.slimming.draw(model, keep, self._first if self.rewind else None)
        self._first = {}
        mapping: dict[str, str | None] = {
            name: None if self.rewind or p.shape != shapes[name] else name for name, p in model.named_parameters()
        }
        self.ctx.replace_model(model, mapping)

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        assert self.slimming is not None
        with contextlib.nullcontext() if self.keep else self.slimming.folded(model):
            yield

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        assert self.slimming is not None
        searching = any("slimming" in module._parameters for pair in self.slimming.outputs(model) for module in pair)
        if self.plain or not (self.keep or searching):
            return
        parts = self.slimming.parts
        kept = [(len(heads), len(units)) for heads, units in self.keep]
        blocks = main_blocks(model, "early-bird")
        settings = {
            "blocks": blocks.prefix,
            "parts": parts,
            "kept": kept or [(parts["heads"], parts["units"])] * len(blocks),
            "slimming": searching,
        }
        body = "\n\n\n".join(inspect.getsource(part) for part in (Slim, slim, select, cut, change))
        write_remote_code(folder, model, kind="early-bird", body=body, settings=settings)

    def state_dict(self) -> dict[str, Any]:
        return {
            "keep": [list(map(list, pair)) for pair in self.keep],
            "drawn_at": self.drawn_at,
            "masks": list(self.detector.masks),
            "first": self._first,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.keep = [(heads, units) for heads, units in state["keep"]]
        self.drawn_at, self._first = state["drawn_at"], dict(state["first"])
        self.detector.masks.clear()
        self.detector.masks.extend(state["masks"])

    def restore_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        assert self.slimming is not None
        searching = any("slimming" in module._parameters for pair in self.slimming.outputs(model) for module in pair)
        if not searching:
            # Already cut: the checkpoint may be of another ticket, or of the time before it.
            build: Any = type(model)
            model = build(copy.deepcopy(self._config)).to(ctx.device)
            self.slimming, self.plain = Slimming(model), False
        if self.keep:
            for pair in self.slimming.outputs(model):
                for module in pair:
                    del module._parameters["slimming"]
            self.plain = shrink(model, self.slimming.parts, self.keep)
        return model
