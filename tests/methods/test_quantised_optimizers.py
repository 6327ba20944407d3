"""Optimizer states in few bits: code books and rounding against the libraries, and how far the steps are from AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.optimizers._quantised import (
    Codec,
    QuantisedAdamW,
    QuantisedLion,
    dynamic_map,
    linear_map,
    scaled_blocks,
)

EIGHT, FOUR, FP8 = Codec(bits=8, block=256), Codec(bits=4, block=128), Codec(bits=8, block=256, kind="fp8")
NAMES = ["adamw-8bit", "paged-adamw-8bit", "adamw-4bit", "adamw-fp8", "lion-8bit"]


def _network(width: int = 96) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20) -> float:
    rng = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(32, 64, generator=rng)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _distance(a: nn.Module, b: nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_book_is_that_of_bitsandbytes(signed):
    theirs = pytest.importorskip("bitsandbytes").functional.create_dynamic_map(signed)
    torch.testing.assert_close(torch.tensor(dynamic_map(signed)), theirs, rtol=0, atol=1e-7)
    assert len(set(dynamic_map(signed))) == 256


def test_the_small_code_books_are_those_of_torchao():
    subclass = pytest.importorskip("torchao.optim.subclass_4bit")
    assert dynamic_map(True, 3, 4) == pytest.approx(subclass.get_qmap_signed(), abs=1e-7)
    assert linear_map() == pytest.approx(subclass.get_qmap_unsigned(), abs=1e-7)


@pytest.mark.parametrize("codec", [EIGHT, FOUR, FP8], ids=["8", "4", "fp8"])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("count", [1024, 1000, 3])
def test_round_trip(codec, signed, count):
    """The error is at most half of the largest gap of the book; the largest entry of each block is exact."""
    torch.manual_seed(0)
    x = torch.randn(count) * torch.logspace(-4, 1, count)
    x = x if signed else x.abs()
    codes, scale = codec.encode(x, signed)
    assert codes.dtype == torch.uint8
    assert codes.numel() == -(-count // codec.block) * codec.block * codec.bits // 8
    back = codec.decode(codes, scale, x.shape, signed)
    book = codec.book(signed, x.device)
    # Beyond the ends of a book it may be farther: from -0.99 to -1, and from 1/16 to 0.
    gap = float(book.diff().max()) / 2 if codec.kind == "map" else 1 / 16
    if codec.kind == "map":
        gap = max(gap, float(1 + book[0]) if signed else float(book[0]))
    blocks = scale.repeat_interleave(codec.block)[:count]
    assert ((back - x).abs() <= gap * blocks * 1.001).all()
    for index, start in enumerate(range(0, count, codec.block)):
        block = x[start : start + codec.block]
        largest = block.abs().argmax()
        if block[largest] > 0:
            assert back[start + largest] == pytest.approx(float(scale[index]))


def test_codes_are_the_nearest_entries_as_in_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes").functional
    torch.manual_seed(0)
    x = torch.randn(4096)
    book = torch.tensor(dynamic_map(True))
    theirs, state = bnb.quantize_blockwise(x, code=book, blocksize=256)
    codes, scale = EIGHT.encode(x, True)
    torch.testing.assert_close(scale, state.absmax)
    assert (codes.flatten() != theirs.flatten()).float().mean() < 2e-3  # where two entries are equally near


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_torchao(signed):
    utils = pytest.importorskip("torchao.optim.quant_utils")
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    values, _ = scaled_blocks(x if signed else x.abs(), 128)
    book = FOUR.book(signed, x.device)
    theirs = utils.quantize_4bit_with_qmap(values.flatten(), book).view(-1, 2)
    codes, _ = FOUR.encode(x if signed else x.abs(), signed)
    assert torch.equal(codes.flatten(), theirs[:, 0] << 4 | theirs[:, 1])


def test_zeros_stay_zeros():
    for codec in (EIGHT, FP8):
        for signed in (True, False):
            assert not codec.decode(*codec.encode(torch.zeros(300), signed), torch.Size([300]), signed).any()


@pytest.mark.parametrize(("codec", "far"), [(EIGHT, 0.012), (FOUR, 0.03), (FP8, 0.012)], ids=["8", "4", "fp8"])
def test_distance_from_adamw(codec, far):
    """Of the order that the libraries' own have after 20 steps at 1e-3: 1.1e-2, 2.0e-2 and 7.2e-3; the loss agrees."""
    plain, low = _network(), _network()
    reference = _train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01))
    loss = _train(low, QuantisedAdamW(low.parameters(), codec, lr=1e-3, weight_decay=0.01))
    assert 1e-5 < _distance(plain, low) < far
    assert loss == pytest.approx(reference, rel=0.03 if codec is FOUR else 0.01)


