"""What the verbs do: a run from its configuration to its folder, the evaluation of a model, and a generated text."""

from __future__ import annotations

from thrifty.run.evaluation import evaluate
from thrifty.run.generation import generate
from thrifty.run.training import RunResult, train

__all__ = ["RunResult", "evaluate", "generate", "train"]
