"""Activation compression: exact losses, unbiased gradients with the variance of the formula, bytes as promised."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty._hf import enable_checkpointing
from thrifty.methods.precision._quantize import WIDTHS, allocate, dequantize, quantize
from thrifty.methods.precision.activation_compression import CompressedActivations, divide, sensitivities
from thrifty.planner._private import profiled_allocations


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the quantiser ---


@pytest.mark.parametrize("bits", WIDTHS)
def test_unbiased_with_the_variance_of_the_formula(bits):
    """Each value lies f of the way between two levels: mean 0 error, variance f (1 - f) step^2."""
    x = torch.randn(512, generator=generator(1)) * 3 + 1
    rng, draws = generator(2), 3000
    errors = torch.stack([dequantize(quantize(x, bits, generator=rng)) - x for _ in range(draws)])
    packed = quantize(x, bits, generator=rng)
    step = packed.step.float().repeat_interleave(256)
    place = (x - packed.low.float().repeat_interleave(256)) / step
    fraction = place - place.floor()
    variance = fraction * (1 - fraction) * step**2
    assert (errors.mean(0).abs() <= 6 * (variance / draws).sqrt() + 1e-6 * step).all()
    torch.testing.assert_close(errors.var(0).mean(), variance.mean(), rtol=0.05, atol=1e-7)
    assert (variance <= step**2 / 4 + 1e-7).all()
    assert (errors.abs() <= step * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_on_the_grid_are_exact(bits, dtype):
    levels = 2**bits
    x = (torch.arange(512) % levels).to(dtype) * 0.5 - 2
    back = dequantize(quantize(x, bits, generator=generator()))
    assert back.dtype == dtype
    assert torch.equal(back, x)
    constant = torch.full((256,), 0.75, dtype=dtype)
    assert torch.equal(dequantize(quantize(constant, bits, generator=generator())), constant)


@pytest.mark.parametrize("bits", WIDTHS)
def test_bytes(bits):
    x = torch.randn(256 * 12)
    assert quantize(x, bits).nbytes == x.numel() * bits // 8 + 12 * 4
    odd = torch.randn(1000)
    assert dequantize(quantize(odd, bits)).shape == (1000,)


def test_ranges_hold_every_value():
    """Rounding a range to bfloat16 must not cut off its ends."""
    x = torch.rand(256 * 64, generator=generator(3)) * torch.logspace(-3, 3, 64).repeat_interleave(256)
    packed = quantize(x, 2)
    assert (packed.low.float() <= x.view(64, 256).amin(1)).all()
    assert (packed.low.float() + 3 * packed.step.float() >= x.view(64, 256).amax(1) * (1 - 1e-6)).all()


def test_division_of_bits():
    rng = torch.Generator().manual_seed(5)
    for _ in range(20):
        costs = (10 ** (torch.rand(5, generator=rng) * 4)).tolist()
        sizes = (torch.randint(1, 5, (5,), generator=rng) * 100).tolist()

        def variance(bits: Any, costs: list[float] = costs) -> float:
            return sum(c * 4.0 ** -(b - 1) for c, b in zip(costs, bits, strict=True))

        for average in (2, 3, 4):
            bits = allocate(costs, sizes, average)
            within = [
                some
                for some in itertools.product(WIDTHS, repeat=5)
                if sum(b * n for b, n in zip(some, sizes, strict=True)) <= average * sum(sizes)
            ]
            assert tuple(bits) in within
            assert variance(bits) <= variance([2 if average < 4 else 4] * 5)
            # Greedy: as good as the best of all, but for one step that the budget cut off.
            assert variance(bits) <= 4 * min(map(variance, within))
    assert allocate([1.0, 1.0], [10, 10], 4) == [4, 4]
    assert allocate([1e6, 1.0], [10, 10], 5) == [8, 2]


# --- training with it ---


def test_a_linear_layer():
    """x is saved for the weight's gradient only: that one is unbiased, the one of x is exact, and so is the loss."""
    torch.manual_seed(1)
    layer = nn.Linear(64, 32)
    x = torch.randn(64, 64, requires_grad=True)
    out = layer(x).square().sum()
    weight_gradient, x_gradient = torch.autograd.grad(out, (layer.weight, x))
    compressed = CompressedActivations(2, least=1)
    draws = []
    for seed in range(300):
        compressed.begin(seed)
        with compressed.around(layer):
            hidden = layer(x)
        loss = hidden.square().sum()
        assert torch.equal(loss, out)
        w, g = torch.autograd.grad(loss, (layer.weight, x))
        assert torch.equal(g, x_gradient)
        draws.append(w)
    noisy = torch.stack(draws)
    assert not torch.equal(noisy[0], noisy[1])
    error = noisy.mean(0) - weight_gradient
    assert error.abs().max() < 6 * noisy.std(0).max() / 300**0.5


