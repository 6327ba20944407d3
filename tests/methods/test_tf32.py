"""TF32: the rounding against an independent computation, and the refusal where there are no such units."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import tiny
from methods import loops
from thrifty import NotApplicable
from thrifty.methods.precision.tf32 import enable_tf32, round_to_tf32, tf32_supported


def _expected(x: np.ndarray) -> np.ndarray:
    """Rounding to 11 significant bits in float64, ties away from zero."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    units = mantissa * 2.0**11
    rounded = np.copysign(np.floor(np.abs(units) + 0.5), units)
    return np.ldexp(rounded, exponent - 11)


def test_rounding_is_that_of_the_tensor_core():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 4096)
    rounded = round_to_tf32(x)
    np.testing.assert_array_equal(rounded.numpy().astype(np.float64), _expected(x.numpy()))
    error = ((rounded - x).abs() / x.abs()).max().item()
    assert 2**-12 < error <= 2**-11
    assert round_to_tf32(torch.tensor(1 + 2**-10)).item() == 1 + 2**-10  # 10 bits of mantissa stay
    assert round_to_tf32(torch.tensor(1 + 2**-12)).item() == 1
    assert torch.equal(round_to_tf32(rounded), rounded)


def test_rounding_keeps_special_values():
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    assert torch.equal(round_to_tf32(special).view(torch.int32), special.view(torch.int32))
    # All payloads of a NaN, also the one whose bits are all ones.
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert round_to_tf32(nans).isnan().all()


def test_products_of_rounded_inputs_are_close():
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(64, 64, generator=generator), torch.randn(64, 64, generator=generator)
    exact = a.double() @ b.double()
    error = (round_to_tf32(a).double() @ round_to_tf32(b).double() - exact).abs().max().item()
    assert 0 < error < 64 * 2 * 2**-11


@pytest.fixture
def restored():
    cuda = torch.backends.cuda.matmul.fp32_precision
    cudnn = torch.backends.cudnn.conv.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.backends.cuda.matmul.fp32_precision = cuda
    torch.backends.cudnn.conv.fp32_precision = cudnn  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.usefixtures("restored")
def test_own_loops_agree():
    """The switch concerns CUDA only: on this side of the bus nothing changes, to the bit."""

    def make() -> loops.Setup:
        enable_tf32()
        model = tiny.llama()
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    _, losses = loops.both_loops(make)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert losses == loops.baseline(tiny.llama)[1]


@pytest.mark.skipif(tf32_supported(), reason="this machine has TF32 units")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_refused_without_units(tmp_path, family):
    with pytest.raises(NotApplicable, match=r"tf32: .*cpu.* Fix: remove tf32"):
        tiny.trainer(tmp_path, ["tf32"], tiny.FAMILIES[family]())
