"""Lottery tickets (iterative magnitude pruning with rewinding).

What it does: trains, prunes a share of the smallest weights, sets the others and the learning-rate schedule back to
where they were early in training, and trains again: several rounds inside the steps of one run. What is left at the end
is the ticket, trained once more.

Helps: finding out how small a network can be that still trains to full quality; the best sparse models at high
sparsity.
Does not help: time: every round costs as much as a training run. Zeros are multiplied like other numbers.
Limits: the run's steps are divided among the rounds, so it needs many. A copy of the early weights is kept (on the
host). Linear layers inside the blocks only: not embeddings, norms, biases or the head.
Source: Frankle and Carbin, "The Lottery Ticket Hypothesis: Finding Sparse, Trainable Neural Networks", ICLR 2019;
Frankle et al., "Linear Mode Connectivity and the Lottery Ticket Hypothesis", ICML 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from thrifty.method import NotApplicable, Paper, register
from thrifty.methods.sparsity._masks import MaskedMethod, MaskedWeights, keep_best


@dataclass(frozen=True)
class Rounds:
    """How the steps of a run are divided.

    Args:
        length: Steps of a full round.
        rewind: The step of a round to which it is rewound.
        count: Prunings; there is one round more.
        total: Steps of the run. What the division leaves over lengthens the last round.
    """

    length: int
    rewind: int
    count: int
    total: int

    @classmethod
    def divide(cls, total: int, count: int, rewind: float) -> Rounds:
        """Divides `total` steps; `rewind` is a share of a round.

        >>> r = Rounds.divide(100, 4, 0.1)
        >>> r.length, r.rewind, r.starts, [r.place(t) for t in (0, 21, 22, 99)]
        (21, 2, [21, 40, 59, 78], [0, 2, 3, 23])
        """
        length = total
        while length > 0 and length + count * (length - int(rewind * length)) > total:
            length -= 1
        return cls(length, int(rewind * length), count, total)

    @property
    def starts(self) -> list[int]:
        """The steps of the run at which a pruning happens and the next round begins."""
        return [self.length + i * (self.length - self.rewind) for i in range(self.count)]

    def round_of(self, step: int) -> int:
        """The round that a step of the run belongs to, from 0."""
        return sum(step >= start for start in self.starts)

    def place(self, step: int) -> int:
        """The step of its round that a step of the run is."""
        index = self.round_of(step)
        return step if index == 0 else self.rewind + step - self.starts[index - 1]

    def length_of(self, index: int) -> int:
        """Steps that the schedule of a round spans."""
        return self.rewind + self.total - self.starts[-1] if index == self.count else self.length


class Ticket(MaskedWeights):
    """A network that is pruned and rewound, for one's own loop.

    `remember(model)` at the step to rewind to; after each backward `mask_gradients()`; after each optimizer step
    `apply(optimizer)`; at the end of a round `prune(...)`, `rewind(model)`, and a fresh optimizer and schedule.

    Args:
        parameters: The weights that are pruned, by name.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(parameters, {n: torch.ones_like(p, dtype=torch.bool) for n, p in parameters.items()})
        self.memory: dict[str, Tensor] = {}

    def remember(self, model: nn.Module) -> None:
        """Keeps a copy of all weights and buffers, on the CPU."""
        self.memory = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def prune(self, density: float, *, by_layer: bool = False, random: torch.Generator | None = None) -> None:
        """Prunes the smallest of the weights that are left (or random ones) until a share of `density` remains."""
        scores = {}
        for name, p in self.parameters.items():
            score = p.abs() if random is None else torch.rand(p.shape, generator=random).to(p.device)
            scores[name] = torch.where(self.masks[name].to(p.device), score.float(), -1.0)
        groups = [{name: score} for name, score in scores.items()] if by_layer else [scores]
        for group in groups:
            self.masks.update(keep_best(group, round(density * sum(score.numel() for score in group.values()))))

    @torch.no_grad()
    def rewind(self, model: nn.Module, *, shuffle: torch.Generator | None = None) -> None:
        """Sets all weights back; `shuffle` mixes the values of each pruned weight first, as a control."""
        for name, value in model.state_dict().items():
            early = self.memory[name]
            if shuffle is not None and name in self.parameters:
                early = early.flatten()[torch.randperm(early.numel(), generator=shuffle)].view_as(early)
            value.copy_(early)
        self.apply()


