"""Mixtures of experts that are trained from scratch: what they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from thrifty.architecture import main_blocks
from thrifty.method import NotApplicable
from thrifty.methods.moe._convert import describe, to_experts
from thrifty.methods.moe._layer import body
from thrifty.methods.moe._routing import Mixture, refuse_mixture
from thrifty.remote_code import check_remote_code, write_remote_code


@dataclass(kw_only=True)
class FreshMixture(Mixture):
    """Replaces feed-forward layers by mixtures whose experts are drawn anew."""

    experts: int = 8
    """Experts of a layer."""
    every: int = 2
    """Which layers get experts: 1 all, 2 every other."""
    capacity_factor: float | None = 1.25
    """Places of an expert, as a multiple of an equal share; further tokens skip the layer. null drops none."""
    eval_capacity_factor: float | None = None
    """The same in evaluation and in the saved model."""

    _settings: dict[str, Any] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.check_losses()
        if self.experts < 1:
            raise ValueError(f"experts must be at least 1, got {self.experts}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        for key in ("capacity_factor", "eval_capacity_factor"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ValueError(f"{key} must be above 0, got {value}")

    def routing_settings(self) -> dict[str, Any]:
        """`k`, `renormalise` and further arguments of `describe`."""
        raise NotImplementedError

    def router_std(self, width: int) -> float:
        """Standard deviation of the routers' weights at the start."""
        return 0.02

    def experts_of(self, position: int, sparse: list[int], count: int) -> int:
        """Experts of the sparse layer at `position` among `sparse`, in a model of `count` layers."""
        return self.experts

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        refuse_mixture(model, self.name)
        check_remote_code(model, self.name)
        count = len(main_blocks(model, self.name))
        sparse = sparse_layers(count, self.every, self.name)
        self._settings = describe(
            model,
            self.name,
            sparse=sparse,
            experts=[self.experts_of(position, sparse, count) for position in range(len(sparse))],
            capacity=self.capacity_factor,
            eval_capacity=self.eval_capacity_factor,
            **self.routing_settings(),
        )
        layers = to_experts(
            model,
            self._settings,
            copies=False,
            router_std=self.router_std(self._settings["width"]),
            planning=ctx.planning,
        )
        self.follow(model, layers, self._settings["experts"], ctx)
        return model

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        assert self._settings is not None
        write_remote_code(folder, model, kind="moe", body=body(), settings=self._settings)


def sparse_layers(count: int, every: int, who: str) -> list[int]:
    """The layers that get experts: the last of each `every`.

    >>> sparse_layers(6, 2, "moe-top2")
    [1, 3, 5]

    Raises:
        NotApplicable: There would be none.
    """
    if every > count:
        raise NotApplicable(
            f"{who}: the model has only {count} layers", key=f"methods.{who}.every", value=every, fix="a smaller one"
        )
    return list(range(every - 1, count, every))
