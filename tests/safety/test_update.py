"""Out of memory in the optimizer's step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from thrifty.errors import InputError
from thrifty.safety.update import UpdateGuard


class Failing(torch.optim.SGD):
    """Runs out of memory some times, before or after its first write."""

    def __init__(self, parameters, times: int = 1, after: int = 0) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9, foreach=False)
        self.times, self.after = times, after

    @torch.no_grad()
    def step(self, closure=None):
        for number, p in enumerate(self.param_groups[0]["params"]):
            if self.times and number == self.after:
                self.times -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. (injected)\nand a second line")
            p.sub_(p.grad, alpha=0.1)


Failing.__module__ = "torch.optim.failing"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model(torch.ones(2, 3)).sum().backward()
    return model


def test_a_step_that_had_not_written_is_run_again(model) -> None:
    before, lines = tiny.weights(model), []
    optimizer = Failing(model.parameters())
    assert UpdateGuard(optimizer, lines.append).run(optimizer.step) is None
    assert "run again" in lines[0]
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * p.grad)


def test_a_step_that_had_written_is_not_run_again(model) -> None:
    before = tiny.weights(model)
    optimizer = Failing(model.parameters(), after=2)
    assert UpdateGuard(optimizer).run(optimizer.step) == "CUDA out of memory. (injected)"
    changed = [not torch.equal(p, before[name]) for name, p in model.named_parameters()]
    assert changed == [True, True, False, False]


def test_an_optimizer_whose_writes_are_not_counted_is_never_run_again(model) -> None:
    class Foreign(Failing):
        pass

    Foreign.__module__ = "bitsandbytes.optim"
    optimizer = Foreign(model.parameters())
    assert UpdateGuard(optimizer).run(optimizer.step) is not None
    assert optimizer.times == 0


def test_half_made_state_is_dropped(model, inject_oom) -> None:
    expected = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    expected.load_state_dict(model.state_dict())
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    torch.optim.AdamW(expected.parameters(), foreach=False).step()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with inject_oom(5):
        assert UpdateGuard(optimizer, lambda line: None).run(optimizer.step) is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_what_is_not_memory_passes_through(model) -> None:
    def step() -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        UpdateGuard(Failing(model.parameters())).run(step)


def test_without_a_checkpoint_it_is_an_error_with_advice(tmp_path) -> None:
    run = tiny.trainer(tmp_path, (), tiny.llama())
    run.optimizer = Failing([p for p in run.model.parameters() if p.requires_grad], times=0, after=2)
    run.guards.trial_step = False
    original = run.create_optimizer

    def strike(*args):
        run.optimizer.times = 5
        return original(*args)

    run.create_optimizer = strike
    with pytest.raises(InputError, match=r"optim=.*out of memory in the optimizer step.*Fix: \(1\) .*frees about"):
        run.train()
