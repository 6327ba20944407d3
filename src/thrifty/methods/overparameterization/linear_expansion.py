"""Linear expansion.

What it does: trains each linear layer of attention and feed-forward as a product of two or more wider matrices, with
nothing between them, and multiplies them out again at the end. The function is the same at the start and after folding.

Helps: small models trained from scratch, whose optimization the product speeds up; inference costs nothing extra.
Does not help: large models: weights, gradients and optimizer states grow by the number of factors and their width.
Limits: weight decay acts on the factors, which is not L2 on their product; the theory is about plain gradient descent,
not Adam. Masks and adapters need the plain weights.
Source: Arora, Cohen and Hazan, "On the Optimization of Deep Networks: Implicit Acceleration by Overparameterization",
ICML 2018; Guo, Alvarez and Salzmann, "ExpandNets: Linear Over-parameterization to Train Compact Convolutional
Networks", NeurIPS 2020.
Library: torch.nn.utils.parametrize.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thrifty.architecture import block_linears, main_blocks
from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.remote_code import check_remote_code, write_remote_code

Targets = Literal["all", "attention", "ffn"]
Init = Literal["preserve", "random"]


class Product(nn.Module):
    """The weight as the product of its factors, the last factor first: W = W_N ... W_1."""

    def forward(self, *factors):
        product = factors[0]
        for factor in factors[1:]:
            product = product @ factor
        return product

    def right_inverse(self, weight):
        return self.factors


def change(model, settings):
    """Gives the linear layers of a freshly built model factors of the recorded shapes, in place."""
    for name, shapes in settings["factors"].items():
        product: Any = Product()
        module = model.get_submodule(name)
        product.factors = [torch.empty(shape, dtype=module.weight.dtype, device=module.weight.device)
                           for shape in shapes]  # fmt: skip
        torch.nn.utils.parametrize.register_parametrization(module, "weight", product, unsafe=True)
        del product.factors


def factorize(weight: Tensor, width: int, count: int = 2) -> list[Tensor]:
    """Balanced factors whose product is `weight`.

    From W = U S V' and matrices Q_k of shape (rank, width) with orthonormal rows, drawn at random:
    W_N = U S^(1/N) Q_{N-1}, ..., W_1 = Q_1' S^(1/N) V'. Neighbours are balanced: W_{k+1}' W_{k+1} = W_k W_k'.

    Args:
        weight: Shape (rows, columns).
        width: The inner width, at least min(rows, columns).
        count: How many factors.

    Returns:
        The factors, last one first, in the type of `weight`.
    """
    u, s, v = torch.linalg.svd(weight.detach().double(), full_matrices=False)
    root = s ** (1 / count)
    turns = []
    for _ in range(count - 1):
        q, _ = torch.linalg.qr(torch.randn(width, len(s), dtype=torch.float64).to(weight.device))
        turns.append(q.mT)
    factors = [u * root @ turns[0]]
    factors += [turns[k].mT * root @ turns[k + 1] for k in range(count - 2)]
    factors.append(turns[-1].mT @ (root[:, None] * v))
    return [factor.to(weight.dtype) for factor in factors]


def random_factors(weight: Tensor, width: int, count: int = 2) -> list[Tensor]:
    """Normal factors whose product has the variance of `weight`: the std of each is (var / width^(N-1))^(1/2N)."""
    rows, columns = weight.shape
    shapes = [(rows, width), *[(width, width)] * (count - 2), (width, columns)]
    std = (weight.detach().double().var() / width ** (count - 1)) ** (0.5 / count)
    return [(torch.randn(shape, dtype=torch.float64).to(weight.device) * std).to(weight.dtype) for shape in shapes]


def fold(factors: Sequence[Tensor]) -> Tensor:
    """The product of the factors, computed in float64, in their type."""
    product = factors[0].detach().double()
    for factor in factors[1:]:
        product = product @ factor.detach().double()
    return product.to(factors[0].dtype)


class Expansion:
    """Factors in place of the weights of some linear layers, for one's own loop.

    Make it before the optimizer, and call `fold()` after training.

    Args:
        modules: Linear layers by name.
        rate: Inner width as a multiple of the smaller side of a weight; at least 1.
        factors: How many factors.
        init: `preserve` keeps the function, `random` draws the factors anew with the right variance.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], rate: float = 4.0, factors: int = 2, init: Init = "preserve"
    ) -> None:
        self.modules = dict(modules)
        for module in self.modules.values():
            weight: Any = module.weight
            width = max(1, math.ceil(rate * min(weight.shape)))
            product: Any = Product()
            if weight.is_meta:  # a dry run: shapes are all there is
                shapes = [(weight.shape[0], width), *[(width, width)] * (factors - 2), (width, weight.shape[1])]
                product.factors = [torch.empty(shape, dtype=weight.dtype, device="meta") for shape in shapes]
            else:
                make = factorize if init == "preserve" else random_factors
                product.factors = make(weight, width, factors)
            # unsafe: the product differs from the old weight by rounding, or, where drawn anew, altogether.
            parametrize.register_parametrization(module, "weight", product, unsafe=True)
            del product.factors

    def shapes(self) -> dict[str, list[list[int]]]:
        """The shapes of each layer's factors."""
        return {name: [list(factor.shape) for factor in _factors(module)] for name, module in self.modules.items()}

    @contextlib.contextmanager
    def folded(self) -> Iterator[None]:
        """Inside, the layers are plain ones with the folded weights; afterwards they have the same factors again."""
        kept = []
        for module in self.modules.values():
            kept.append((module, module.__class__, module._modules["parametrizations"]))
            weight = nn.Parameter(fold(_factors(module)), requires_grad=False)
            module.__class__ = module.__class__.__mro__[1]
            del module._modules["parametrizations"]
            module.register_parameter("weight", weight)
        try:
            yield
        finally:
            for module, cls, parametrizations in kept:
                del module._parameters["weight"]
                module.__class__, module._modules["parametrizations"] = cls, parametrizations

    def fold(self) -> None:
        """Makes the layers plain ones again, for good."""
        for module in self.modules.values():
            weight = fold(_factors(module))
            trained = _factors(module)[0].requires_grad
            module.__class__ = module.__class__.__mro__[1]
            del module._modules["parametrizations"]
            module.register_parameter("weight", nn.Parameter(weight, requires_grad=trained))
        self.modules = {}


