"""EL2N, GraNd and prototypes: the scores, what is kept, and that scores stay on disk for other runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.func import functional_call, grad, vmap

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe, scores, tasks
from thrifty.methods.selection._scoring import sample_ids
from thrifty.methods.selection.el2n import el2n, without_hardest
from thrifty.methods.selection.grand import gradient_norms
from thrifty.methods.selection.prototypes import embeddings, kmeans, prototype_distances

PRESETS = {"el2n": {"steps": 1, "runs": 1}, "grand": {"steps": 1, "runs": 1}, "prototypes": {"clusters": 3}}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model_and_batch(build: Any = tiny.vit, size: int = 6) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    model = build().eval()
    samples, collate = tiny.data_of(model)
    batch = collate(samples[:size])
    del batch["sample_id"]
    return tasks.infer(model), model, batch


# --- EL2N ---


@pytest.mark.parametrize("build", [tiny.vit, tiny.bert_classifier])
def test_el2n_is_the_length_of_the_error(build):
    task, model, batch = model_and_batch(build)
    with torch.no_grad():
        logits = model(**batch).logits
    expected = (logits.softmax(-1) - torch.nn.functional.one_hot(batch["labels"], logits.shape[-1])).norm(dim=1)
    found = el2n(task, model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert ((found >= 0) & (found < 2**0.5)).all()


@pytest.mark.parametrize(("build", "shift"), [(tiny.llama, True), (tiny.bert, False)])
def test_el2n_of_tokens_is_the_mean_over_the_targets(build, shift):
    task, model, batch = model_and_batch(build)
    with torch.no_grad():
        logits = model(**batch).logits
    labels = batch["labels"]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    for row, found in enumerate(el2n(task, model, batch)):
        kept = labels[row] != -100
        error = logits[row, kept].softmax(-1) - torch.nn.functional.one_hot(labels[row, kept], logits.shape[-1])
        assert found.item() == pytest.approx(error.norm(dim=1).mean().item(), rel=1e-5)


def test_the_very_hardest_can_be_left_out():
    values = np.array([5.0, 1.0, 4.0, 3.0, 2.0])
    assert without_hardest(values, 2, 0.0).tolist() == [0, 2]
    assert without_hardest(values, 2, 0.2).tolist() == [2, 3]
    assert sorted(without_hardest(values, 4, 0.9).tolist()) == [1, 2, 3, 4], "enough remain"


# --- GraNd ---


def test_grand_of_the_last_bias_is_el2n_and_of_the_last_weight_el2n_times_the_features():
    task, model, batch = model_and_batch(tiny.vit)
    features: list[torch.Tensor] = []
    model.classifier.register_forward_pre_hook(lambda m, inputs: features.append(inputs[0].detach()))
    errors = el2n(task, model, batch)
    torch.testing.assert_close(gradient_norms(task, model, batch, "classifier.bias"), errors, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        gradient_norms(task, model, batch, "classifier.weight"), errors * features[0].norm(dim=1), rtol=1e-5, atol=1e-7
    )


def test_grand_agrees_with_vmap():
    task, model, batch = model_and_batch(tiny.vit)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: Any, pixels: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        out = functional_call(model, values, kwargs={"pixel_values": pixels[None], "labels": label[None]})
        return out.loss

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0), randomness="error")(
        parameters, batch["pixel_values"], batch["labels"]
    )
    expected = torch.stack([g.flatten(1).square().sum(1) for g in per_sample.values()]).sum(0).sqrt()
    torch.testing.assert_close(gradient_norms(task, model, batch), expected, rtol=1e-4, atol=1e-6)


# --- prototypes ---


def test_as_many_prototypes_as_points_have_no_distance():
    points = torch.randn(12, 5, generator=_rng())
    assert prototype_distances(points, 12, _rng()).max().item() < 1e-12


def test_cosine_distance_is_half_the_squared_one_on_the_sphere_and_rotations_do_not_matter():
    points = torch.randn(40, 6, generator=_rng()).double()
    centres, nearest = kmeans(points, 4, _rng(1))
    unit = torch.nn.functional.normalize(points, dim=1)
    distances = prototype_distances(points, 4, _rng(1))
    torch.testing.assert_close(distances, (unit - centres[nearest]).square().sum(1) / 2, rtol=1e-9, atol=1e-12)
    rotation, _ = torch.linalg.qr(torch.randn(6, 6, generator=_rng(2)).double())
    torch.testing.assert_close(prototype_distances(points @ rotation, 4, _rng(1)), distances, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(centres.norm(dim=1), torch.ones(4).double())


def test_two_blobs_are_found_and_the_hard_ones_lie_outside():
    axes = torch.eye(8)[:2] * 10
    points = torch.cat([axes[i] + torch.randn(50, 8, generator=_rng(i)) for i in range(2)])
    _, nearest = kmeans(points, 2, _rng())
    assert len(set(nearest[:50].tolist())) == len(set(nearest[50:].tolist())) == 1
    assert nearest[0] != nearest[99]
    distances = prototype_distances(points, 2, _rng())
    spread = torch.nn.functional.normalize(points, dim=1)
    away = torch.cat([(s - torch.nn.functional.normalize(s.mean(0), dim=0)).norm(dim=1) for s in spread.split(50)])
    assert set(distances.argsort()[-20:].tolist()) == set(away.argsort()[-20:].tolist())


def test_no_prototype_stays_empty():
    points = torch.cat([torch.tensor([[1.0, 0.0]]).repeat(20, 1), torch.randn(6, 2, generator=_rng())])
    for seed in range(20):
        _, nearest = kmeans(points, 5, _rng(seed))
        assert len(set(nearest.tolist())) == 5


def test_embeddings_leave_padding_out():
    _, model, batch = model_and_batch(tiny.bert, 2)
    together = embeddings(model, batch)
    for row in range(2):
        length = int(batch["attention_mask"][row].sum())
        alone = embeddings(model, {"input_ids": batch["input_ids"][row : row + 1, :length]})
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)


# --- in a run ---


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
def test_trains_on_what_is_kept_and_resumes(tmp_path, name, family):
    build = tiny.FAMILIES[family]
    run = loops.resumes(tmp_path, [{name: {**PRESETS[name], "keep_ratio": 0.25}}], build)
    method: Any = run.recipe[name]
    assert len(run.train_dataset) == 6
    assert sample_ids(run.train_dataset) == method.kept
    best = [int(method.found.ids[i]) for i in method.found.order()[:6]]
    assert sorted(best) == method.kept
    assert len(scores.stored()) == 1, "the second run found the scores of the first"


def test_scores_come_from_the_cache_and_leave_no_trace_in_the_random_state(tmp_path):
    states = []
    for name in ("first", "second"):
        torch.manual_seed(0)
        run = tiny.trainer(tmp_path / name, [{"el2n": PRESETS["el2n"]}], tiny.llama(dropout=0.1), max_steps=3)
        states.append(torch.get_rng_state())
        run.train()
        states.append(tiny.losses(run))
    assert torch.equal(states[0], states[2])
    assert states[1] == states[3]
    other = tiny.trainer(tmp_path / "third", [{"el2n": {**PRESETS["el2n"], "steps": 2}}], tiny.llama(dropout=0.1))
    assert len(scores.stored()) == 2
    assert other.recipe["el2n"].found.about["settings"]["steps"] == 2


def test_a_file_of_scores_is_used(tmp_path):
    path = tmp_path / "mine.csv"
    scores.Scores(np.arange(24), np.arange(24) % 5.0).save(path)
    data = Dataset.from_list([{"sample_id": s["sample_id"], "input_ids": s["input_ids"], "labels": s["labels"]} for s in tiny.text_samples()])  # fmt: skip  # noqa: E501
    run = tiny.trainer(
        tmp_path / "run", [{"el2n": {"scores": str(path), "keep_ratio": 4 / 24}}], samples=data, max_steps=2
    )
    assert run.train_dataset["sample_id"] == [4, 9, 14, 19]
    run.train()
    assert not scores.stored()
    scores.Scores(np.arange(20), np.zeros(20)).save(path.with_suffix(".jsonl"))
    with pytest.raises(InputError, match="4 of 24 samples have no score, the first is 20"):
        tiny.trainer(tmp_path / "run2", [{"el2n": {"scores": str(path.with_suffix(".jsonl"))}}])


def test_another_choice_does_not_resume(tmp_path):
    full = tiny.trainer(
        tmp_path / "full", [{"prototypes": {"clusters": 3}}], max_steps=2, save_strategy="steps", save_steps=1
    )
    full.train()
    again = tiny.trainer(tmp_path / "again", [{"prototypes": {"clusters": 3, "keep": "easy"}}], max_steps=2)
    with pytest.raises(InputError, match="not those chosen now"):
        again.train(resume_from_checkpoint=str(tmp_path / "full" / "checkpoint-1"))


def test_wrong_labels_float_to_the_top(tmp_path):
    """EL2N finds them (which is why the hardest may be left out)."""
    torch.manual_seed(0)
    images = [torch.full((1, 8, 8), float(i % 3) - 1) + 0.1 * torch.randn(1, 8, 8) for i in range(48)]
    labels = [i % 3 if i >= 6 else (i + 1) % 3 for i in range(48)]
    data = [{"pixel_values": p, "labels": y, "sample_id": i} for i, (p, y) in enumerate(zip(images, labels, strict=True))]  # fmt: skip  # noqa: E501
    method = {"el2n": {"steps": 40, "runs": 1, "keep_ratio": 0.125}}
    run = tiny.trainer(tmp_path, [method], tiny.vit(), samples=data, max_steps=2, per_device_train_batch_size=8)
    assert len(set(run.recipe["el2n"].kept) & set(range(6))) >= 5


@pytest.mark.parametrize(
    "setting",
    [
        {"el2n": {"keep_ratio": 0.0}},
        {"el2n": {"runs": 0}},
        {"el2n": {"steps": -1}},
        {"el2n": {"skip_hardest": 1.0}},
        {"grand": {"runs": 0}},
        {"grand": {"steps": -1}},
        {"prototypes": {"clusters": 0}},
        {"prototypes": {"steps": -1}},
        {"prototypes": {"keep": "middle"}},
    ],
)
def test_bad_settings(setting):
    (settings,) = setting.values()
    with pytest.raises(InputError, match=next(iter(settings))):
        Recipe.parse([setting])


def test_refusals(tmp_path):
    bare = [{k: v for k, v in s.items() if k != "sample_id"} for s in tiny.text_samples()]
    with pytest.raises(NotApplicable, match="no column sample_id"):
        tiny.trainer(tmp_path, ["el2n"], samples=bare)
    with pytest.raises(NotApplicable, match="fewer than clusters"):
        tiny.trainer(tmp_path, [{"prototypes": {"clusters": 99}}])
