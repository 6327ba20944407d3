"""`SafeTrainer`: `transformers.Trainer` with the guards, and nothing else."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from thrifty.safety.options import Guards
from thrifty.safety.running import GuardEvents, SafeRunning


class SafeTrainer(SafeRunning):
    """A `transformers.Trainer` whose runs can be trusted.

    Args:
        guards: Which guards are on; all, by default. `False` switches all of them off.
        *args: As for `transformers.Trainer`.
        **kwargs: As for `transformers.Trainer`.
    """

    def __init__(self, *args: Any, guards: Guards | bool = True, **kwargs: Any) -> None:
        self.guards = guards if isinstance(guards, Guards) else (Guards() if guards else Guards.off())
        self.sample_ids = []
        super().__init__(*args, **kwargs)
        for callback in self.events_before_guards():
            self.add_callback(callback)
        self.add_callback(GuardEvents(self))

    def events_before_guards(self) -> list[TrainerCallback]:
        """Callbacks of a subclass that the guards must see the effect of."""
        return []
