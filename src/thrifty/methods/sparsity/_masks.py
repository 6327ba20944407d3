"""What the sparse methods share: masks on weights, how many weights each layer keeps, and the hooks that hold them.

A weight outside of its mask is exactly zero whenever somebody looks: after each update, in evaluation and in what is
saved. Its gradient is zeroed before clipping, and its optimizer state after each update, since momentum and weight
decay would otherwise move it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.architecture import block_linears, main_blocks
from thrifty.method import Method, NotApplicable


def erdos_renyi_kernel(shapes: Mapping[str, tuple[int, ...]], sparsity: float) -> dict[str, int]:
    """Distributes the non-zeros over the layers: density in proportion to (sum of dims) / (product of dims), at most 1.

    Args:
        shapes: Shape of each weight.
        sparsity: Share of zeros over all of them.

    Returns:
        The number of non-zeros of each weight; their sum is exact.

    >>> erdos_renyi_kernel({"a": (64, 32), "b": (32, 16), "c": (16, 10)}, 0.8)
    {'a': 307, 'b': 154, 'c': 83}
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    target = round((1 - sparsity) * sum(sizes.values()))
    dense: set[str] = set()
    scale = 1.0
    while len(dense) < len(shapes):
        rest = [name for name in shapes if name not in dense]
        scale = (target - sum(sizes[name] for name in dense)) / sum(raw[name] * sizes[name] for name in rest)
        full = {name for name in rest if scale * raw[name] > 1}
        if not full:
            break
        dense |= full
    exact = {name: sizes[name] if name in dense else scale * raw[name] * sizes[name] for name in shapes}
    counts = {name: math.floor(value) for name, value in exact.items()}
    # The largest remainders get the last few, so that the total is exact.
    missing = target - sum(counts.values())
    for name in sorted(exact, key=lambda n: counts[n] - exact[n])[:missing]:
        counts[name] += 1
    return counts


def random_masks(
    parameters: Mapping[str, nn.Parameter], counts: Mapping[str, int], rng: torch.Generator
) -> dict[str, Tensor]:
    """Masks with the given numbers of connections at random places, drawn on the CPU."""
    masks = {}
    for name, p in parameters.items():
        mask = torch.zeros(p.numel(), dtype=torch.bool)
        mask[torch.randperm(p.numel(), generator=rng)[: counts[name]]] = True
        masks[name] = mask.view(p.shape).to(p.device)
    return masks


def keep_best(scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Masks that keep the `count` highest scores over all layers. By count, so that ties remove no more than asked."""
    flat = torch.cat([score.flatten() for score in scores.values()])
    kept = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
    kept[flat.topk(count).indices] = True
    parts = kept.split([score.numel() for score in scores.values()])
    return {name: part.view(score.shape) for (name, score), part in zip(scores.items(), parts, strict=True)}


class MaskedWeights:
    """Masks on some weights of a model, for one's own loop.

    After each backward: `mask_gradients()`. After each optimizer step: `apply(optimizer)`.

    Args:
        parameters: The weights by name.
        masks: Boolean, of the same names and shapes; True is kept.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], masks: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.masks = dict(masks)
        self.apply()

    @property
    def density(self) -> float:
        """Share of the weights that is kept."""
        return sum(int(m.sum()) for m in self.masks.values()) / sum(m.numel() for m in self.masks.values())

    @torch.no_grad()
    def apply(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Zeroes the weights outside of the masks, and their optimizer state."""
        for name, p in self.parameters.items():
            mask = self.masks[name] = self.masks[name].to(p.device)
            p.mul_(mask)
            for value in optimizer.state.get(p, {}).values() if optimizer is not None else ():
                if torch.is_tensor(value) and value.shape == p.shape:
                    value.mul_(mask)

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Zeroes the gradients outside of the masks, before they are clipped and used."""
        for name, p in self.parameters.items():
            if p.grad is not None:
                p.grad.mul_(self.masks[name].to(p.device))


def check_sparsity(sparsity: float) -> None:
    """Raises `ValueError` unless it is a share between 0 and 1."""
    if not 0 < sparsity < 1:
        raise ValueError(f"sparsity must be between 0 and 1, got {sparsity}")


def block_weights(model: nn.Module, who: str) -> dict[str, nn.Parameter]:
    """The trained weights of the blocks' linear layers by name: not embeddings, norms, biases or the head."""
    linears = block_linears(main_blocks(model, who))
    return {f"{n}.weight": m.weight for n, m in linears.items() if m.weight.requires_grad}  # type: ignore[misc, union-attr]


@dataclass(kw_only=True)
class MaskedMethod(Method):
    """The hooks of a method that masks the blocks' linear weights. A subclass says which: `choose`."""

    weights: MaskedWeights | None = field(default=None, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)

    def choose(self, model: nn.Module, parameters: dict[str, nn.Parameter], ctx: Any) -> MaskedWeights:
        """The first masks."""
        raise NotImplementedError

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """What is masked."""
        return block_weights(model, self.name)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.ctx = ctx
        parameters = self.parameters(model)
        if not parameters:
            raise NotApplicable(
                f"{self.name}: no linear weight of the blocks is trained", fix=f"unfreeze them, or remove {self.name}"
            )
        if ctx.planning:
            # No data, and no values: the masks as buffers, so that the dry run counts them, block by block.
            masks = {}
            for name, p in parameters.items():
                masks[name] = torch.ones(p.shape, dtype=torch.bool, device=p.device)
                model.get_submodule(name.removesuffix(".weight")).register_buffer("mask", masks[name], persistent=False)
            self.weights = MaskedWeights(parameters, masks)
        else:
            self.weights = self.choose(model, parameters, ctx)
        return model

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        assert self.weights is not None
        self.weights.parameters = self.parameters(kw["model"])
        self.weights.apply()

    def masks_gradients(self) -> bool:
        """Are the gradients of this step masked?"""
        return True

    def wrap_training_step(self, step: Callable[..., Tensor], ctx: Any) -> Callable[..., Tensor]:
        def masked(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = step(model, inputs, num_items_in_batch)
            # Only at the last micro-batch are the gradients complete, and equal on all processes.
            if ctx.syncing and self.masks_gradients():
                assert self.weights is not None
                self.weights.mask_gradients()
            return loss

        return masked

    def wrap_update(self, update: Callable[[], None], ctx: Any) -> Callable[[], None]:
        def masked_update() -> None:
            assert self.weights is not None
            update()
            self.weights.apply(ctx.optimizer)

        return masked_update

    def on_replace(self, model: nn.Module, parameter_map: Mapping[str, str | None], ctx: Any) -> None:
        assert self.weights is not None
        old = self.weights.masks
        self.weights.parameters = self.parameters(model)
        self.weights.masks = {}
        for name, p in self.weights.parameters.items():
            source = parameter_map.get(name, name) or name
            mask = old.get(source, old.get(name))
            if mask is None or mask.shape != p.shape:
                raise NotApplicable(
                    f"{self.name}: the model changed, and '{name}' has no mask of shape {tuple(p.shape)} to inherit",
                    fix=f"remove {self.name}, or the method that changes the model",
                )
            self.weights.masks[name] = mask.clone()
        self.weights.apply(ctx.optimizer)

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        assert self.weights is not None
        self.weights.parameters = self.parameters(model)
        self.weights.apply()
        return model

    def state_dict(self) -> dict[str, Any]:
        assert self.weights is not None
        return {"masks": {n: m.cpu() for n, m in self.weights.masks.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # At once, not at the next start: the best checkpoint is loaded after training, right before `finish` masks.
        assert self.weights is not None
        self.weights.masks = dict(state["masks"])
