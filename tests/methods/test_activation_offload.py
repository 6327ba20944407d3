"""Activation offloading: the same gradients to the bit; everything large that is saved moves, weights do not."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, Recipe
from thrifty._hf import enable_checkpointing
from thrifty.methods.offload.activation_offload import HostActivations

FAMILIES = {
    "llama": lambda: tiny.llama(dropout=0.2),
    "gpt2": lambda: tiny.gpt2(dropout=0.2),
    "bert": lambda: tiny.bert(dropout=0.2),
    "vit": tiny.vit,
}


def _gradients(model: nn.Module, host: HostActivations | None) -> dict[str, torch.Tensor]:
    model.train()
    torch.manual_seed(9)
    inputs = loops.batch(model)
    if host is None:
        loss = model(**inputs).loss
    else:
        with host.around(model):
            loss = model(**inputs).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("least", [1, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_equal(family, least):
    host = HostActivations(least)
    tiny.assert_same(_gradients(FAMILIES[family](), host), _gradients(FAMILIES[family](), None))
    assert host.moved_bytes > 0


def test_what_moves():
    """One linear layer and an embedding: the input moves once, though two layers save it; weights and indices stay."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.a, self.b = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            return (self.a(x) + self.b(x.view(-1, 8)).view(4, 5, 8)).sum()

    host = HostActivations(1)
    model = Net()
    ids = torch.arange(20).view(4, 5) % 10
    with host.around(model):
        loss = model(ids)
    assert host.moved_bytes == 4 * 5 * 8 * 4
    loss.backward()
    reference = Net()
    reference.load_state_dict(model.state_dict())
    reference(ids).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_the_original_is_freed():
    host = HostActivations(1, forget=True)
    x = torch.randn(64, 64, requires_grad=True) * 1
    storage = x.untyped_storage()
    import weakref

    gone: list[int] = []
    weakref.finalize(storage, gone.append, 1)
    with host.around(nn.Linear(1, 1)):
        y = x.square().sum()
    del x, storage
    assert gone == [1]
    del y


def test_a_tensor_written_between_two_uses_moves_twice():
    host = HostActivations(1)
    w = torch.ones(16, requires_grad=True)
    with host.around(nn.Linear(1, 1)):
        x = torch.full((16,), 2.0)
        first = (w * x).sum()
        x.mul_(3)
        second = (w * x).sum()
    (first + second).backward()
    assert torch.equal(w.grad, torch.full((16,), 8.0))  # type: ignore[arg-type]


def test_under_checkpointing_only_inputs_of_blocks_move():
    moved = {}
    for checkpointed in (False, True):
        model = tiny.llama(4, dropout=0.2)
        if checkpointed:
            enable_checkpointing(model, {"use_reentrant": False})
        host = HostActivations(1)
        grads = _gradients(model, host)
        tiny.assert_same(grads, _gradients(tiny.llama(4, dropout=0.2), None))
        moved[checkpointed] = host.moved_bytes
    assert moved[True] < moved[False] / 3


def test_own_loops_agree():
    def make() -> loops.Setup:
        model = tiny.llama(dropout=0.2)
        context = functools.partial(HostActivations(1).around, model)
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2), context=context)

    setup, losses = loops.both_loops(make)
    torch.manual_seed(5)
    plain, plain_losses = loops.baseline(lambda: tiny.llama(dropout=0.2))
    assert losses == plain_losses
    tiny.assert_same(tiny.weights(setup.model), tiny.weights(plain))


@pytest.mark.parametrize("extra", [[], [{"gradient-checkpointing": {"policy": "optimal", "budget": 0.7}}]])
def test_trains_and_resumes(tmp_path, extra):
    run = loops.resumes(tmp_path, [{"activation-offload": {"least": 1}}, *extra], lambda: tiny.gpt2(3, dropout=0.2))
    assert run.recipe["activation-offload"].host.moved_bytes > 0
    plain = tiny.trainer(tmp_path / "plain", [], tiny.gpt2(3, dropout=0.2), max_steps=3)
    plain.train()
    tiny.assert_same(tiny.weights(run.model), tiny.weights(plain.model))


def test_bad_settings():
    with pytest.raises(InputError, match="least must be at least 1"):
        Recipe.parse([{"activation-offload": {"least": 0}}])
    with pytest.raises(InputError, match="prefetch must not be negative"):
        Recipe.parse([{"activation-offload": {"prefetch": -1}}])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_device_holds_less():
    def peak(host: HostActivations | None) -> tuple[int, torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))).cuda()
        x = torch.randn(4096, 1024, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        if host is None:
            loss = layers(x).square().mean()
        else:
            with host.around(layers):
                loss = layers(x).square().mean()
        held = torch.cuda.memory_allocated()
        loss.backward()
        return held, next(layers.parameters()).grad.clone()  # type: ignore[union-attr]

    plain, expected = peak(None)
    ours, got = peak(HostActivations())
    assert torch.equal(expected, got)
    torch.cuda.synchronize()
    assert ours < plain - 8 * 4096 * 1024 * 4
