"""Compute-optimal sizing against the published identities."""

from __future__ import annotations

from typing import Any

import pytest

from thrifty.errors import InputError
from thrifty.hardware.devices import get_device
from thrifty.planner.sizing import (
    APPROACHES,
    PUBLISHED,
    REFIT,
    optimal_parameters,
    parse_duration,
    size_for_flops,
    size_for_time,
    suggest_shape,
    training_flops,
)


def test_chinchilla_itself() -> None:
    assert training_flops(70e9, 1.4e12) == pytest.approx(5.88e23)
    assert optimal_parameters(5.88e23, "1") == pytest.approx(70e9)
    assert optimal_parameters(5.88e23, "2") == pytest.approx(70e9)


def test_four_times_the_compute_doubles_the_size_under_approach_1() -> None:
    assert optimal_parameters(4e19) == pytest.approx(2 * optimal_parameters(1e19))
    assert optimal_parameters(4e19, "2") / optimal_parameters(1e19, "2") == pytest.approx(4**0.49)


@pytest.mark.parametrize("law", [PUBLISHED, REFIT])
@pytest.mark.parametrize("flops", [1e18, 1e21, 5.76e23])
def test_the_parametric_optimum_is_a_minimum_along_equal_compute(law, flops: float) -> None:
    best = law.optimal_parameters(flops)

    def loss(n: float) -> float:
        return law.loss(n, flops / (6 * n))

    h = best * 1e-4
    slope = (loss(best + h) - loss(best - h)) / (2 * h)
    assert abs(slope * best) < 1e-6
    assert loss(best) < min(loss(best * 0.9), loss(best * 1.1))


def test_the_rounded_published_constants_disagree_with_the_paper() -> None:
    assert optimal_parameters(5.76e23, "3") == pytest.approx(3.2e10, rel=0.02)


@pytest.mark.parametrize("approach", list(APPROACHES))
def test_a_sizing_spends_the_budget(approach: str) -> None:
    sizing = size_for_flops(1e19, approach=approach)
    assert 6 * sizing.parameters * sizing.tokens == pytest.approx(1e19)
    assert set(sizing.alternatives) == set(APPROACHES) - {approach}


@pytest.mark.parametrize("parameters", [5e6, 3e7, 1.2e8, 1e9, 7e9, 7e10])
def test_the_suggested_shape_has_the_size(parameters: float) -> None:
    vocab = 2048 if parameters < 1e8 else 32000
    shape = suggest_shape(parameters, vocab)
    assert shape["parameters"] == pytest.approx(parameters, rel=0.15)
    assert shape["hidden_size"] % shape["num_attention_heads"] == 0


def test_the_suggested_shape_counts_like_the_real_model() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = dict(suggest_shape(2e8))
    counted = shape.pop("parameters")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **shape))
    assert sum(p.numel() for p in model.parameters()) == counted


def test_time_budget_is_rate_times_time() -> None:
    device = get_device("a100")
    one = size_for_time(3600, device)
    assert one.flops == pytest.approx(3600 * 312e12 * 0.4)
    assert size_for_time(3600, device, devices=8, utilisation=0.5).flops == pytest.approx(8 * 3600 * 312e12 * 0.5)
    assert "40%" in one.assumptions[0]


def test_attention_and_recomputation_cost_extra() -> None:
    base = training_flops(1e9, 1e6)
    assert training_flops(1e9, 1e6, layers=24, hidden=2048, seq_len=4096) == base + 12 * 24 * 4096 * 2048 * 1e6
    assert training_flops(1e9, 1e6, recompute=True) == pytest.approx(base * 8 / 6)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("45m", 2700), ("2h", 7200), ("1.5d", 129600), ("1h30m", 5400), ("12", 12)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "call",
    [
        lambda: size_for_flops(0),
        lambda: size_for_flops(float("nan")),
        lambda: size_for_flops(1e19, approach="4"),
        lambda: size_for_time(-1, get_device("t4")),
        lambda: size_for_time(1, get_device("t4"), devices=0),
        lambda: size_for_time(1, get_device("t4"), utilisation=1.5),
        lambda: parse_duration("two hours"),
        lambda: parse_duration("2h xx"),
    ],
)
def test_nonsense_is_an_input_error(call) -> None:
    with pytest.raises(InputError):
        call()