def _gradients(model: nn.Module, compressed: CompressedActivations | None, seed: int = 0) -> dict[str, torch.Tensor]:
    model.train()
    model.zero_grad()
    torch.manual_seed(9)
    inputs = loops.batch(model)
    if compressed is None:
        loss = model(**inputs).loss
    else:
        compressed.begin(seed)
        with compressed.around(model):
            loss = model(**inputs).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_loss_exact_and_gradients_near(family):
    model = tiny.FAMILIES[family]()
    exact = _gradients(model, None)
    tiny.assert_same(_gradients(model, CompressedActivations(32, least=1)), exact)
    distance = {}
    for bits in (8, 4, 2):
        compressed = CompressedActivations(bits, least=1)
        got = [_gradients(model, compressed, seed) for seed in range(4)]
        assert all(torch.equal(g["loss"], exact["loss"]) for g in got)
        distance[bits] = sum(float((g[n] - exact[n]).square().sum()) for g in got for n in exact)
        assert compressed.packed_bytes < compressed.plain_bytes
    assert 0 < distance[8] < distance[4] < distance[2]
    norm = sum(float(exact[n].square().sum()) for n in exact)
    assert distance[8] / 4 < 0.01 * norm


def test_one_storage_is_packed_once():
    """An input that two layers save, one of them as a view, and the three parts of a fused projection."""
    compressed = CompressedActivations(4, least=1)
    compressed.begin(0)
    x = torch.randn(4, 64, 16, requires_grad=True)
    net = nn.Module()
    net.weight = weight = nn.Parameter(torch.ones(16))
    with compressed.around(net):
        first, second = x * weight, x.view(-1, 16) * weight
        q, k, v = (x.view(4, 64, 16) * 1).chunk(3, dim=1)[:3]
        third = [part * weight for part in (q, k, v)]
    assert len(compressed.sizes) == 2
    total = first.sum() + second.sum() + torch.cat(third, 1).sum()
    total.backward()
    expected = 3 * x.detach().sum((0, 1))
    assert (weight.grad - expected).abs().max() < 0.2 * expected.abs().max() + 10  # type: ignore[operator]


def test_weights_indices_and_statistics_stay():
    model = tiny.llama()
    compressed = CompressedActivations(2, least=1)
    compressed.begin(0)
    seen: list[tuple[Any, bool]] = []
    original = compressed.store
    compressed.store = lambda t: (seen.append((t, compressed.attention)), original(t))[1]  # type: ignore[method-assign]
    with compressed.around(model):
        model.train()(**loops.batch(model))
    weights = {p.data_ptr() for p in model.parameters()}
    assert seen
    assert all(t.is_floating_point() and t.data_ptr() not in weights for t, _ in seen)
    assert any(attention for _, attention in seen)
    assert all(t.isfinite().all() for t, _ in seen)  # no masks


def test_real_bytes():
    """The allocator's own events: what is held between forward and backward."""

    def forward(bits: int) -> tuple[int, int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))
        compressed = CompressedActivations(bits)
        x = torch.randn(512, 256, requires_grad=True)
        compressed.begin(0)
        with torch.profiler.profile(profile_memory=True) as profile, compressed.around(model):
            loss = model(x).sum()
        assert loss.requires_grad
        return sum(profiled_allocations(profile)), compressed.packed_bytes

    held, counted = {}, {}
    for bits in (32, 8, 4, 2):
        held[bits], counted[bits] = forward(bits)
    assert held[32] > 11 * 512 * 256 * 4
    for bits in (8, 4, 2):
        # The input itself is outside; it is held in its packed form too.
        assert held[bits] == pytest.approx(counted[bits], rel=0.01)
        assert held[bits] < held[32] * bits / 32 * 1.3


