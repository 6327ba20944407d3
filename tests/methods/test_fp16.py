"""fp16: dynamic loss scaling against its definition, in a trainer and in one's own loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

import tiny
from methods import loops
from thrifty import NotApplicable
from thrifty.methods.precision.fp16 import LossScaler


def _scale(trainer: Any) -> float:
    return trainer.accelerator.scaler.get_scale()


def _toy(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def _loss(model: nn.Module) -> torch.Tensor:
    x = torch.arange(8.0).view(2, 4) / 8
    return model(x).square().mean()


def test_gradients_do_not_depend_on_the_scale():
    expected = torch.autograd.grad(_loss(model := _toy()), list(model.parameters()))
    for scale in (1.0, 2.0**7, 2.0**16):
        model = _toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        assert LossScaler("cpu", init_scale=scale).step(_loss(model), optimizer)
        for p, gradient in zip(model.parameters(), expected, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, gradient)  # powers of two: exact


def test_clipping_sees_unscaled_gradients():
    """Clipping before unscaling would shrink the gradients by the scale."""
    model, other = _toy(), _toy()
    LossScaler("cpu").step(_loss(model), torch.optim.SGD(model.parameters(), lr=1.0), max_norm=0.1)
    _loss(other).backward()
    nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(0.1, rel=1e-3)


def test_an_overflow_holds_weights_and_schedule_and_halves_the_scale():
    model = _toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = LossScaler("cpu")
    assert scaler.scaler.get_scale() == 65536
    before = copy.deepcopy(model.state_dict())
    assert not scaler.step(_loss(model) * float("inf"), optimizer, max_norm=1.0, schedule=schedule.step)
    tiny.assert_same(dict(model.state_dict()), before)
    assert scaler.scaler.get_scale() == 32768
    assert schedule.last_epoch == 0
    optimizer.zero_grad()
    assert scaler.step(_loss(model), optimizer, max_norm=1.0, schedule=schedule.step)
    assert schedule.last_epoch == 1
    assert not torch.equal(model.weight, before["weight"])


def test_the_scale_doubles_after_2000_good_steps():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = LossScaler("cpu")
    for _ in range(1999):
        optimizer.zero_grad()
        scaler.step(weight.sum(), optimizer)
    assert scaler.scaler.get_scale() == 65536
    optimizer.zero_grad()
    assert scaler.step(weight.sum(), optimizer)  # the growth is no overflow
    assert scaler.scaler.get_scale() == 131072


def test_a_tiny_gradient_survives_by_the_scale():
    def gradient(scale: float) -> float:
        weight = nn.Parameter(torch.ones(1))
        half = weight.half()  # its gradient passes through float16
        loss = (half * 1.0).float() * 2.0**-26
        scaler = LossScaler("cpu", init_scale=scale)
        scaler.step(loss.sum(), torch.optim.SGD([weight], lr=0.0))
        assert weight.grad is not None
        return weight.grad.item()

    assert gradient(1.0) == 0.0
    assert gradient(65536.0) == 2.0**-26


def test_own_loops_agree_and_act():
    def train(accelerate: bool) -> tuple[nn.Module, list[float], set[torch.dtype]]:
        model = tiny.llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches, net = loops.loader(model), model
        if accelerate:
            net, optimizer, batches = loops.new_accelerator().prepare(model, optimizer, batches)
        scaler, losses, dtypes = LossScaler("cpu"), [], set()
        model.lm_head.register_forward_hook(lambda m, i, o: dtypes.add(o.dtype))  # type: ignore[union-attr]
        for inputs in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = net(**inputs).loss
            inner = getattr(optimizer, "optimizer", optimizer)
            scaler.step(loss, inner, max_norm=1.0)
            losses.append(loss.item())
        return model, losses, dtypes

    plain, losses, dtypes = train(False)
    wrapped, again, _ = train(True)
    assert losses == again
    tiny.assert_same(tiny.weights(plain), tiny.weights(wrapped))
    assert dtypes == {torch.float16}
    _, exact = loops.baseline(tiny.llama)
    assert losses[0] == pytest.approx(exact[0], rel=1e-2)
    assert losses != exact


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trains_and_resumes(tmp_path, family):
    run = loops.resumes(tmp_path, ["fp16"], tiny.FAMILIES[family])
    plain = tiny.trainer(tmp_path / "plain", [], tiny.FAMILIES[family](), max_steps=3)
    plain.train()
    assert tiny.losses(run) != tiny.losses(plain)
    assert tiny.losses(run)[0] == pytest.approx(tiny.losses(plain)[0], rel=1e-3)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert run.accelerator.scaler.is_enabled()


class Overflow(TrainerCallback):
    """Makes the gradient of one weight infinite, once, in one step."""

    def __init__(self, model: nn.Module, step: int) -> None:
        self.step, self.armed = step, False
        next(p for p in model.parameters() if p.requires_grad).register_hook(self._poison)

    def on_step_begin(self, args, state, control, **kwargs):
        self.armed = state.global_step == self.step

    def _poison(self, gradient: torch.Tensor) -> torch.Tensor:
        armed, self.armed = self.armed, False
        return gradient * float("inf") if armed else gradient


def test_overflow_in_the_trainer(tmp_path):
    """Weights, optimizer and schedule stand still for one step, the scale halves, and a resume keeps it."""

    def run(folder: str, **overrides):
        trainer = tiny.trainer(tmp_path / folder, ["fp16"], model := tiny.llama(), max_steps=4, **overrides)
        return trainer, model

    trainer, model = run("full", save_strategy="steps", save_steps=1)
    trainer.add_callback(Overflow(model, step=1))
    trainer.train()
    saved = [torch.load(tmp_path / f"full/checkpoint-{i}/scheduler.pt")["last_epoch"] for i in (1, 2, 3)]
    assert saved == [1, 1, 2]
    first, second = (load_file(tmp_path / f"full/checkpoint-{i}/model.safetensors") for i in (1, 2))
    tiny.assert_same(first, second)
    assert _scale(trainer) == 32768

    again, _ = run("again")
    again.train(resume_from_checkpoint=str(tmp_path / "full/checkpoint-2"))
    assert _scale(again) == 32768
    tiny.assert_same(tiny.weights(again.model), tiny.weights(trainer.model))


def test_accumulates_under_one_scale(tmp_path):
    """An overflow in one of two micro-batches skips the whole step, not a half of it."""
    trainer = tiny.trainer(
        tmp_path, ["fp16"], model := tiny.llama(), max_steps=1, gradient_accumulation_steps=2, warmup_steps=0
    )
    before = tiny.weights(model)
    trainer.add_callback(Overflow(model, step=0))
    trainer.train()
    tiny.assert_same(tiny.weights(model), before)
    assert _scale(trainer) == 32768


def test_half_weights_are_refused(tmp_path):
    with pytest.raises(NotApplicable, match=r"fp16: .*float16.*lm_head|fp16: .*embed.*float32"):
        tiny.trainer(tmp_path, ["fp16"], tiny.llama().half())
