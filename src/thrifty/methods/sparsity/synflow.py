"""SynFlow (iterative synaptic flow pruning).

What it does: without any data, keeps the connections that carry the most flow when every weight is replaced by its
absolute value and a signal of ones runs through the blocks. It prunes in many small steps and scores the pruned network
anew each time, so that no layer vanishes; then the rest is trained as a fixed sparse network.

Helps: extreme sparsity, where one-shot scores (SNIP, GraSP) empty whole layers; and where no data is at hand.
Does not help: speed or memory on dense hardware: zeros are multiplied like other numbers. Scores do not see the task.
Limits: a Transformer is not the linear network of the theorem, so the flow runs through a linear stand-in: the chain of
its branches without skips, norms, activations and biases; gated products become sums, and attention passes on the sum
of its queries, keys and values. Models whose stand-in does not conserve the flow are refused. Scoring takes a copy of
the weights in float64.
Source: Tanaka et al., "Pruning neural networks without any data by iteratively conserving synaptic flow", NeurIPS 2020.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from thrifty.architecture import LINEAR, branch_outputs, main_blocks
from thrifty.method import NotApplicable, Paper, register
from thrifty.methods.sparsity._masks import MaskedMethod, MaskedWeights, block_weights, check_sparsity, keep_best

ATTENTION = "thrifty_synflow"
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


def flow_scores(weights: Mapping[str, Tensor], flow: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The synaptic saliencies (dR/dw) * w.

    Args:
        weights: Non-negative, in float64, requiring gradients.
        flow: Computes R, the sum of the outputs for an input of ones, with these weights.
    """
    gradients = torch.autograd.grad(flow(), list(weights.values()), allow_unused=True)
    return {
        name: torch.zeros_like(w) if g is None else (g * w).detach()
        for (name, w), g in zip(weights.items(), gradients, strict=True)
    }


def synflow_masks(
    weights: Mapping[str, Tensor], flow: Callable[[], Tensor], sparsity: float, iterations: int = 100
) -> dict[str, Tensor]:
    """Prunes from density 1 to (1 - sparsity) in steps of equal ratio; density (1 - sparsity)^(k / n) after step k.

    Args:
        weights: As for `flow_scores`; overwritten by their masked selves.
        flow: As for `flow_scores`.
        sparsity: Share of zeros over all weights.
        iterations: How many steps.

    Raises:
        NotApplicable: No flow reaches a weight, or the flow is not finite.
    """
    size = sum(w.numel() for w in weights.values())
    masks = {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights.items()}
    for k in range(1, iterations + 1):
        scores = flow_scores(weights, flow)
        if not all(torch.isfinite(score).all() for score in scores.values()):
            raise NotApplicable(
                "synflow: the flow is not finite", fix="use snip or grasp for this model, or less sparsity"
            )
        dry = [name for name, score in scores.items() if k == 1 and not score.any()]
        if dry:
            raise NotApplicable(f"synflow: no flow reaches {dry[0]}", fix="use snip or grasp for this model")
        left = {name: torch.where(masks[name], score, -1.0) for name, score in scores.items()}
        masks = keep_best(left, round(size * (1 - sparsity) ** (k / iterations)))
        with torch.no_grad():
            for name, w in weights.items():
                w.mul_(masks[name])
    return masks


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    groups = query.shape[1] // key.shape[1]
    passed = query + key.repeat_interleave(groups, 1) + value.repeat_interleave(groups, 1)
    return passed.transpose(1, 2).contiguous(), None


