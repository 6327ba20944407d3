"""What Adam's relatives share: the two running means, and states that keep their types in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def adam_direction(
    state: dict[str, Any], gradient: Tensor, betas: tuple[float, float], eps: float, *, like: Tensor | None = None
) -> Tensor:
    """Adam's step for a learning rate of 1, from running means that are updated in place.

    Args:
        state: Of one parameter: `step`, `exp_avg` and `exp_avg_sq`; made where they are missing.
        gradient: In any basis, of any shape.
        betas: Decay of the two means.
        eps: Added to the denominator.
        like: What new states are like; None is the gradient.

    Returns:
        m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps), with the gradient's shape.
    """
    if "exp_avg" not in state:
        zeros = gradient if like is None else like
        state["step"], state["exp_avg"], state["exp_avg_sq"] = 0, torch.zeros_like(zeros), torch.zeros_like(zeros)
    state["step"] = int(state["step"]) + 1
    beta1, beta2 = betas
    m, v, count = state["exp_avg"], state["exp_avg_sq"], state["step"]
    m.lerp_(gradient, 1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (v / (1 - beta2**count)).sqrt_().add_(eps)
    return m.div(root).mul_(1 / (1 - beta1**count))


def adamw_step(p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One AdamW step of a parameter, with decoupled decay; for what other optimizers leave to AdamW."""
    direction = adam_direction(state, gradient, group["betas"], group["eps"])
    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction.to(p.dtype), alpha=-group["lr"])


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (rising) and eigenvectors of a symmetric matrix, in float64.

    In float32 the decomposition of sums of few gradients, which are all but singular, sometimes does not converge.
    """
    scale = matrix.abs().max().double().clamp_min(1e-300)
    values, vectors = torch.linalg.eigh(matrix.double() / scale)
    return values * scale, vectors


class ByParameter(torch.optim.Optimizer):
    """An optimizer that updates one parameter after another, and whose states keep their types when loaded.

    torch casts every floating-point state to the type of its parameter, which would destroy quantised states and
    float32 states of half-precision parameters.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    self.update(p, p.grad, group, index)
        return loss

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        """One update of one parameter, the `index`-th of its group."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the parent's, but states keep their types."""
        super().load_state_dict(state_dict)
        order = [p for group in self.param_groups for p in group["params"]]
        for index, p in enumerate(order):
            for key, value in state_dict["state"].get(index, {}).items():
                if torch.is_tensor(value):
                    self.state[p][key] = value.to(p.device, copy=True)