def test_small_tensors_are_adamw():
    plain, low = _network(), _network()
    _train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01))
    _train(low, QuantisedAdamW(low.parameters(), EIGHT, lr=1e-3, weight_decay=0.01, min_size=10**6))
    assert _distance(plain, low) < 1e-6


@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_steps_are_those_of_bitsandbytes(kind):
    """Its own CPU kernels; a code that falls on the other side of a rounding threshold moves a weight a little."""
    bnb = pytest.importorskip("bitsandbytes").optim
    ours, theirs = _network(), _network()
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    if kind == "adamw":
        optimizers = (
            QuantisedAdamW(ours.parameters(), EIGHT, **settings),
            bnb.AdamW8bit(theirs.parameters(), **settings),
        )
    else:
        optimizers = QuantisedLion(ours.parameters(), EIGHT, **settings), bnb.Lion8bit(theirs.parameters(), **settings)
    losses = _train(ours, optimizers[0], 3), _train(theirs, optimizers[1], 3)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    off = torch.cat(
        [(p - q).detach().abs().flatten() for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)]
    )
    assert (off > 1e-5).float().mean() < 0.02


def test_bytes_of_the_states():
    """Two states of one byte, two of half a byte, and a float32 scale for each block."""
    for codec, wanted in ((EIGHT, 2 + 8 / 256), (FOUR, 1 + 8 / 128), (FP8, 2 + 8 / 256)):
        p = nn.Parameter(torch.randn(64, 256))
        optimizer = QuantisedAdamW([p], codec)
        p.grad = torch.randn_like(p)
        optimizer.step()
        held = sum(v.numel() * v.element_size() for v in optimizer.state[p].values() if torch.is_tensor(v))
        assert held == wanted * p.numel()


def test_half_precision_weights_and_exact_checkpoints():
    p = nn.Parameter(torch.randn(80, 64).bfloat16())
    optimizer = QuantisedAdamW([p], EIGHT, lr=1e-2)
    p.grad = torch.randn_like(p)
    optimizer.step()
    again = QuantisedAdamW([p], EIGHT, lr=1e-2)
    again.load_state_dict(optimizer.state_dict())
    for key, value in optimizer.state[p].items():
        assert again.state[p][key] is not value or not torch.is_tensor(value)
        same = torch.equal(again.state[p][key], value) if torch.is_tensor(value) else again.state[p][key] == value
        assert same, key
    assert again.state[p]["exp_avg_codes"].dtype == torch.uint8


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_keep_their_precision(tmp_path, name):
    run = tiny.trainer(tmp_path, [{name: {"min_size": 16}}], tiny.gpt2(), max_steps=2)
    run.train()
    for key, p in run.model.named_parameters():
        state = run.ctx.optimizer.state[p]
        embedding = key in ("transformer.wte.weight", "transformer.wpe.weight")
        assert ("exp_avg" in state) is (embedding or p.numel() < 16), key


def test_paged_is_not_another_arithmetic(tmp_path):
    results = []
    for name in ("adamw-8bit", "paged-adamw-8bit"):
        run = tiny.trainer(tmp_path / name, [{name: {"min_size": 16}}])
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(*results)


@pytest.mark.parametrize("name", ["adamw-8bit", "paged-adamw-8bit", "lion-8bit"])
def test_the_librarys_kernels_train_and_resume(tmp_path, name):
    pytest.importorskip("bitsandbytes")
    method = {name: {"min_size": 16, "implementation": "library"}}
    run = loops.resumes(tmp_path, [method], tiny.llama, max_steps=4)
    assert type(run.ctx.optimizer).__module__.startswith("bitsandbytes")
    states = {n: run.ctx.optimizer.state[p]["state1"].dtype for n, p in run.model.named_parameters()}
    assert states["model.embed_tokens.weight"] == torch.float32
    assert states["model.layers.0.mlp.up_proj.weight"] == torch.uint8


@pytest.mark.parametrize("name", NAMES)
def test_after_growth_copied_blocks_keep_their_states(tmp_path, name):
    methods = [{name: {"min_size": 16}}, {"stacking": {"start_layers": 1, "boundaries": [0.5]}}]
    loops.resumes(tmp_path, methods, tiny.llama, max_steps=4, step=2)


def test_in_ones_own_loop():
    for kind in (QuantisedAdamW, QuantisedLion):

        def make(kind: Any = kind) -> loops.Setup:
            model = tiny.llama()
            return loops.Setup(model, kind(model.parameters(), EIGHT, lr=1e-2, min_size=16))

        _, losses = loops.both_loops(make)
        assert losses != loops.baseline(tiny.llama)[1]


def test_refused(tmp_path, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotApplicable, match=r"thrifty\[quant\]"):
        tiny.trainer(tmp_path, [{"adamw-8bit": {"implementation": "library"}}])
    for name in NAMES:
        with pytest.raises(InputError, match="min_size"):
            Recipe.parse([{name: {"min_size": -1}}])
