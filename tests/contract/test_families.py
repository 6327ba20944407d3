"""Every method on every family of models that its tasks allow: it trains and resumes, or says why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from thrifty.errors import InputError
from thrifty.method import NotApplicable, registry

# Family: its task and its smallest model.
FAMILIES: dict[str, tuple[str, Any]] = {
    "llama": ("causal-lm", tiny.llama),
    "gpt2": ("causal-lm", tiny.gpt2),
    "mixtral": ("causal-lm", tiny.mixtral),
    "bert": ("masked-lm", tiny.bert),
    "bert-classifier": ("text-classification", tiny.bert_classifier),
    "vit": ("image-classification", tiny.vit),
    "vitmae": ("masked-image-modeling", tiny.vitmae),
    "clip": ("image-text", tiny.clip),
    "t5": ("seq2seq-lm", tiny.t5),
}
STEPS, KEPT = 4, 2


def families_of(name: str) -> list[str]:
    tasks = registry.get(name).spec.tasks
    return [family for family, (task, _) in FAMILIES.items() if not tasks or task in tasks]


def model_of(family: str) -> Any:
    build = FAMILIES[family][1]
    return build() if family == "vit" else build(dropout=0.1)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "family"), [(n, f) for n in registry.names() for f in families_of(n)])
def test_every_method_on_every_family(tmp_path, name, family):
    methods = [{name: dict(registry.get(name).spec.preset)}]
    try:
        run = tiny.trainer(tmp_path, methods, model_of(family), max_steps=STEPS, save_strategy="steps", save_steps=KEPT)
    except (NotApplicable, InputError) as refusal:
        if "Fix:" not in str(refusal):
            pytest.fail(f"a refusal says what to do instead: {refusal}")
        pytest.skip(f"refused: {refusal}")
    run.train()
    losses = tiny.losses(run)
    assert len(losses) >= KEPT
    assert all(torch.isfinite(torch.tensor(losses)))
    again = tiny.trainer(tmp_path / "again", methods, model_of(family), max_steps=STEPS)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{KEPT}"))
    tiny.assert_same(tiny.weights(again.model), tiny.weights(run.model))