@register(
    "lottery-ticket",
    title="Lottery ticket",
    section="sparsity",
    sources=[
        Paper("Frankle and Carbin", 2019, "arXiv:1803.03635"),
        Paper("Frankle et al.", 2020, "arXiv:1912.05671"),
    ],
    exact=False,
    claims=("mask", "schedule"),
    conflicts_with={
        "ema": "the average would mix the weights of several rounds",
        "lawa": "the average would mix the weights of several rounds",
        "stacking": "a ticket is rewound to early weights of the same model",
        "autoprog": "a ticket is rewound to early weights of the same model",
    },
    preset={"rounds": 2, "fraction": 0.5, "rewind": 0.0},
)
@dataclass(kw_only=True)
class LotteryTicket(MaskedMethod):
    """Iterative magnitude pruning with rewinding, in one resumable run."""

    rounds: int = 5
    """Prunings; the run's steps are divided into one round more."""
    fraction: float = 0.2
    """Share of the remaining weights that is pruned each time."""
    rewind: float = 0.05
    """How far into a round the weights and the schedule are set back to, as a share of the round."""
    scope: Literal["global", "layer"] = "global"
    """Rank the weights over all layers, or in each one."""
    control: Literal["none", "random", "reinit"] = "none"
    """To compare with: prune at random, or shuffle the early values of each weight at every rewinding."""

    weights: Ticket | None = field(default=None, init=False, repr=False)  # type: ignore[assignment]
    division: Rounds | None = field(default=None, init=False, repr=False)
    done: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        if not 0 <= self.fraction < 1:
            raise ValueError(f"fraction must be at least 0 and below 1, got {self.fraction}")
        if not 0 <= self.rewind < 1:
            raise ValueError(f"rewind must be at least 0 and below 1, got {self.rewind}")
        if self.scope not in ("global", "layer"):
            raise ValueError(f"scope is 'global' or 'layer', got {self.scope!r}")
        if self.control not in ("none", "random", "reinit"):
            raise ValueError(f"control is 'none', 'random' or 'reinit', got {self.control!r}")

    def held_bytes(self, trainable: int, itemsize: float, device: str) -> int:
        return int(itemsize * trainable) if device == "cpu" else 0  # the early weights

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.division = Rounds.divide(ctx.total_steps, self.rounds, self.rewind)
        if self.division.length < 1:
            raise NotApplicable(
                f"lottery-ticket: {ctx.total_steps} steps are too few for {self.rounds + 1} rounds",
                key="methods.lottery-ticket.rounds",
                value=self.rounds,
                fix="train longer, or prune less often",
            )
        return super().prepare_model(model, ctx)

    def choose(self, model: nn.Module, parameters: dict[str, nn.Parameter], ctx: Any) -> Ticket:
        return Ticket(parameters)

    def build_schedule(self, optimizer: torch.optim.Optimizer, total_steps: int, ctx: Any) -> Any:
        assert self.division is not None
        division = self.division
        shapes = [_shape(ctx.args, division.length_of(index)) for index in range(self.rounds + 1)]

        def factor(step: int) -> float:
            return shapes[division.round_of(step)](division.place(step))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        # At the beginning of the next step, so that the end of a round is evaluated and saved as it was trained.
        assert self.weights is not None
        assert self.division is not None
        step, model = state.global_step, kw["model"]
        if step == self.division.rewind and self.done == 0:
            self.weights.remember(model)
        if self.division.round_of(step) <= self.done:
            return
        self.done += 1
        rng = self.ctx.rng("lottery-ticket", step=step)
        self.weights.prune(
            (1 - self.fraction) ** self.done,
            by_layer=self.scope == "layer",
            random=rng if self.control == "random" else None,
        )
        self.weights.rewind(model, shuffle=rng if self.control == "reinit" else None)
        self.ctx.optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        assert self.weights is not None
        return {**super().state_dict(), "memory": self.weights.memory, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert self.weights is not None
        self.weights.memory, self.done = dict(state["memory"]), state["done"]


def _shape(args: Any, length: int) -> Callable[[int], float]:
    """The run's own learning-rate schedule, drawn over `length` steps."""
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler: Any = get_scheduler(
        args.lr_scheduler_type,
        optimizer=stand_in,
        num_warmup_steps=args.get_warmup_steps(length),
        num_training_steps=length,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    if not hasattr(scheduler, "lr_lambdas"):
        raise NotApplicable(
            "lottery-ticket: this schedule is not a function of the step, so it cannot be set back",
            key="lr_scheduler_type",
            value=str(args.lr_scheduler_type),
            fix="use linear, cosine, constant or another function of the step",
        )
    return scheduler.lr_lambdas[0]
