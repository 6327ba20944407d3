"""Shampoo and SOAP: known limits, invariances, and a transcription of their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.optimizers.shampoo import ShampooOptimizer, inverse_root
from thrifty.methods.optimizers.soap import SoapOptimizer


def _gradients(count: int, shape: tuple[int, int] = (6, 4), seed: int = 0) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng) for _ in range(count)]


def _run(optimizer_of: Any, gradients: list[torch.Tensor]) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(gradients[0].shape))
    optimizer = optimizer_of([p])
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    p.optimizer = optimizer  # type: ignore[attr-defined]
    return p


def test_inverse_roots():
    torch.manual_seed(0)
    a = torch.randn(5, 5).double()
    a = a @ a.T
    root = inverse_root(a, 4, 0.0)
    torch.testing.assert_close(root @ root @ root @ root @ a, torch.eye(5).double())


def _plain(**settings: Any) -> Any:
    given = {"lr": 1.0, "betas": (0.0, 1.0), "grafting": "none", "every": 1, "root_eps": 0.0, **settings}
    return lambda params: ShampooOptimizer(params, **given)


def test_one_shampoo_step_is_the_orthogonal_factor():
    """L^-1/4 G R^-1/4 = U V'. In float32 sums of squares, so that the smallest singular values lose some bits."""
    g = _gradients(1, (4, 4))[0]
    u, _, vh = torch.linalg.svd(g)
    torch.testing.assert_close(_run(_plain(), [g]).detach(), -(u @ vh), rtol=0, atol=1e-4)


def test_shampoo_is_the_papers_formula():
    gradients = _gradients(5)
    w, left, right = torch.zeros(6, 4).double(), torch.zeros(6, 6).double(), torch.zeros(4, 4).double()
    for g in (gradient.double() for gradient in gradients):
        left, right = left + g @ g.T, right + g.T @ g
        step = g
        for side, matrix in ((0, left), (1, right)):
            values, vectors = torch.linalg.eigh(
                matrix + 1e-4 * torch.linalg.eigvalsh(matrix)[-1] * torch.eye(len(matrix))
            )
            root = vectors @ torch.diag(values**-0.25) @ vectors.T
            step = root @ step if side == 0 else step @ root
        w = w - 0.1 * step
    got = _run(_plain(lr=0.1, root_eps=1e-4), gradients)
    torch.testing.assert_close(got.detach().double(), w, rtol=0, atol=1e-5)


def test_shampoo_turns_with_its_gradients():
    u, v = (torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(n)))[0] for n in (6, 4))
    gradients = _gradients(4)
    settings = {"root_eps": 1e-4}
    turned = _run(_plain(**settings), [u @ g @ v for g in gradients])
    torch.testing.assert_close(turned.detach(), u @ _run(_plain(**settings), gradients).detach() @ v, rtol=0, atol=1e-4)


def test_grafted_steps_have_the_length_of_adams():
    gradients = _gradients(6)
    for count in range(1, 7):
        adam = _run(lambda ps: torch.optim.Adam(ps, lr=1.0, betas=(0.0, 0.999)), gradients[:count])
        ours = _run(lambda ps: ShampooOptimizer(ps, lr=1.0, betas=(0.0, 0.999)), gradients[:count])
        before = [_run(f, gradients[: count - 1]).detach() if count > 1 else torch.zeros(6, 4) for f in (
            lambda ps: torch.optim.Adam(ps, lr=1.0, betas=(0.0, 0.999)),
            lambda ps: ShampooOptimizer(ps, lr=1.0, betas=(0.0, 0.999)))]  # fmt: skip
        lengths = [(now.detach() - old).norm() for now, old in zip((adam, ours), before, strict=True)]
        torch.testing.assert_close(lengths[0], lengths[1], rtol=1e-4, atol=0)


def test_soap_without_rotation_is_adam_a_step_later():
    gradients = _gradients(8)
    soap = _run(lambda ps: SoapOptimizer(ps, lr=0.1, weight_decay=0.0, max_dimension=1), gradients)
    adam = _run(lambda ps: torch.optim.Adam(ps, lr=0.1, betas=(0.95, 0.95)), gradients[1:])
    torch.testing.assert_close(soap, adam, rtol=0, atol=1e-6)