def _factors(module: Any) -> list[nn.Parameter]:
    return list(module.parametrizations.weight.parameters())


def targets(model: nn.Module, which: Targets = "all") -> dict[str, nn.Module]:
    """The trained linear layers inside attention, feed-forward or both, by name."""
    blocks = main_blocks(model, "linear-expansion")
    chosen = {}
    for name, module in block_linears(blocks).items():
        weight: Any = module.weight
        inside = re.search(r"attn|attention", name.removeprefix(blocks.prefix)) is not None
        wanted = which == "all" or inside is (which == "attention")
        if wanted and weight.requires_grad and weight.is_floating_point():
            chosen[name] = module
    return chosen


def expanded(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that have factors now, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if parametrize.is_parametrized(module, "weight") and isinstance(module.parametrizations.weight[0], Product)  # type: ignore[union-attr, index]
    }


@register(
    "linear-expansion",
    title="Linear expansion",
    section="overparameterization",
    sources=[Paper("Arora et al.", 2018, "arXiv:1802.06509"), Paper("Guo et al.", 2020, "arXiv:1811.10495")],
    exact=False,
    conflicts_with={
        "section:initialization": "both decide how the layers start, and both change how the model is saved",
        "section:sparsity": "a mask belongs to a weight, and here weights are products",
        "muon": "it orthogonalises the update of a layer's matrix, which here is a product of several",
        "section:peft": "adapters freeze the weights that the expansion trains",
    },
    preset={"rate": 1.5},
    library="torch.nn.utils.parametrize",
)
@dataclass(kw_only=True)
class LinearExpansion(Method):
    """Linear layers as products of wider matrices."""

    rate: float = 4.0
    """Inner width as a multiple of the smaller side of each weight."""
    factors: int = 2
    """How many matrices make a weight."""
    init: Init = "preserve"
    """preserve: the model computes what it computed before; random: drawn anew with the right variance."""
    targets: Targets = "all"
    """The layers of attention, of the feed-forward part (ffn), or all."""

    expansion: Expansion | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.rate < 1:
            raise ValueError(f"rate must be at least 1, or the product loses rank, got {self.rate}")
        if self.factors < 2:
            raise ValueError(f"factors must be at least 2, got {self.factors}")
        if self.init not in ("preserve", "random"):
            raise ValueError(f"init is 'preserve' or 'random', got {self.init!r}")
        if self.targets not in ("all", "attention", "ffn"):
            raise ValueError(f"targets is 'all', 'attention' or 'ffn', got {self.targets!r}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        check_remote_code(model, "linear-expansion")
        modules = targets(model, self.targets)
        if not modules:
            raise NotApplicable(
                "linear-expansion: no linear layer of the blocks is trained in full precision",
                key="methods.linear-expansion.targets",
                value=self.targets,
                fix="unfreeze them, or remove linear-expansion",
            )
        self.expansion = Expansion(modules, self.rate, self.factors, self.init)
        return model

    def _follow(self, model: nn.Module) -> Expansion:
        assert self.expansion is not None
        self.expansion.modules = expanded(model)
        return self.expansion

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        with self._follow(model).folded():
            yield

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        self._follow(model).fold()
        return model

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        # A checkpoint holds the factors. Loaded as the plain model it would get random weights without a word.
        expansion = self._follow(model)
        if expansion.modules:
            body = "\n\n\n".join(inspect.getsource(part) for part in (Product, change))
            settings = {"factors": expansion.shapes()}
            write_remote_code(folder, model, kind="linear-expansion", body=body, settings=settings)