class Flow:
    """The linear stand-in of a Hugging Face model's blocks: a copy in float64 with absolute weights.

    Args:
        model: Untouched.

    Raises:
        NotApplicable: The stand-in could not be made linear.
    """

    def __init__(self, model: nn.Module) -> None:
        towers = [name for name in ("text_config", "vision_config") if hasattr(model.config, name)]
        if len(towers) > 1:
            raise NotApplicable(
                f"synflow runs one chain of blocks, and {type(model).__name__} has a text and a vision side",
                fix="use snip or grasp, which score on training batches",
            )
        AttentionInterface.register(ATTENTION, _attention)
        self.model: Any = copy.deepcopy(model).double().eval()
        self.model.config.use_cache = False
        self.model.set_attn_implementation(ATTENTION)
        self.blocks = list(main_blocks(self.model, "synflow"))
        for block in self.blocks:
            _make_linear(block)
        with torch.no_grad():
            for p in self.model.parameters():
                p.abs_()
        self.weights = block_weights(self.model, "synflow")
        self._inputs = _dummy_inputs(self.model)
        self._out: Tensor | None = None
        self.blocks[0].register_forward_pre_hook(_ones, with_kwargs=True)
        self.blocks[-1].register_forward_hook(self._leave)
        self._check(type(model).__name__)

    def __call__(self) -> Tensor:
        """R: the sum of what the last block gives out for an input of ones."""
        self.model(**self._inputs)
        assert self._out is not None
        out, self._out = self._out, None
        return out.sum()

    def _check(self, kind: str) -> None:
        """In a linear chain the scores of each stage sum to R: a block's inner layers, and each branch's last one."""
        scores = {name: float(score.sum()) for name, score in flow_scores(self.weights, self).items()}
        flow = float(self().detach())
        prefix = main_blocks(self.model, "synflow").prefix
        for index, block in enumerate(self.blocks):
            own = {name: v for name, v in scores.items() if name.startswith(f"{prefix}.{index}.")}
            ends = [own.get(f"{prefix}.{index}.{name}.weight") for name in branch_outputs(block, "synflow")]
            sums = [*(value for value in ends if value is not None), sum(own.values()) / 4]
            if len(sums) < 3 or any(not abs(value - flow) <= 1e-6 * flow for value in sums):
                raise NotApplicable(
                    f"synflow: the flow through the blocks of {kind} is not that of a linear chain, even without "
                    "norms, activations and attention weights, or not all of their layers are trained",
                    fix="use snip or grasp, which score the model as it is",
                )

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._out = output[0] if isinstance(output, tuple) else output


def _ones(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (torch.ones_like(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": torch.ones_like(kwargs["hidden_states"])}


def _make_linear(block: nn.Module) -> None:
    ends = branch_outputs(block, "synflow")
    entered: list[Tensor] = []  # what the skip beside the branch at work carries

    def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not entered:
            entered.append(inputs[0])

    def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # Takes away what the skip will add. Dividing by a constant scales all scores alike and prevents overflow.
        return output / output.detach().mean() - entered.pop()

    for name, module in list(block.named_modules()):
        parent = block.get_submodule(name.rpartition(".")[0])
        if "norm" in type(module).__name__.lower() or type(module).__module__ in _ACTIVATIONS:
            setattr(parent, name.rpartition(".")[2], nn.Identity())
        elif isinstance(module, LINEAR):
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            if name in ends:
                module.register_forward_hook(leave)
            else:
                module.register_forward_pre_hook(enter)
        elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
            gated: Any = module
            gated.forward = lambda x, m=gated: m.down_proj(m.gate_proj(x) + m.up_proj(x))


def _dummy_inputs(model: Any) -> dict[str, Tensor]:
    """The smallest input: one token or one image. Its values do not matter, the flow starts behind the embeddings."""
    config, device = model.config, next(model.parameters()).device
    if model.main_input_name == "input_ids" and not config.is_encoder_decoder:
        return {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=device)}
    if model.main_input_name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = (1, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.zeros(shape, dtype=torch.float64, device=device)}
    raise NotApplicable(
        f"synflow runs one token or one image through the model, and {type(model).__name__} takes something else",
        fix="use snip or grasp, which score on training batches",
    )


@register(
    "synflow",
    title="SynFlow",
    section="sparsity",
    sources=[Paper("Tanaka et al.", 2020, "arXiv:2006.05467")],
    exact=False,
    claims=("mask",),
    conflicts_with={"deepnorm": "its blocks are not a linear chain without their norms, through which the skip goes"},
    preset={"sparsity": 0.5, "iterations": 5},
)
@dataclass(kw_only=True)
class Synflow(MaskedMethod):
    """Prunes before training by the flow through the network, without data."""

    sparsity: float = 0.8
    """Share of zeros over the blocks' linear weights."""
    iterations: int = 100
    """Pruning steps."""

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}")

    def choose(self, model: nn.Module, parameters: dict[str, nn.Parameter], ctx: Any) -> MaskedWeights:
        flow = Flow(model.to(ctx.device))
        return MaskedWeights(parameters, synflow_masks(flow.weights, flow, self.sparsity, self.iterations))
