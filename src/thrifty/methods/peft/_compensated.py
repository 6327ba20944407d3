"""Adapters that do not start at zero: the base weight gives up what the adapter holds, so that the function stays.

The finished adapter is the difference to the start, a plain LoRA of twice the rank that fits the original base model:
s (B A - B0 A0) = s [B, -B0] [A; A0].
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from thrifty.errors import NotApplicable
from thrifty.methods.peft._adapters import LoraFamily, lora_layers

ADAPTER = "default"
Factors = dict[str, dict[str, Tensor]]


def factors(model: nn.Module) -> Factors:
    """Copies of the adapters' matrices: {layer: {"A": (r, in), "B": (out, r)}}."""
    return {
        name: {
            "A": layer.lora_A[ADAPTER].weight.detach().clone(),
            "B": layer.lora_B[ADAPTER].weight.detach().clone(),
        }
        for name, layer in lora_layers(model).items()
    }


def dense_weight(layer: Any) -> Tensor:
    """The frozen weight of a LoRA layer in float32, as (out, in)."""
    weight = layer.get_base_layer().weight.detach().float()
    return weight.T if layer.fan_in_fan_out else weight


@torch.no_grad()
def shift_base(layer: Any, a: Tensor, b: Tensor, sign: float) -> None:
    """Adds `sign` * scale * B A to the frozen weight; computed in float32, rounded once."""
    change = sign * layer.scaling[ADAPTER] * (b.float() @ a.float())
    weight = layer.get_base_layer().weight
    weight.copy_(weight.float() + (change.T if layer.fan_in_fan_out else change))


@torch.no_grad()
def start_from(layer: Any, a: Tensor, b: Tensor) -> None:
    """Starts an adapter at `a` (r, in) and `b` (out, r), and takes their product out of the frozen weight."""
    layer.lora_A[ADAPTER].weight.copy_(a)
    layer.lora_B[ADAPTER].weight.copy_(b)
    shift_base(layer, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, -1.0)


def difference(model: PeftModel, start: Factors) -> tuple[Any, dict[str, Tensor]]:
    """The adapter that, put on the original base model, gives the present one: its configuration and its weights."""
    config: Any = copy.deepcopy(model.peft_config[ADAPTER])
    config.init_lora_weights = True
    # alpha / r stays when both double; alpha / sqrt(r) does not.
    config.r, config.lora_alpha = 2 * config.r, 2 * config.lora_alpha
    if config.use_rslora:
        config.lora_alpha = config.lora_alpha / 2**0.5
    now, state = factors(model), {}
    for name, tensor in get_peft_model_state_dict(model).items():
        layer, _, leaf = name.partition(".lora_")
        if not leaf:
            state[name] = tensor.detach().cpu().clone()
        elif leaf.startswith("A"):
            state[name] = torch.cat([now[layer]["A"], start[layer]["A"].to(tensor)]).cpu()
        else:
            state[name] = torch.cat([now[layer]["B"], -start[layer]["B"].to(tensor)], dim=1).cpu()
    return config, state


@torch.no_grad()
def on_original_base(model: PeftModel, start: Factors) -> PeftModel:
    """The same function as a plain LoRA on the original base model (to rounding)."""
    config, state = difference(model, start)
    for name, layer in lora_layers(model).items():
        shift_base(layer, start[name]["A"], start[name]["B"], 1.0)
    plain: Any = get_peft_model(model.unload(), config)  # type: ignore[operator]
    set_peft_model_state_dict(plain, state)
    return plain


@dataclass(kw_only=True)
class CompensatedLora(LoraFamily):
    """LoRA whose start is taken out of the base model."""

    _start: Factors = field(default_factory=dict, init=False, repr=False)

    def start(self, layers: dict[str, LoraLayer], model: PeftModel, ctx: Any) -> None:
        """Gives the adapters their start and compensates it in the base."""
        raise NotImplementedError

    def vectors_needed(self) -> int:
        """How many singular vectors a weight must have for this start."""
        return self.r

    def _add(self, model: nn.Module, ctx: Any) -> PeftModel:
        adapted = super()._add(model, ctx)
        layers = {name: layer.get_base_layer() for name, layer in lora_layers(adapted).items()}
        others = [name for name, base in layers.items() if not hasattr(base, "weight")]
        if others:
            linear = sorted({name.rpartition(".")[2] for name in layers if name not in others})
            raise NotApplicable(
                f"{self.name}: decomposes the weight of a linear layer, and {others[0].removeprefix('base_model.')} "
                f"({type(layers[others[0]]).__name__}) is none: the experts of a mixture are one tensor, for example",
                key=f"methods.{self.name}.target_modules",
                value=self.target_modules,
                fix=f"name the linear ones: {linear}; or use lora for all",
            )
        return adapted

    def initialise(self, model: PeftModel, ctx: Any) -> None:
        layers = {
            name: layer
            for name, layer in lora_layers(model).items()
            if min(dense_weight(layer).shape) >= self.vectors_needed()
        }
        if not layers:
            raise NotApplicable(
                f"{self.name}: needs {self.vectors_needed()} singular vectors of each weight, and no layer has as many",
                key=f"methods.{self.name}.r",
                value=self.r,
                fix="a smaller r",
            )
        # The others (a small classification head) start as in LoRA.
        self.start(layers, model, ctx)
        self._start = factors(model)

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        assert isinstance(model, PeftModel)
        start = {name: {k: v.to(ctx.device) for k, v in pair.items()} for name, pair in self._start.items()}
        if not self.merge:
            return on_original_base(model, start)
        self._adapter = difference(model, start)
        return model.merge_and_unload()  # type: ignore[operator]

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state["start"]

    def restore_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        # Another machine may have found other vectors: then the base has to give up what the saved run took.
        for name, layer in lora_layers(model).items():
            ours, saved = self._start[name], self._saved[name]
            if not (torch.equal(ours["A"].cpu(), saved["A"]) and torch.equal(ours["B"].cpu(), saved["B"])):
                shift_base(layer, ours["A"].to(ctx.device), ours["B"].to(ctx.device), 1.0)
                shift_base(layer, saved["A"].to(ctx.device), saved["B"].to(ctx.device), -1.0)
        self._start = self._saved
        return model
