"""Importance sampling: unbiased, of least variance, and off until it pays."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, Recipe, tasks
from thrifty.methods.selection._scoring import logit_gradients, sizes_of
from thrifty.methods.selection.importance_sampling import draw_weighted, probabilities, variance_ratio


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_expected_weighted_gradient_is_the_plain_mean():
    """Exactly: the sum over all draws of chance times weight times gradient."""
    scores, gradients = torch.rand(7, generator=_rng()).double(), torch.randn(7, 5, generator=_rng(1)).double()
    chances = probabilities(scores)
    expected = sum(chances[i] * (1 / (7 * chances[i])) * gradients[i] for i in range(7))
    torch.testing.assert_close(expected, gradients.mean(0), rtol=0, atol=1e-15)
    # And over all ordered pairs with replacement, the mean of two.
    places = itertools.product(range(7), repeat=2)
    pairs = sum(
        chances[i] * chances[j] * (gradients[i] / (7 * chances[i]) + gradients[j] / (7 * chances[j])) / 2
        for i, j in places
    )
    torch.testing.assert_close(pairs, gradients.mean(0), rtol=0, atol=1e-14)


def test_draws_follow_the_chances_and_weights_are_their_inverse():
    chances = probabilities(torch.tensor([1.0, 2.0, 5.0]))
    places, weights = draw_weighted(chances, 20000, _rng())
    shares = torch.bincount(places, minlength=3) / 20000
    torch.testing.assert_close(shares, chances.float(), rtol=0, atol=0.015)
    torch.testing.assert_close(weights, 1 / (3 * chances[places]))
    assert weights.mean().item() == pytest.approx(1, abs=0.02)


def test_equal_scores_are_uniform_sampling():
    chances = probabilities(torch.full((6,), 3.0))
    assert variance_ratio(chances) == pytest.approx(1)
    assert torch.equal(draw_weighted(chances, 4, _rng())[1], torch.ones(4).double())
    assert torch.equal(probabilities(torch.zeros(4)), torch.full((4,), 0.25).double())


def test_tau_is_the_papers_formula():
    g = probabilities(torch.rand(9, generator=_rng()))
    u = torch.full((9,), 1 / 9).double()
    inverse = 1 - (g - u).square().sum() / g.square().sum()
    assert variance_ratio(g) == pytest.approx(float(inverse) ** -0.5, rel=1e-12)


def test_true_norms_give_the_least_variance():
    gradients = torch.randn(30, 4, generator=_rng()).double() * torch.rand(30, 1, generator=_rng(2)).double() * 3
    mean = gradients.mean(0)

    def trace(chances: torch.Tensor) -> float:
        second = (gradients.square().sum(1) / (30**2 * chances)).sum()
        return float(second - mean.square().sum())

    best = trace(probabilities(gradients.norm(dim=1)))
    assert best < trace(torch.full((30,), 1 / 30).double())
    for seed in range(20):
        assert best < trace(probabilities(gradients.norm(dim=1) * (0.5 + torch.rand(30, generator=_rng(seed)))))


@pytest.mark.parametrize("family", ["llama", "bert", "vit", "t5"])
def test_scores_are_the_gradients_at_the_logits(family):
    """Against autograd through the whole model."""
    model = {**tiny.FAMILIES, "t5": tiny.t5}[family]().eval()
    task, batch = tasks.infer(model), loops.batch(model)
    gradient, sizes = logit_gradients(task, model, batch)
    outs: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: Any, out: Any) -> None:
        out.logits.retain_grad()
        outs.append(out.logits)

    model.register_forward_hook(keep)
    (task.per_sample_loss(model, batch) * sizes_of(task, batch)).sum().backward()
    torch.testing.assert_close(gradient, outs[0].grad, rtol=1e-4, atol=1e-6)
    labels = batch["labels"]
    assert sizes.tolist() == (
        [1.0] * 3 if family == "vit" else ((labels[:, 1:] if family == "llama" else labels) != -100).sum(1).tolist()
    )


@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
def test_weighted_loss_averages_to_the_plain_one(tmp_path, family):
    """The mean over many draws of the step's loss is the plain mean over the targets of what was drawn."""
    model = tiny.FAMILIES[family]().eval()
    run = tiny.trainer(tmp_path, [{"importance-sampling": {"threshold": 0.0}}], model, max_steps=2)
    run.current_gradient_accumulation_steps = 1
    method: Any = run.recipe["importance-sampling"]
    samples, collate = tiny.data_of(model)
    drawn = [collate(samples[i : i + 2]) for i in (0, 2, 4)]
    total, count = 0.0, 0
    for part in drawn:
        losses = run.ctx.per_sample_loss(model, {k: v for k, v in part.items() if k != "sample_id"})
        sizes = sizes_of(run.ctx.task, part)
        total, count = total + float((losses * sizes).sum()), count + float(sizes.sum())
    found = []
    loss = method.wrap_loss(lambda *a: pytest.fail("the plain loss was asked"), run.ctx)
    for step in range(600):
        run.state.global_step = step
        stream = iter(drawn)
        for part in method.draw(lambda stream=stream: next(stream), 1, run.ctx):
            del part["sample_id"]
            found.append(float(loss(model, part)))
    assert sum(found) / len(found) == pytest.approx(total / count, rel=0.02)


