"""GaLore and APOLLO: projections, known limits, the size of the states, and runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.optimizers.apollo import ApolloOptimizer, limit_growth, random_projection
from thrifty.methods.optimizers.galore import GaLoreOptimizer, strongest_directions


def _gradients(count: int, shape: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng) for _ in range(count)]


def _run(make: Any, gradients: list[torch.Tensor], start: torch.Tensor | None = None) -> tuple[nn.Parameter, Any]:
    p = nn.Parameter(torch.zeros(gradients[0].shape) if start is None else start.clone())
    optimizer = make(p)
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_directions_are_orthonormal_and_keep_what_has_their_rank(shape):
    rng = torch.Generator().manual_seed(0)
    low = torch.randn(shape[0], 3, generator=rng) @ torch.randn(3, shape[1], generator=rng)
    p = strongest_directions(low, 3)
    assert p.shape == (6, 3)
    torch.testing.assert_close(p.T @ p, torch.eye(3), rtol=0, atol=1e-5)
    kept = p @ p.T @ low if shape[0] == 6 else low @ p @ p.T
    torch.testing.assert_close(kept, low, rtol=0, atol=1e-4)
    assert strongest_directions(low.bfloat16(), 2).dtype == torch.float32


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_with_sgd_inside_full_rank_is_plain_sgd(shape):
    gradients = _gradients(5, shape)
    ours, _ = _run(
        lambda p: GaLoreOptimizer([{"params": [p], "rank": 6}], lr=0.1, scale=0.25, every=2, inner="sgd"), gradients
    )
    plain, _ = _run(lambda p: torch.optim.SGD([p], lr=0.1 * 0.25), gradients)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_galore_is_the_papers_algorithm(shape):
    """Adam on P'G (or G P), with directions that change at steps 1 and 4; decay is not scaled."""
    gradients = _gradients(5, shape)
    w, m, v = torch.ones(shape), torch.zeros(()), torch.zeros(())
    directions = torch.zeros(())
    for t, g in enumerate(gradients, start=1):
        if (t - 1) % 3 == 0:
            directions = strongest_directions(g, 2)  # the sign of a singular vector is free: one choice for both
        r = directions.T @ g if shape[0] <= shape[1] else g @ directions
        m, v = 0.9 * m + 0.1 * r, 0.999 * v + 0.001 * r * r
        n = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        step = directions @ n if shape[0] <= shape[1] else n @ directions.T
        w = w * (1 - 0.1 * 0.5) - 0.1 * 0.25 * step
    make = lambda p: GaLoreOptimizer([{"params": [p], "rank": 2}], lr=0.1, every=3, weight_decay=0.5)  # noqa: E731
    ours, _ = _run(make, gradients, torch.ones(shape))
    torch.testing.assert_close(ours.detach(), w, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [GaLoreOptimizer, ApolloOptimizer])
@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
def test_states_are_of_low_rank(make, shape):
    p, optimizer = _run(lambda p: make([{"params": [p], "rank": 4}]), _gradients(2, shape))
    held = sum(v.numel() for v in optimizer.state[p].values() if torch.is_tensor(v))
    assert held <= 4 * (64 + 2 * 96) + 1
    if make is ApolloOptimizer:
        assert held == 2 * 4 * 96 + 1  # the projection is a seed


def test_projections_keep_lengths_on_average():
    x = torch.randn(256, generator=torch.Generator().manual_seed(10**6))
    lengths = torch.stack([(random_projection(8, 256, seed) @ x).square().sum() for seed in range(300)])
    assert lengths.mean() / x.square().sum() == pytest.approx(1, abs=0.1)
    assert torch.equal(random_projection(8, 256, 5), random_projection(8, 256, 5))


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
@pytest.mark.parametrize("per_channel", [True, False])
def test_apollo_is_the_papers_algorithm(shape, per_channel):
    """The gradient times |R~_j| / |R_j| for each channel of the longer side, under the limit of growth."""
    gradients = _gradients(4, shape)
    make = lambda p: ApolloOptimizer(  # noqa: E731
        [{"params": [p], "rank": 2}], lr=0.1, scale=2.0, every=100, per_channel=per_channel, weight_decay=0.5, seed=3
    )
    ours, optimizer = _run(make, gradients, torch.ones(shape))
    projection = random_projection(2, 6, optimizer.state[ours]["seed"])
    w, m, v, before = torch.ones(shape), torch.zeros(()), torch.zeros(()), None
    for t, gradient in enumerate(gradients, start=1):
        g = gradient if shape[0] == 6 else gradient.T
        r = projection @ g
        m, v = 0.9 * m + 0.1 * r, 0.999 * v + 0.001 * r * r
        adapted = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        if per_channel:
            step = 2.0 * g * torch.stack([adapted[:, j].norm() / r[:, j].norm() for j in range(10)])
        else:
            step = 2.0 * g * adapted.norm() / r.norm()
        if before is not None and step.norm() > 1.01 * before:
            step = step / step.norm() * 1.01 * before
        before = step.norm()
        w = w * 0.95 - 0.1 * (step if shape[0] == 6 else step.T)
    torch.testing.assert_close(ours.detach(), w, rtol=0, atol=1e-5)


