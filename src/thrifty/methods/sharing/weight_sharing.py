"""Weight sharing across layers.

What it does: lets groups of neighbouring Transformer layers use the same weights, as ALBERT does: all of them, or only
those of attention, or only the rest. Each layer keeps its place (cache, index), so that the model is run as before.

Helps: memory of weights, gradients and optimizer states, which shrinks with the number of groups; small data sets, for
which a large model would overfit.
Does not help: time: all layers are still computed. At equal size of the hidden states the result is worse than that of
the unshared model.
Limits: a pretrained model loses what its later layers knew: they start as copies of the first of their group. The model
is saved with a copy of the shared weights for each layer, so that it loads as the plain architecture, in its full size.
Source: Lan et al., "ALBERT: A Lite BERT for Self-supervised Learning of Language Representations", ICLR 2020.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from thrifty.architecture import main_blocks
from thrifty.errors import NotApplicable
from thrifty.method import Method, Paper, register

Share = Literal["all", "attention", "feed_forward"]
_ATTENTION = re.compile(r"attn|attention")


def group_of(layer: int, layers: int, groups: int) -> int:
    """The group to which a layer belongs: neighbours, in groups whose sizes differ by one at most.

    >>> [group_of(i, 5, 2) for i in range(5)]
    [0, 0, 0, 1, 1]
    """
    return layer * groups // layers


def share_weights(model: nn.Module, *, groups: int = 1, share: Share = "all") -> dict[str, str]:
    """Ties the weights of the model's layers in place, for one's own loop; build the optimizer afterwards.

    `model.state_dict()` still has an entry of its own for each layer.

    Args:
        model: A model with a stack of equal layers.
        groups: Groups of neighbouring layers.
        share: Which weights: all of a layer, those of its attention, or the others.

    Returns:
        For each weight that was given up, by name, the one that is used in its place.

    Raises:
        NotApplicable: There is no stack of layers, the layers differ, or there are fewer layers than groups.
    """
    blocks = main_blocks(model, "weight-sharing")
    count = len(blocks)
    if groups >= count:
        raise NotApplicable(
            f"weight-sharing: there are {count} layers, and {groups} groups of them share nothing",
            key="methods.weight-sharing.groups",
            value=groups,
            fix=f"set it to at most {count - 1}",
        )
    tied: dict[str, str] = {}
    leaders: dict[int, tuple[int, nn.Module]] = {}
    for index, layer in enumerate(blocks):
        first, leader = leaders.setdefault(group_of(index, count, groups), (index, layer))
        if leader is layer:
            continue
        shared = dict(leader.named_parameters())
        for name, p in list(layer.named_parameters()):
            if share != "all" and (_ATTENTION.search(name) is not None) != (share == "attention"):
                continue
            if name not in shared or shared[name].shape != p.shape:
                raise NotApplicable(
                    f"weight-sharing: layers {first} and {index} of {type(model).__name__} differ in {name}",
                    fix="choose more groups, or remove weight-sharing from the methods",
                )
            _put(layer, name, shared[name])
            tied[f"{blocks.prefix}.{index}.{name}"] = f"{blocks.prefix}.{first}.{name}"
    if not tied:
        raise NotApplicable(f"weight-sharing: the layers have no weights of the kind {share}", fix="use share: all")
    model.register_state_dict_post_hook(_Copies(set(tied)))
    return tied


def separate(model: nn.Module, tied: dict[str, str]) -> None:
    """Gives each layer a copy of the weights that it shares, so that the model is the plain architecture again."""
    present = dict(model.named_parameters(remove_duplicate=False))
    for name in tied.keys() & present.keys():  # other surgery may have removed some since, such as normalisations
        p = present[name]
        _put(model, name, nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad))
    for key, hook in list(model._state_dict_hooks.items()):
        if isinstance(hook, _Copies):
            del model._state_dict_hooks[key]


class _Copies:
    """Gives a state dict tensors of its own for shared weights: libraries leave out, or refuse, what is there twice."""

    _from_public_api = True  # what torch notes on a hook of this kind

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def __call__(self, module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        for name in self.names:
            if prefix + name in state:
                state[prefix + name] = state[prefix + name].to("cpu", copy=True)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, parameter)


@register(
    "weight-sharing",
    title="Weight sharing across layers",
    section="sharing",
    sources=[Paper("Lan et al.", 2020, "arXiv:1909.11942")],
    exact=False,
    claims=("sharing",),
    conflicts_with={
        "section:growth": "it gives the model other layers, which would have to be shared again",
        "section:sparsity": "each layer would have a mask of its own for the same weights",
        "section:overparameterization": "each layer would expand the same weights",
        "section:peft": "the adapters of all layers would be merged into the same weights",
        "section:moe": "the experts of a layer are made from weights of its own",
    },
    # What is folded into the weights of a layer must find weights of its own there.
    runs_before=("section:initialization",),
    choices={"allow": [{}]},
    bench_order=80,
)
@dataclass(kw_only=True)
class WeightSharing(Method):
    """Groups of layers with the same weights."""

    groups: int = 1
    """Groups of neighbouring layers; 1 shares one set of weights among all."""
    share: Share = "all"
    """What is shared: all weights of a layer, those of its attention, or all others."""

    tied: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"groups must be at least 1, got {self.groups}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.tied = share_weights(model, groups=self.groups, share=self.share)
        return model

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        present = dict(model.named_parameters(remove_duplicate=False))
        if any(present[name] is not present.get(self.tied[name]) for name in self.tied.keys() & present.keys()):
            raise NotApplicable("weight-sharing: another method gave the model other layers", fix="remove one of them")

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        separate(model, self.tied)
        return model

    def facts(self) -> dict[str, Any]:
        return {"weights shared": len(self.tied)} if self.tied else {}
