"""RHO-loss: which samples are taken, against what, and that the held-out ones are not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from methods import loops
from thrifty import InputError, Recipe, scores, tasks
from thrifty.methods.selection._scoring import sample_ids
from thrifty.methods.selection.rho_loss import most_reducible

PRESET = {"ratio": 0.5, "side_steps": 2}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))


def test_constant_irreducible_losses_are_top_loss_selection():
    losses = torch.rand(20, generator=torch.Generator().manual_seed(0))
    assert most_reducible(losses, torch.full((20,), 3.0), 5) == sorted(losses.topk(5).indices.tolist())


def test_ties_are_broken_by_order():
    losses = torch.rand(6)
    assert most_reducible(losses, losses, 3) == [0, 1, 2]


def test_noise_is_not_chosen():
    """A wrong label has a high loss under both models; what is learnable and new has one under the present only."""
    losses, irreducible = torch.tensor([4.0, 4.1, 0.1, 2.0]), torch.tensor([0.5, 4.05, 0.1, 1.5])
    assert most_reducible(losses, irreducible, 1) == [0]
    assert most_reducible(losses, irreducible, 2) == [0, 3]


@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
def test_holds_out_scores_and_resumes(tmp_path, family):
    run = loops.resumes(tmp_path, [{"rho-loss": PRESET}], tiny.FAMILIES[family], max_steps=4)
    method: Any = run.recipe["rho-loss"]
    kept = sample_ids(run.train_dataset)
    assert len(kept) == 24 - round(0.2 * 24)
    assert method.found.ids.tolist() == kept
    assert (method.scored, method.trained) == (4 * 4, 4 * 2)
    assert len(scores.stored()) == 1


def test_the_largest_excess_of_the_draw_is_trained_on(tmp_path):
    """Against losses by hand, over draws of several micro-batches."""
    run = tiny.trainer(tmp_path, [{"rho-loss": {"ratio": 0.34, "side_steps": 1}}], tiny.bert(), max_steps=2)
    method: Any = run.recipe["rho-loss"]
    samples = [run.train_dataset[i] for i in range(8)]
    drawn = iter([tiny.collate_text(samples[i : i + 2]) for i in range(0, 8, 2)])
    (batch,) = method.draw(lambda: next(drawn), 1, run.ctx)
    losses = []
    model = run.model.eval()
    for sample in samples[:6]:
        one = tiny.collate_text([sample])
        del one["sample_id"]
        with torch.no_grad():
            losses.append(tasks.infer(model).per_sample_loss(model, one).item())
    excess = np.array(losses) - method.found.of([s["sample_id"] for s in samples[:6]])
    expected = sorted(np.argsort(-excess)[:2].tolist())
    assert batch["sample_id"].tolist() == [samples[i]["sample_id"] for i in expected]


def test_ratio_one_is_the_baseline_on_the_same_data(tmp_path):
    first = tiny.trainer(tmp_path / "a", [{"rho-loss": {"ratio": 1.0, "side_steps": 1}}], tiny.llama(dropout=0.1))
    first.train()
    samples = [first.train_dataset[i] for i in range(len(first.train_dataset))]
    plain = tiny.trainer(tmp_path / "b", [], tiny.llama(dropout=0.1), samples=samples)
    plain.train()
    assert tiny.losses(first) == tiny.losses(plain)
    tiny.assert_same(tiny.weights(first.model), tiny.weights(plain.model))


def test_given_scores_need_no_holdout(tmp_path):
    path = tmp_path / "il.parquet"
    scores.Scores(np.arange(24), np.linspace(0, 1, 24)).save(path)
    run = tiny.trainer(tmp_path / "run", [{"rho-loss": {"scores": str(path), "ratio": 0.5}}], max_steps=2)
    run.train()
    assert len(run.train_dataset) == 24
    assert not scores.stored()


def test_other_irreducible_losses_do_not_resume(tmp_path):
    first = tiny.trainer(tmp_path / "a", [{"rho-loss": PRESET}], max_steps=2, save_strategy="steps", save_steps=1)
    first.train()
    other = tiny.trainer(tmp_path / "b", [{"rho-loss": {**PRESET, "side_steps": 3}}], max_steps=2)
    with pytest.raises(InputError, match="other irreducible losses"):
        other.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))


@pytest.mark.parametrize("setting", [{"ratio": 0.0}, {"holdout_ratio": 1.0}, {"side_steps": 0}])
def test_bad_settings(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Recipe.parse([{"rho-loss": setting}])