def test_growth_of_steps_is_limited():
    state: dict[str, Any] = {}
    first = limit_growth(torch.full((4,), 0.5), state)
    assert first.norm() == 1
    assert limit_growth(torch.full((4,), 50.0), state).norm() == pytest.approx(1.01)
    assert limit_growth(torch.full((4,), 0.1), state).norm() == pytest.approx(0.2)
    assert limit_growth(torch.zeros(4), state).norm() == 0


def test_projections_are_renewed():
    p, optimizer = _run(lambda p: ApolloOptimizer([{"params": [p], "rank": 2}], every=2), _gradients(2, (6, 10)))
    seed = optimizer.state[p]["seed"]
    p.grad = torch.ones(6, 10)
    optimizer.step()
    assert optimizer.state[p]["seed"] != seed


@pytest.mark.parametrize("name", ["galore", "apollo"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trains_and_resumes(tmp_path, name, family):
    run = loops.resumes(tmp_path, [{name: {"rank": 4, "every": 2}}], tiny.FAMILIES[family], max_steps=5, step=3)
    ranks = {g["rank"]: len(g["params"]) for g in run.ctx.optimizer.param_groups}
    assert ranks[4] >= 8  # the matrices of the blocks, but no embedding or head
    for key, p in run.model.named_parameters():
        if "embed" in key or "head" in key or p.ndim < 2:
            assert run.ctx.optimizer.state[p]["exp_avg"].shape == p.shape


@pytest.mark.parametrize("name", ["galore", "apollo"])
def test_accumulated_gradients_make_one_step(tmp_path, name):
    """The update is no hook on single gradients: four micro-batches move the states once."""
    run = tiny.trainer(tmp_path, [{name: {"rank": 4}}], max_steps=2, per_device_train_batch_size=1,
                       gradient_accumulation_steps=4)  # fmt: skip
    run.train()
    counts = {s["count"] for s in run.ctx.optimizer.state.values() if "count" in s}
    assert counts == {1}
    assert {s["step"] for s in run.ctx.optimizer.state.values()} == {2}


def test_mini_has_one_factor(tmp_path):
    run = tiny.trainer(tmp_path, [{"apollo": {"mini": True}}], max_steps=2)
    run.train()
    assert {g["rank"] for g in run.ctx.optimizer.param_groups} == {1, None}
    assert run.ctx.optimizer.scale == 128
    assert not run.ctx.optimizer.per_channel


@pytest.mark.parametrize("make", [GaLoreOptimizer, ApolloOptimizer])
def test_in_ones_own_loop(make):
    def setup() -> loops.Setup:
        model = tiny.llama()
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        ids = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in ids]
        return loops.Setup(model, make([{"params": matrices, "rank": 4}, {"params": rest}], lr=1e-2, every=2))

    _, losses = loops.both_loops(setup)
    assert losses != loops.baseline(tiny.llama)[1]


@pytest.mark.parametrize("name", ["galore", "apollo"])
def test_refused(tmp_path, name):
    with pytest.raises(NotApplicable, match=r"fraction of the hidden size"):
        tiny.trainer(tmp_path, [name])
    with pytest.raises(NotApplicable, match="whole tensors"):
        Recipe.parse([name])[name].configure(type("Args", (), {"fsdp": "full_shard"})(), None)
    with pytest.raises(InputError, match="lora"):
        Recipe.parse([name, "lora"])
    for settings in ({"rank": 0}, {"every": 0}, {"scale": 0.0}):
        with pytest.raises(InputError, match=next(iter(settings))):
            Recipe.parse([{name: settings}])
