"""What the methods share that train a smaller model first and grow it once, in width and depth."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty import _hf
from thrifty.architecture import main_blocks
from thrifty.method import Method, NotApplicable, Phase
from thrifty.methods.growth._width import check_maps, growing_axes, unit_maps

# {new parameter: old parameter whose optimizer state it inherits, or None}, as `trainer.replace_model` takes it.
ParameterMap = dict[str, str | None]

REBUILT = "the grown model is built anew, without what was done to the small one"
CONFLICTS = {f"section:{s}": REBUILT for s in ("peft", "initialization", "sparsity", "overparameterization", "moe")}
BEFORE = ("layer-drop", "stochastic-depth")


def build(like: Any, config: Any) -> Any:
    """An untrained model of the same class, data type and mode with another configuration."""
    new = type(like)(copy.deepcopy(config)).to(next(like.parameters()).dtype)
    return new.train(like.training)


def old_name(name: str, prefix: str, source: Callable[[int], int]) -> str:
    """The name of a parameter in the old model, where block `i` comes from block `source(i)`."""
    if not name.startswith(f"{prefix}."):
        return name
    index, _, rest = name[len(prefix) + 1 :].partition(".")
    return f"{prefix}.{source(int(index))}.{rest}"


@torch.no_grad()
def fill(
    small: nn.Module, full: nn.Module, who: str, source: Callable[[int], int], value: Callable[[str, str], Tensor]
) -> ParameterMap:
    """Writes the parameters of a grown model.

    Args:
        small: The old model.
        full: The new one; its persistent buffers are copied where they have the same shape.
        who: For messages.
        source: From which old block each new one comes.
        value: From (new name, old name) the new parameter.

    Returns:
        New to old names; None where the shape has changed, so that the old optimizer state does not fit.
    """
    prefix = main_blocks(full, who).prefix
    old = dict(small.named_parameters())
    mapping: ParameterMap = {}
    for name, p in full.named_parameters():
        origin = old_name(name, prefix, source)
        p.copy_(value(name, origin))
        mapping[name] = origin if old[origin].shape == p.shape else None
    buffers = dict(small.named_buffers())
    for name, buffer in full.named_buffers():
        origin = buffers.get(old_name(name, prefix, source))
        if origin is not None and origin.shape == buffer.shape:
            buffer.copy_(origin)
    return mapping


@dataclass(kw_only=True)
class GrowOnce(Method):
    """Trains a smaller model until a point of the run, then the full one. Subclasses say how it grows."""

    width: float = 0.5
    """Share of hidden size, heads and feed-forward units at the start; 1 keeps the width."""
    start_layers: int | None = None
    """Blocks at the start; None is half of the full depth."""
    at: float = 0.3
    """Share of the run after which the model grows."""

    grown: bool = field(default=False, init=False, repr=False)
    first: int = field(default=0, init=False, repr=False)
    full_config: Any = field(default=None, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.width <= 1:
            raise ValueError(f"width must be above 0 and at most 1, got {self.width}")
        if self.start_layers is not None and self.start_layers < 1:
            raise ValueError(f"start_layers must be at least 1, got {self.start_layers}")
        if not 0 < self.at < 1:
            raise ValueError(f"at must lie between 0 and 1, got {self.at}")

    def small_config(self, config: Any) -> Any:
        """The configuration of the model that is trained first. Raises `NotApplicable` where it cannot be made."""
        raise NotImplementedError

    def grow(self, small: Any, full: Any, ctx: Any) -> ParameterMap:
        """Writes the weights of the full model from the small one's."""
        raise NotImplementedError

    def layers_at_start(self, depth: int) -> int:
        """Blocks of the first model."""
        return self.start_layers or max(1, depth // 2)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.ctx = ctx
        whole: Any = model
        if any(not p.requires_grad for p in model.parameters()):
            raise NotApplicable(f"{self.name}: growth trains all weights, and some are frozen", fix="unfreeze them")
        depth = len(main_blocks(model, self.name))
        sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads")
        # An encoder-decoder has two of each, of which the configuration's common names give one.
        if getattr(whole.config, "is_encoder_decoder", False) or not all(hasattr(whole.config, k) for k in sizes):
            raise NotApplicable(
                f"{self.name}: {type(model).__name__} has no single hidden size and number of blocks to grow",
                fix="use a model with one stack of blocks (Llama, GPT-2, BERT, ViT, ...)",
            )
        layers = self.layers_at_start(depth)
        if layers > depth or (layers == depth and self.width == 1):
            raise NotApplicable(
                f"{self.name}: the model has {depth} blocks, so there is nothing to grow",
                key=f"methods.{self.name}.start_layers",
                value=layers,
                fix=f"set it below {depth}, or width below 1",
            )
        self.first = max(1, round(self.at * ctx.total_steps))
        if self.first >= ctx.total_steps:
            raise NotApplicable(
                f"{self.name}: the run has {ctx.total_steps} steps, too few to grow",
                key="max_steps",
                fix="train longer",
            )
        self.full_config = copy.deepcopy(whole.config)
        small = build(model, self.small_config(self.full_config))
        # Refuses now what it does not understand.
        check_maps(
            growing_axes(small, model, self.name),
            unit_maps(small.config, whole.config, torch.Generator()),
        )
        return small

    def phases(self, model_config: Any, total_steps: int) -> list[Phase]:
        depth = model_config.num_hidden_layers
        layers = self.layers_at_start(depth)
        first = max(1, round(self.at * total_steps))
        # Products of matrices cost the square of the width: so many full blocks would take as long.
        small = Phase(steps=first, description=f"{layers} layers, {self.width:.0%} width",
                      depth=layers / depth * self.width**2)  # fmt: skip
        return [small, Phase(steps=total_steps - first, description="full model")]

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if self.grown or state.global_step != self.first:
            return
        self.grown = True
        small = _hf.unwrap_container(kw["model"])
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**31, (1,), generator=self.ctx.rng(f"{self.name}/grow"))))
            full = build(small, self.full_config).to(args.device)
            mapping = self.grow(small, full, self.ctx)
        _hf.copy_checkpointing(small, full, args)
        self.ctx.replace_model(full, mapping)

    def state_dict(self) -> dict[str, Any]:
        return {"grown": self.grown, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.grown, self.first = state["grown"], state["first"]

    def restore_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        now: Any = model
        wanted = self.full_config if self.grown else self.small_config(self.full_config)
        same = now.config.hidden_size == wanted.hidden_size and (
            now.config.num_hidden_layers == wanted.num_hidden_layers
        )
        if same:
            return model
        new = build(model, wanted)
        _hf.copy_checkpointing(model, new, ctx.args)
        return new
