"""Lion against a transcription of its three lines."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import tiny
from methods import loops
from thrifty import InputError, Recipe
from thrifty.methods.optimizers.lion import lion


def _with_gradients(steps: int = 20) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 7, generator=generator)
    return start, [torch.randn(5, 7, generator=generator) for _ in range(steps)]


def _run(start: torch.Tensor, gradients: list[torch.Tensor], **settings) -> nn.Parameter:
    p = nn.Parameter(start.clone())
    optimizer = lion([p], **settings)
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    return p


def test_twenty_steps_of_the_definition():
    start, gradients = _with_gradients()
    lr, decay, (b1, b2) = 3e-3, 0.3, (0.95, 0.98)
    theta, m = start.double(), torch.zeros(5, 7, dtype=torch.float64)
    for g in gradients:
        c = b1 * m + (1 - b1) * g
        theta = theta - lr * (c.sign() + decay * theta)
        m = b2 * m + (1 - b2) * g
    p = _run(start, gradients, lr=lr, betas=(b1, b2), weight_decay=decay)
    torch.testing.assert_close(p.detach().double(), theta, rtol=0, atol=1e-5)


def test_every_entry_moves_by_the_learning_rate():
    start, gradients = _with_gradients(1)
    step = _run(start, gradients, lr=1e-2).detach() - start
    torch.testing.assert_close(step.abs(), torch.full_like(step, 1e-2), rtol=0, atol=1e-6)


def test_zero_betas_give_sign_sgd():
    start, gradients = _with_gradients()
    expected = start.clone()
    for g in gradients:
        expected = expected - 1e-2 * g.sign()
    torch.testing.assert_close(_run(start, gradients, lr=1e-2, betas=(0.0, 0.0)).detach(), expected, rtol=0, atol=1e-5)


def test_a_zero_gradient_moves_nothing_but_by_decay():
    start = torch.ones(3)
    assert torch.equal(_run(start, [torch.zeros(3)] * 5, lr=1e-2).detach(), start)
    decayed = _run(start, [torch.zeros(3)] * 5, lr=1e-2, weight_decay=0.5).detach()
    torch.testing.assert_close(decayed, start * (1 - 1e-2 * 0.5) ** 5)  # times lambda, not lambda / lr


def test_one_state_a_weight():
    model = tiny.llama()
    optimizer = lion(model.parameters(), lr=1e-3)
    model(**loops.batch(model)).loss.backward()
    optimizer.step()
    for p in model.parameters():
        assert sum(v.numel() for v in optimizer.state[p].values() if torch.is_tensor(v)) == p.numel()


def test_own_loops_agree_and_act():
    def make() -> loops.Setup:
        model = tiny.gpt2()
        return loops.Setup(model, lion(model.parameters(), lr=1e-3, weight_decay=0.1))

    setup, losses = loops.both_loops(make)
    assert losses[0] == loops.baseline(tiny.gpt2)[1][0]
    assert losses != loops.baseline(tiny.gpt2)[1]
    changes = [(p - q).abs().max() for p, q in zip(setup.model.parameters(), tiny.gpt2().parameters(), strict=True)]
    # Four steps of 1e-3 each: no weight can have gone further, decay aside.
    assert 0 < max(changes) <= 4e-3 * 1.2


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trains_and_resumes(tmp_path, family):
    run = loops.resumes(tmp_path, ["lion"], tiny.FAMILIES[family], learning_rate=1e-3)
    inner = run.optimizer.optimizer
    assert type(inner).__module__.startswith("lion_pytorch")
    assert {group["weight_decay"] for group in inner.param_groups} == {0.1, 0.0}
    assert all(set(state) == {"exp_avg"} for state in inner.state.values())


def test_trainer_equals_the_definition(tmp_path):
    """Two steps by hand, with the Trainer's groups and its schedule."""
    run = tiny.trainer(
        tmp_path,
        [{"lion": {"betas": [0.5, 0.8]}}],
        tiny.llama(),
        max_steps=2,
        max_grad_norm=0.0,
        warmup_steps=0,
        learning_rate=1e-3,
    )
    decayed = set(run.get_decay_parameter_names(run.model))
    names = [name for name, _ in run.model.named_parameters()]
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            assert model is not None
            for name, p in model.named_parameters():
                gradients[name].append(p.grad.clone())

    run.add_callback(Recorder())
    expected = tiny.weights(run.model)
    run.train()
    for name in names:
        theta, m = expected[name], torch.zeros_like(expected[name])
        for lr, g in zip((1e-3, 5e-4), gradients[name], strict=True):
            c = 0.5 * m + 0.5 * g
            theta = theta - lr * (c.sign() + (0.1 if name in decayed else 0.0) * theta)
            m = 0.8 * m + 0.2 * g
        torch.testing.assert_close(run.model.get_parameter(name).detach(), theta, rtol=0, atol=1e-7)


@pytest.mark.parametrize("betas", [[0.9], [0.9, 1.5], [-0.1, 0.9]])
def test_bad_betas_are_refused_before_training(betas):
    with pytest.raises(InputError, match=r"methods\.lion"):
        Recipe.parse([{"lion": {"betas": betas}}])
