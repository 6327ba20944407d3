"""Mixin: the parent's loop without its idle work. Every result stays bit for bit the parent's.

What `transformers.Trainer` and accelerate do again in each step although the answer cannot have changed: they walk all
modules for the parameters (to clip) and once more to count them (for the FLOPs), look on the disk for an optimizer
package, and multiply every gradient by one where nothing is to be clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

from thrifty import _hf

_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class LeanLoop(transformers.Trainer):
    """Does once what need not be done in every step."""

    _counted: tuple[nn.Module, int] | None = None
    _walked: tuple[nn.Module, list[nn.Parameter] | None] | None = None

    def look_again(self) -> None:
        """The model, what it consists of, or its optimizer is another one."""
        self._counted = self._walked = None
        _hf.shorten_step(self.optimizer)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.look_again()  # each preparation of a model and its optimizer ends with this call
        return super().create_scheduler(num_training_steps, optimizer)

    # --- FLOPs ---

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As the parent's, which counts the model's parameters anew for every micro-batch."""
        model: Any = self.model
        main = inputs.get(getattr(model, "main_input_name", "input_ids")) if isinstance(inputs, Mapping) else None
        own = getattr(type(model), "floating_point_ops", None)
        linear = own is None or own is getattr(PreTrainedModel, "floating_point_ops", None)
        if not isinstance(main, torch.Tensor) or main.numel() == 0 or not linear:
            return super().floating_point_ops(inputs)
        if self._counted is None or self._counted[0] is not model:
            self._counted = model, super().floating_point_ops(inputs) // main.numel()
        return self._counted[1] * main.numel()

    # --- clipping ---

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        parameters = self._whole_parameters(model)
        return super()._clip_grad_norm(model) if parameters is None else self._clip(parameters, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        parameters = self._whole_parameters(model) if grad_norm is None else None
        return super()._get_grad_norm(model, grad_norm if parameters is None else self._clip(parameters, None))

    def _clip(self, parameters: list[nn.Parameter], limit: float | None) -> torch.Tensor:
        """The norm of all gradients; where it is above the limit, they are scaled down to it."""
        self.accelerator.unscale_gradients()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        # On a device, looking would wait for it. Close to the limit, torch's own arithmetic decides.
        if limit is not None and not (norm.device.type == "cpu" and float(norm) < 0.999 * limit):
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def _whole_parameters(self, model: nn.Module) -> list[nn.Parameter] | None:
        """The parameters, or None where their gradients are spread over processes."""
        if self._walked is None or self._walked[0] is not model:
            parameters = list(model.parameters())
            accelerator: Any = self.accelerator
            whole = (
                accelerator.distributed_type in _WHOLE
                and getattr(accelerator, "parallelism_config", None) is None
                and not any(hasattr(p, "full_tensor") for p in parameters)
            )
            self._walked = model, parameters if whole else None
        return self._walked[1]