def test_sensitivities_find_what_matters():
    """Two layers save inputs of unequal spread: the wide one costs more variance, and gets more bits."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 8), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.a(x).sum() + self.b(y).sum()

    torch.manual_seed(2)
    net = Net()
    x, y = torch.randn(64, 64, requires_grad=True), (100 * torch.randn(64, 64)).requires_grad_()
    compressed = CompressedActivations(4, least=1)
    found = sensitivities(compressed, net, lambda: net(x, y), "cpu", 7)
    assert len(found) == 2
    assert found[1] > 1000 * found[0] > 0
    assert divide(found, compressed, 5) == [2, 8]
    # The model of variance: one bit more on the whole range is a quarter of it or less.
    at = {}
    exact = torch.autograd.grad(net(x, y), net.b.weight)[0]
    for bits in (1, 2, 4):
        compressed.bits, total = bits, 0.0
        for seed in range(20):
            compressed.begin(seed)
            with compressed.around(net):
                loss = net(x, y)
            total += float((torch.autograd.grad(loss, net.b.weight)[0] - exact).square().sum())
        at[bits] = total / 20
    assert at[1] == pytest.approx(found[1], rel=0.3)
    assert at[2] < at[1] / 4
    assert at[4] < at[2] / 16


def test_with_checkpointing_only_inputs_of_blocks_are_packed():
    packed = {}
    for checkpointed in (False, True):
        model = tiny.llama(4)
        if checkpointed:
            enable_checkpointing(model, {"use_reentrant": False})
        compressed = CompressedActivations(8, least=1)
        exact, got = _gradients(model, None), _gradients(model, compressed)
        assert torch.equal(got["loss"], exact["loss"])
        norm = sum(float(g.square().sum()) for g in exact.values())
        assert sum(float((got[n] - exact[n]).square().sum()) for n in exact) < 0.02 * norm
        packed[checkpointed] = compressed.packed_bytes
    assert packed[True] < packed[False] / 2


def test_own_loops_agree():
    def make() -> loops.Setup:
        model = tiny.bert()
        compressed = CompressedActivations(4, least=1)
        return loops.Setup(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            before_step=lambda step: compressed.begin(step),
            context=functools.partial(compressed.around, model),
        )

    _, losses = loops.both_loops(make)
    _, plain = loops.baseline(tiny.bert)
    assert losses[0] == plain[0]
    assert losses != plain


@pytest.mark.parametrize("family", ["gpt2", "bert", "vit"])
@pytest.mark.parametrize("level", ["L2.1", "mesa"])
def test_trains_and_resumes(tmp_path, family, level):
    settings = {"level": level, "least": 64, "refresh": 2}
    run = loops.resumes(tmp_path, [{"activation-compression": settings}], tiny.FAMILIES[family], step=1, max_steps=3)
    method = run.recipe["activation-compression"]
    if level == "L2.1":
        assert len(method.sensitivity) == len(method.compressed.sizes)
        assert len(set(method.compressed.table)) > 1


def test_accumulation_draws_other_noise(tmp_path):
    run = tiny.trainer(
        tmp_path, [{"activation-compression": {"least": 64}}], gradient_accumulation_steps=2, max_steps=2
    )
    seeds: list[int] = []
    run.recipe["activation-compression"]._seed = _watched(run.recipe["activation-compression"], seeds)  # type: ignore
    run.train()
    assert len(set(seeds[-4:])) == 4


def _watched(method: Any, seeds: list[int]) -> Any:
    original = type(method)._seed

    def seed(ctx: Any) -> int:
        seeds.append(original(method, ctx))
        return seeds[-1]

    return seed


def test_refuses_compiled_models(tmp_path):
    with pytest.raises(NotApplicable, match="the compiler decides itself"):
        tiny.trainer(tmp_path, ["activation-compression"], torch_compile=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "L3"}, "is not one of"),
        ({"group": 12}, "multiple of 8"),
        ({"refresh": 0}, "refresh must be at least"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(InputError, match=message):
        Recipe.parse([{"activation-compression": settings}])
