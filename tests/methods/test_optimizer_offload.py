"""AdamW on the host and on disk: torch's AdamW to the bit; a delayed update is a shifted loop."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, Recipe
from thrifty.methods.offload._host_adamw import HostAdamW
from thrifty.methods.offload.nvme_offload import DiskAdamW, mapped

KINDS = ["host", "disk"]


def make(kind: str, params: Any, folder: Path, **kwargs: Any) -> torch.optim.Optimizer:
    return HostAdamW(params, **kwargs) if kind == "host" else DiskAdamW(params, folder, piece=40, **kwargs)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 6, generator=generator, dtype=next(model.parameters()).dtype)
    model.zero_grad()
    model(x).square().sum().backward()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_adamw_to_the_bit(tmp_path, kind):
    ours, reference = net(), net()
    mine = make(kind, groups(ours), tmp_path, lr=1e-2)
    theirs = torch.optim.AdamW(groups(reference), lr=1e-2, fused=True)
    for step in range(12):
        for model, optimizer in ((ours, mine), (reference, theirs)):
            give_gradients(model, step)
            if step == 7:  # a parameter without a gradient
                model[0].bias.grad = None  # type: ignore[index]
            optimizer.step()
    tiny.assert_same(tiny.weights(ours), tiny.weights(reference))
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(mine.state[p][name], theirs.state[q][name])
    assert not list(tmp_path.iterdir())  # the files have no names: nothing stays behind a killed process


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_bfloat16_have_a_float32_master(tmp_path, kind):
    ours, reference = net().bfloat16(), net().bfloat16().float()
    mine = make(kind, groups(ours), tmp_path, lr=1e-3)
    theirs = torch.optim.AdamW(groups(reference), lr=1e-3, fused=True)
    for step in range(6):
        give_gradients(ours, step)
        for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
            q.grad = p.grad.float()  # type: ignore[union-attr]
        mine.step()
        theirs.step()
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.state[p]["master"], q)
        assert torch.equal(p, q.bfloat16())


def test_delayed_is_a_shifted_loop():
    """After three steps that wait, step t uses the gradient that was computed in step t - 1, on older weights."""
    warm = 3
    ours, reference = net(), net()
    mine = HostAdamW(ours.parameters(), lr=1e-2, delay_after=warm)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    waiting: list[torch.Tensor] | None = None
    for step in range(10):
        give_gradients(ours, step)
        mine.step()
        give_gradients(reference, step)
        fresh = [p.grad.clone() for p in reference.parameters()]  # type: ignore[union-attr]
        if step >= warm:
            used, waiting = waiting, fresh
            for p, g in zip(reference.parameters(), used or [], strict=used is not None):
                p.grad = g
        if step < warm or used is not None:
            theirs.step()
        tiny.assert_same(tiny.weights(ours), tiny.weights(reference))


@pytest.mark.parametrize(("kind", "extra"), [("host", {}), ("host", {"delay_after": 2}), ("disk", {})])
def test_states_survive_a_reload(tmp_path, kind, extra):
    model = net()
    optimizer = make(kind, groups(model), tmp_path, lr=1e-2, **extra)
    for step in range(4):
        give_gradients(model, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = net()
    again.load_state_dict(saved["model"])
    other = make(kind, groups(again), tmp_path, lr=1e-2, **extra)
    other.load_state_dict(saved["optimizer"])
    for step in range(4, 8):
        for m, o in ((model, optimizer), (again, other)):
            give_gradients(m, step)
            o.step()
    tiny.assert_same(tiny.weights(again), tiny.weights(model))


def test_mapped_memory_is_a_file(tmp_path):
    tensor = mapped(tmp_path, torch.Size([30, 70]))
    assert tensor.shape == (30, 70)
    assert not tensor.any()
    tensor.fill_(2.0)
    assert tensor.sum() == 4200
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path) in maps.read_text()
    assert mapped(tmp_path, torch.Size([])).shape == ()


@pytest.mark.parametrize("kind", KINDS)
def test_own_loops_agree(tmp_path, kind):
    def setup() -> loops.Setup:
        model = tiny.bert(dropout=0.1)
        return loops.Setup(model, make(kind, model.parameters(), tmp_path, lr=1e-2, weight_decay=0.01))

    ours, losses = loops.both_loops(setup)
    torch.manual_seed(5)
    plain = tiny.bert(dropout=0.1)
    fused = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    assert loops.plain_loop(loops.Setup(plain, fused)) == losses
    tiny.assert_same(tiny.weights(ours.model), tiny.weights(plain))


METHODS: list[Any] = [
    "optimizer-offload",
    {"optimizer-offload": {"delayed": True, "warmup_steps": 1}},
    {"nvme-offload": {"piece": 300}},
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_trains_and_resumes(tmp_path, method):
    build = lambda: tiny.gpt2(dropout=0.1)  # noqa: E731
    run = loops.resumes(tmp_path, [copy.deepcopy(method)], build, max_steps=4)
    plain = tiny.trainer(tmp_path / "plain", ["adamw"], build(), max_steps=4)
    plain.train()
    if "delayed" in str(method):
        assert tiny.losses(run) != tiny.losses(plain)
    else:
        tiny.assert_same(tiny.weights(run.model), tiny.weights(plain.model))


def test_growth_carries_the_states(tmp_path):
    grow = {"stacking": {"start_layers": 1, "boundaries": [0.5]}}
    runs = []
    for method in ("nvme-offload", "optimizer-offload", "adamw"):
        run = tiny.trainer(tmp_path / str(len(runs)), [method, grow], tiny.llama(2), max_steps=4)
        run.train()
        runs.append(tiny.weights(run.model))
    tiny.assert_same(runs[0], runs[2])
    tiny.assert_same(runs[1], runs[2])


def test_bad_settings(tmp_path):
    with pytest.raises(InputError, match="warmup_steps must not be negative"):
        Recipe.parse([{"optimizer-offload": {"warmup_steps": -1}}])
    with pytest.raises(InputError, match="piece must be at least 1"):
        Recipe.parse([{"nvme-offload": {"piece": 0}}])
    blocked = tmp_path / "file"
    blocked.write_text("")
    run = tiny.trainer(tmp_path / "run", [{"nvme-offload": {"path": str(blocked / "below")}}], max_steps=1)
    with pytest.raises(InputError, match=r"nvme-offload.path.* no file can be made there"):
        run.train()
