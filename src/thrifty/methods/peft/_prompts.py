"""What prompt and prefix tuning have in common: virtual tokens that cannot be merged into the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft import PeftModel, get_peft_model
from torch import nn

from thrifty.method import Method, NotApplicable
from thrifty.methods.peft._adapters import TASK_TYPES, refuse_adapters, task_name


@dataclass(kw_only=True)
class VirtualTokens(Method):
    """Trains virtual tokens in front of the text."""

    tokens: int = 20
    """Number of virtual tokens."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")

    def peft_config(self, model: nn.Module, task_type: str) -> Any:
        """The configuration that peft makes the tokens from."""
        raise NotImplementedError

    def prepare_model(self, model: nn.Module, ctx: Any) -> PeftModel:
        refuse_adapters(model, self.name)
        name = task_name(model, ctx)
        if name not in TASK_TYPES:
            raise NotApplicable(
                f"{self.name}: peft puts virtual tokens in front of {', '.join(TASK_TYPES)} models only, not of "
                f"{type(model).__name__}",
                key="task",
                value=name or None,
                fix="lora or ia3; visual-prompt for images",
            )
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and self.tokens >= limit:
            raise NotApplicable(
                f"{self.name}: the model has {limit} positions",
                key=f"methods.{self.name}.tokens",
                value=self.tokens,
                fix="fewer tokens",
            )
        return get_peft_model(model, self.peft_config(model, TASK_TYPES[name]))  # type: ignore[arg-type, return-value]