def test_soap_is_the_papers_formula():
    """Adam on the gradient in the eigenbasis of its own running squares; the basis stays (every is large)."""
    gradients = _gradients(6, (4, 4))  # square: no side has directions without a gradient, where any basis would do
    left, right = gradients[0] @ gradients[0].T, gradients[0].T @ gradients[0]
    bases = [torch.linalg.eigh(0.05 * matrix)[1].flip(1) for matrix in (left, right)]
    rotated = [bases[0].T @ g @ bases[1] for g in gradients[1:]]
    adam = _run(lambda ps: torch.optim.Adam(ps, lr=0.1, betas=(0.95, 0.95)), rotated)
    soap = _run(lambda ps: SoapOptimizer(ps, lr=0.1, weight_decay=0.0, every=100), gradients)
    torch.testing.assert_close(soap.detach(), bases[0] @ adam.detach() @ bases[1].T, rtol=0, atol=1e-5)


def test_the_basis_stays_orthogonal_and_finds_the_eigenvectors():
    """Gradients with fixed, distinct strengths of their directions: after many renewals the basis is theirs."""
    rng = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(6, 6, generator=rng))[0]
    strengths = torch.tensor([32.0, 16.0, 8.0, 4.0, 2.0, 1.0])
    gradients = [u @ (strengths[:, None] * torch.randn(6, 64, generator=rng)) for _ in range(120)]
    p = _run(lambda ps: SoapOptimizer(ps, lr=1e-3, every=1), gradients)
    state: Any = p.optimizer.state[p]
    for side, size in ((0, 6), (1, 64)):
        basis = state[f"basis_{side}"]
        assert (basis.T @ basis - torch.eye(size)).abs().max() < 1e-5
    overlap = (state["basis_0"].T @ u).abs()
    assert overlap.diagonal().min() > 0.9


def test_the_first_mean_goes_along_into_a_new_basis():
    p = nn.Parameter(torch.zeros(6, 4))
    optimizer = SoapOptimizer([p], lr=0.1, every=3)
    for number, gradient in enumerate(_gradients(4)):
        p.grad = gradient
        if number == 3:
            state = optimizer.state[p]
            old = {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
            expected = optimizer._rotate(
                old["exp_avg"].lerp(optimizer._rotate(gradient, old, (0, 1)), 0.05), old, (0, 1), back=True
            )
        optimizer.step()
    state = optimizer.state[p]
    assert not torch.equal(state["basis_0"], old["basis_0"])
    torch.testing.assert_close(optimizer._rotate(state["exp_avg"], state, (0, 1), back=True), expected)


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_long_sides_and_vocabularies_cost_nothing(tmp_path, name):
    run = tiny.trainer(tmp_path, [{name: {"max_dimension": 20}}], max_steps=2)
    run.train()
    for key, p in run.model.named_parameters():
        sides = {k[-1] for k in run.ctx.optimizer.state[p] if k.startswith("sums")}
        wanted = {str(i) for i in range(2) if p.shape[i] <= 20} if p.ndim == 2 else set()
        assert sides == ({"1"} if "embed" in key or "lm_head" in key else wanted), key


@pytest.mark.parametrize("name", ["soap", "shampoo"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trains_and_resumes(tmp_path, name, family):
    run = loops.resumes(tmp_path, [{name: {"every": 2}}], tiny.FAMILIES[family], max_steps=4, step=2)
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


@pytest.mark.parametrize("kind", [SoapOptimizer, ShampooOptimizer])
def test_own_loops_agree_and_it_learns(kind):
    def make() -> loops.Setup:
        model = tiny.llama()
        return loops.Setup(model, kind(model.parameters(), lr=3e-3, every=2))

    loops.both_loops(make)
    model = tiny.llama()
    batch, optimizer = loops.batch(model, size=8), kind(model.parameters(), lr=3e-3, every=2)
    losses = []
    for _ in range(25):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_refused(tmp_path, name):
    with pytest.raises(NotApplicable, match="whole tensors"):
        Recipe.parse([name])[name].configure(type("Args", (), {"fsdp": "full_shard"})(), None)
    with pytest.raises(InputError, match="lora"):
        Recipe.parse([name, "lora"])
    for settings in ({"every": 0}, {"max_dimension": 0}):
        with pytest.raises(InputError, match=next(iter(settings))):
            Recipe.parse([{name: settings}])
