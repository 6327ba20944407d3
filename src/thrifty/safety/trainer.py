"""The guards, plugged into `transformers.Trainer`."""

from __future__ import annotations

import os
from typing import Any

import transformers
from torch import nn


class SafeTrainer(transformers.Trainer):
    """Mixin: checkpoints with the methods' state, sample ids kept out of the model."""

    sample_ids: Any = None

    def write_extra_state(self, folder: str) -> None:
        """What a subclass adds to a checkpoint."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.write_extra_state(os.path.join(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}"))

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.sample_ids = inputs.pop("sample_id", None)
        return super()._prepare_inputs(inputs)
