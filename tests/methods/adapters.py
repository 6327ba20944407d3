"""What the tests of adapters share: training on a saved base model, and loading what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

import tiny
from methods import loops

AUTO: dict[str, Any] = {
    "llama": AutoModelForCausalLM,
    "gpt2": AutoModelForCausalLM,
    "bert": AutoModelForMaskedLM,
    "vit": AutoModelForImageClassification,
}


def logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs).logits


def check_same(first: nn.Module, second: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(logits(first, inputs), logits(second, inputs), rtol=1e-4, atol=2e-5)


def scramble(model: nn.Module, scale: float = 0.1) -> None:
    """Gives everything that is trained other values, as training would."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * scale)


def trained(folder: Path, method: dict[str, Any], family: str, *, resume: bool = True, **overrides: Any) -> Any:
    """Trains the method on a base model that lies in `folder/base`, and saves it to `folder/saved`.

    Checks that it resumes bit for bit, unless `resume` is false.
    """
    build = tiny.FAMILIES[family]
    build().save_pretrained(folder / "base")  # type: ignore[operator]
    overrides = {"learning_rate": 0.05, **overrides}
    if resume:
        run = loops.resumes(folder, [method], build, **overrides)
    else:
        run = tiny.trainer(folder / "run", [method], build(), **{"max_steps": 3, **overrides})
        run.train()
    run.save_model(str(folder / "saved"))
    assert not torch.equal(logits(run.model, loops.batch(build())), logits(build(), loops.batch(build())))
    return run


def check_adapter(folder: Path, run: Any, family: str, where: str = "saved") -> None:
    """Plain peft puts the saved adapter on the original base model and gives the logits of the run."""
    inputs = loops.batch(tiny.FAMILIES[family]())
    base = AUTO[family].from_pretrained(folder / "base")
    loaded = PeftModel.from_pretrained(base, str(folder / where))
    check_same(loaded, run.model, inputs)
    if where == "saved":
        assert not (folder / where / "model.safetensors").exists()


def check_plain_and_adapter(folder: Path, run: Any, family: str) -> None:
    """The merged weights load as any other model, and the adapter beside them gives the same on the base."""
    inputs = loops.batch(tiny.FAMILIES[family]())
    loaded = AUTO[family].from_pretrained(folder / "saved")
    check_same(loaded, run.model, inputs)
    check_adapter(folder, run, family, "saved/adapter")