def test_it_is_off_until_tau_is_large_and_costs_little(tmp_path):
    methods = [{"importance-sampling": {"measure_every": 3}}]
    runs = []
    for recipe in ([], methods):
        run = tiny.trainer(tmp_path / str(len(recipe)), recipe, tiny.llama(dropout=0.1), max_steps=6)
        run.train()
        runs.append(run)
    method = runs[1].recipe["importance-sampling"]
    assert method.limit == 2.0
    assert 1 <= method.tau < 2
    assert (method.on_steps, method.scored) == (0, 4)
    assert tiny.losses(runs[0]) == tiny.losses(runs[1])
    tiny.assert_same(tiny.weights(runs[0].model), tiny.weights(runs[1].model))


def test_counted_samples(tmp_path):
    run = tiny.trainer(tmp_path, [{"importance-sampling": {"threshold": 0.0, "presample": 3}}], max_steps=4)
    run.train()
    method = run.recipe["importance-sampling"]
    assert (method.on_steps, method.scored) == (4, 4 * 2 * 3)


@pytest.mark.parametrize("family", ["llama", "bert", "vit", "gpt2"])
def test_trains_and_resumes(tmp_path, family):
    methods = [{"importance-sampling": {"threshold": 0.0}}]
    run = loops.resumes(tmp_path, methods, tiny.FAMILIES[family], max_steps=4, gradient_accumulation_steps=2)
    assert run.recipe["importance-sampling"].on_steps == 4


def test_own_loops_agree():
    def train(accelerate: bool) -> list[float]:
        model = net = tiny.vit()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches, backward = loops.loader(model, size=4), torch.Tensor.backward
        if accelerate:
            accelerator = loops.new_accelerator()
            net, optimizer, batches = accelerator.prepare(model, optimizer, batches)
            backward = accelerator.backward
        task, rng, losses = tasks.infer(model), _rng(), []
        for inputs in batches:
            chances = probabilities(logit_gradients(task, net, inputs)[0].norm(dim=1))
            places, weights = draw_weighted(chances, 2, rng)
            chosen = {key: value[places] for key, value in inputs.items()}
            optimizer.zero_grad()
            loss = (task.per_sample_loss(net, chosen) * weights).mean()
            backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert train(False) == train(True)


def test_refusals():
    for setting in ({"presample": 0.5}, {"smoothing": 1.0}, {"measure_every": 0}):
        with pytest.raises(InputError, match=next(iter(setting))):
            Recipe.parse([{"importance-sampling": setting}])
    with pytest.raises(InputError, match="shortened pass"):
        Recipe.parse(["importance-sampling", "token-dropping"])
