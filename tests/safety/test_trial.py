"""A trial step changes nothing: the run after it is bitwise the run without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from thrifty.errors import InputError
from thrifty.safety.oom import MicroBatcher
from thrifty.safety.trial import trial_step


def batch(seed: int, rows: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 97, (rows, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def run(make_llama: Any, trial: bool, state_before: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    torch.manual_seed(3)
    model = make_llama(attention_dropout=0.2)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = get_scheduler("linear", optimizer, 1, 10)

    def forward_backward(inputs: Any) -> None:
        model(**inputs).loss.backward()

    def train(seed: int) -> None:
        forward_backward(batch(seed))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    if state_before:
        train(0)
        train(1)
    if trial:
        model.eval()
        trial_step(model, optimizer, batch(99), forward_backward)
        assert not model.training
        assert all(p.grad is None for p in model.parameters())
        assert bool(optimizer.state) is state_before
        model.train()
    for seed in (2, 3):
        train(seed)
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()


@pytest.mark.parametrize("state_before", [False, True])
def test_training_after_a_trial_is_bitwise_training_without_it(make_llama, state_before: bool) -> None:
    plain, plain_state = run(make_llama, False, state_before)
    tried, tried_state = run(make_llama, True, state_before)
    assert all(torch.equal(a, b) for a, b in zip(plain, tried, strict=True))
    assert plain_state["param_groups"] == tried_state["param_groups"]
    for index, entry in plain_state["state"].items():
        assert all(torch.equal(value, tried_state["state"][index][key]) for key, value in entry.items())


def test_a_trial_that_does_not_fit_names_it_and_restores(llama, inject_oom) -> None:
    before = [p.detach().clone() for p in llama.parameters()]
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1.0)
    batcher = MicroBatcher(llama, report=lambda line: None)

    def forward_backward(part: Any, share: float) -> torch.Tensor:
        loss = llama(**part).loss
        loss.backward()
        return loss.detach()

    def whole(inputs: Any) -> None:
        batcher.begin_step()
        batcher.run(inputs, forward_backward)

    with pytest.raises(InputError, match="does not fit"), inject_oom(40, times=99):
        trial_step(llama, optimizer, batch(0, rows=1), whole)
    assert all(torch.equal(a, b) for a, b in zip(llama.parameters(), before, strict=True))
    assert not optimizer.state
    with inject_oom(40):
        trial_step(llama, optimizer, batch(0), whole)
    assert batcher.limits["training"] == (2, 12), "the trial's answer is kept for training"
    assert all(torch.equal(a, b) for a, b in zip(llama.parameters(), before, strict=True))
    assert not optimizer.state
