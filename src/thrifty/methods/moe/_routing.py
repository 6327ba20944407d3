"""The losses that spread tokens over experts, what was routed where, and the method that all mixtures derive from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thrifty import _hf
from thrifty.method import Method, NotApplicable

CONFLICTS = {
    "section:peft": "adapters freeze the routers and experts that are to be trained",
    "section:growth": "the experts of a layer would not be carried into the model that replaces this one",
    "section:sparsity": "masks are made for linear layers, and experts keep theirs in one tensor",
    "section:overparameterization": "expansion is made for linear layers, and experts keep theirs in one tensor",
    "section:sharing": "shared layers would share one router",
}


class Route(NamedTuple):
    """What a layer did with its tokens: (tokens,), (tokens, experts) twice, (tokens, k) three times."""

    valid: Tensor | None
    logits: Tensor
    probabilities: Tensor
    chosen: Tensor
    wanted: Tensor
    kept: Tensor


def balance_loss(route: Route) -> Tensor:
    """Switch's experts * sum_i f_i P_i over the tokens that are not padding: 1 when balanced, `experts` at worst.

    f, the share of tokens whose first choice is i, has no gradient; P, the mean probability of i, has.
    """
    weight = _weights(route)
    first = nn.functional.one_hot(route.chosen[:, 0], route.probabilities.shape[1])
    share = (first * weight[:, None]).sum(0)
    return route.probabilities.shape[1] * (share * (route.probabilities * weight[:, None]).sum(0)).sum()


def z_loss(route: Route) -> Tensor:
    """The mean square of the logits' log-sum-exp over the tokens that are not padding."""
    return (route.logits.logsumexp(dim=-1).pow(2) * _weights(route)).sum()


def _weights(route: Route) -> Tensor:
    if route.valid is None:
        return route.probabilities.new_full((len(route.logits),), 1 / len(route.logits))
    valid = route.valid.to(route.probabilities.dtype)
    return valid / valid.sum().clamp_min(1)


class Routing:
    """Between a method and its layers: which tokens are padding, and what was routed where.

    Args:
        experts: Experts of each layer, in order.
    """

    def __init__(self, experts: list[int]) -> None:
        self.mask: Tensor | None = None
        self.recording = False
        self.routes: list[Route] = []
        self.load = [torch.zeros(count, dtype=torch.float64) for count in experts]
        self.dropped = [torch.zeros(2, dtype=torch.float64) for _ in experts]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model takes no part in training."""

    def valid(self, tokens: Tensor) -> Tensor | None:
        """Which tokens are no padding: (tokens,)."""
        mask = self.mask
        if mask is None or mask.numel() != len(tokens):
            return None
        return mask.reshape(-1).bool()

    def record(self, valid: Any, logits: Any, probabilities: Any, chosen: Any, *kept: Any) -> None:
        """Called by a layer in its forward pass; does nothing while a checkpointed block is recomputed."""
        if not self.recording:
            return
        self.routes.append(Route(valid, logits, probabilities, chosen, *kept))

    def count(self) -> None:
        """Adds the recorded routes to the statistics."""
        for index, route in enumerate(self.routes):
            experts = len(self.load[index])
            device = route.chosen.device
            self.load[index], self.dropped[index] = self.load[index].to(device), self.dropped[index].to(device)
            chosen = nn.functional.one_hot(route.chosen, experts) * route.wanted[..., None]
            self.load[index] += chosen.sum((0, 1))
            self.dropped[index] += torch.stack([(route.wanted & ~route.kept).sum(), route.wanted.sum()])

    def report(self) -> dict[str, float]:
        """The statistics since the last report: the largest and the smallest load as multiples of an equal share, and
        the share of choices that found no place."""
        if not any(float(total.sum()) for total in self.load):
            return {}
        shares = [total / total.sum().clamp_min(1) * len(total) for total in self.load]
        dropped = torch.stack([part.cpu() for part in self.dropped]).sum(0)
        numbers = {
            "moe_load_max": max(float(share.max()) for share in shares),
            "moe_load_min": min(float(share.min()) for share in shares),
            "moe_dropped": float(dropped[0] / dropped[1].clamp_min(1)),
        }
        for part in (*self.load, *self.dropped):
            part.zero_()
        return {key: round(value, 4) for key, value in numbers.items()}


@dataclass(kw_only=True)
class Mixture(Method):
    """Trains a mixture of experts: adds the routers' losses and reports the routing."""

    aux_loss: float = 0.01
    """Weight of the load-balance loss of each layer."""
    z_loss: float = 0.001
    """Weight of the z-loss, which keeps the routers' logits small."""

    routing: Routing | None = field(default=None, init=False, repr=False)
    _ctx: Any = field(default=None, init=False, repr=False)

    def check_losses(self) -> None:
        """Raises `ValueError` where a weight is negative."""
        for key in ("aux_loss", "z_loss"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative, got {getattr(self, key)}")

    def follow(self, model: Any, layers: list[Any], experts: list[int], ctx: Any) -> None:
        """Connects the layers of a model."""
        self._ctx = ctx
        # On the model too: a dry run prepares several, and comes back to earlier ones.
        self.routing = model.moe_routing = Routing(experts)
        for layer in layers:
            layer.routing = self.routing

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        def with_routers(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            routing: Any = _hf.unwrap_container(model).moe_routing
            routing.mask, routing.recording, routing.routes = inputs.get("attention_mask"), True, []
            share = self._share(inputs, num_items_in_batch, ctx)
            try:
                loss = compute_loss(model, inputs, num_items_in_batch)
                for route in routing.routes:
                    loss = loss + share * (self.aux_loss * balance_loss(route) + self.z_loss * z_loss(route))
                if not ctx.planning:
                    with torch.no_grad():
                        routing.count()
            finally:
                routing.recording, routing.routes = False, []
            return loss

        return with_routers

    def _share(self, inputs: Any, num_items: Any, ctx: Any) -> Any:
        """The share of a micro-batch in its step: losses normalised by tokens are added up, others are averaged."""
        trainer = ctx.trainer
        if num_items is None or trainer is None or not trainer.model_accepts_loss_kwargs or "labels" not in inputs:
            return 1.0
        labels = (inputs["labels"] != -100).sum()
        across = ctx.world_size if trainer.args.average_tokens_across_devices else 1
        return across * labels / num_items

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if control.should_log and self._ctx is not None and self._ctx.trainer is not None and self.routing is not None:
            numbers = self.routing.report()
            if numbers:
                self._ctx.trainer.log(numbers)
                control.should_log = True  # the row with the loss is still to come

    def state_dict(self) -> dict[str, Any]:
        if self.routing is None:
            return {}
        return {"load": [t.cpu() for t in self.routing.load], "dropped": [t.cpu() for t in self.routing.dropped]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.routing is not None and state:
            self.routing.load = [t.clone() for t in state["load"]]
            self.routing.dropped = [t.clone() for t in state["dropped"]]


def refuse_mixture(model: nn.Module, who: str) -> None:
    """Raises `NotApplicable` where the model is a mixture of experts already."""
    config: Any = getattr(model, "config", None)
    kinds = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if any(isinstance(getattr(config, key, None), int) for key in kinds):
        raise NotApplicable(
            f"{who}: {type(model).__name__} is a mixture of experts already", fix=f"train it as it is, without {who}"
        )
