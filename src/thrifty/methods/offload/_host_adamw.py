"""AdamW whose states, master weights and arithmetic are on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from thrifty.methods.offload._transfers import on_host, to_device, to_host


def update_(
    weights: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]
) -> None:
    """One update of several tensors in place, by torch's own fused kernel.

    Args:
        weights: Master weights in float32.
        gradients: Of the same shapes, float32.
        states: For each `step` (a count, which grows), `exp_avg`, `exp_avg_sq`.
        group: `lr`, `betas`, `eps`, `weight_decay`.
    """
    adamw(
        weights, gradients, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [],
        [s["step"] for s in states], fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
        lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip


class HostAdamW(torch.optim.Optimizer):
    """AdamW after ZeRO-Offload: gradients go to the host, new weights come back; 16 bits each way for 16-bit weights.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay of the running means.
        eps: Added to the denominator.
        weight_decay: Decoupled decay.
        delay_after: From this step on the device does not wait: the update of step t runs on the host during step
            t + 1 and takes effect after it. None: never.
    """

    keeps_low_bits = True  # of 16-bit weights, in float32 masters

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        delay_after: int | None = None,
    ) -> None:
        self.delay_after = delay_after
        self.steps = 0
        self._running: Future[None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _master(self, p: Tensor) -> Tensor:
        return self.state[p].get("master", p.detach())

    def _begin(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            pinned = p.is_cuda
            state["step"] = torch.zeros(())
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(p.shape, dtype=torch.float32, device="cpu", pin_memory=pinned)
            if self.delay_after is not None or p.device.type != "cpu" or p.dtype != torch.float32:
                state["master"] = p.detach().to("cpu", torch.float32, copy=True)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update, or the beginning of one."""
        loss = closure() if closure is not None else None
        self.finish_update()
        work = []
        for group in self.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self._begin(p)
                delayed = self.delay_after is not None and self.steps >= self.delay_after
                # A delayed update must not see the next step's gradient written over this one's.
                gradient = p.grad.to("cpu", torch.float32, copy=delayed)
                work.append((self._master(p), gradient, state, settings))
        self.steps += 1
        if self.delay_after is not None and self.steps > self.delay_after:
            if any(p.is_cuda for group in self.param_groups for p in group["params"]):
                self._pool = self._pool or ThreadPoolExecutor(1)
                self._running = self._pool.submit(_update_all, work)
            else:  # nobody would gain by a thread
                _update_all(work)
        else:
            _update_all(work)
            self._publish()
        return loss

    @torch.no_grad()
    def finish_update(self) -> None:
        """Waits for a delayed update and puts its result into the weights."""
        if self._running is not None:
            self._running.result()
            self._running = None
        self._publish()

    def _publish(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].get("master") if p in self.state else None
                if master is not None:
                    p.copy_(master, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """As the parent's. A delayed update is in the master weights already, and not yet in the weights."""
        if self._running is not None:
            self._running.result()
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the parent's, but states stay on the host, in float32."""
        self._running = None
        self.steps = int(state_dict.get("steps", 0))
        saved = state_dict["state"]
        super().load_state_dict({**{k: v for k, v in state_dict.items() if k != "steps"}, "state": {}})
        order = [p for group in self.param_groups for p in group["params"]]
        for index, p in enumerate(order):
            if index in saved:
                state = self._begin(p)
                for name, value in saved[index].items():
                    state[name].copy_(value)


@torch.no_grad()
def _update_all(work: list[tuple[Tensor, Tensor, dict[str, Any], dict[str, Any]]]) -> None:
    for master, gradient, state, settings in work:
        update_([master], [gradient], [state], settings)


class NothingOnDevice(torch.optim.Optimizer):
    """For a dry run: an optimizer of which nothing is on the device."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Does what the device sees of it: gradients go to the host, which updates there, and weights come back."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                handle = to_host(p.grad)
                # Read weight, gradient and two moments in float32; write weight and moments.
                on_host(p.grad, 28 * p.numel())
                p.data.copy_(to_device(handle, p.shape, p.dtype))
        return loss
