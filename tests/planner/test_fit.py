"""Laws in batch and sequence length, repetition of blocks, and the cost functions made of both."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from planner.cells import cell_step
from thrifty.errors import InputError
from thrifty.planner.fit import compile_many, compile_optimizer, compile_step
from thrifty.planner.laws import fit_laws
from thrifty.planner.memory import ClosedForm, OptimizerModel, StepModel
from thrifty.planner.program import FEATURES, features
from thrifty.planner.step import Step, hf_step
from thrifty.planner.trace import ALLOC, DIRECTIONS, FREE
from thrifty.planner.tracer import StepTracer

POINTS = [(3, 1408), (5, 1664), (7, 2176)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def cuda_step(config: str, **fields: Any) -> Step:
    return replace(cell_step(config, **fields), dialect="cuda", build_optimizer=adamw)


def full_trace(step: Step, layers: dict[str, int], batch: int, seq: int) -> tuple[int, str]:
    """Peak bytes and direction of the step traced at its full size."""
    trace = StepTracer(step, layers).forward_backward(batch, seq)
    sizes = np.ceil(trace.nbytes / 512) * 512
    signs = np.select([trace.kind == ALLOC, trace.kind == FREE], [1, -1], 0)
    owner = np.where(signs != 0, trace.ident, 0)
    memory = np.cumsum(sizes[owner] * signs)
    at = int(memory[trace.start - 1 :].argmax()) + trace.start - 1
    return int(memory[at]), DIRECTIONS[trace.direction[at]]


@given(st.sampled_from(range(len(FEATURES))), st.integers(1, 10**6))
def test_single_products_need_two_points(feature: int, factor: int) -> None:
    values = factor * features(*np.array(POINTS[:2]).T)[:, feature]
    laws = fit_laws(POINTS[:2], values[None])
    assert laws.exact.all()
    assert features(64, 8192) @ laws.coefficients[0] == pytest.approx(factor * features(64, 8192)[feature])


def test_shifted_lengths_need_two_points() -> None:
    values = np.array([[8.0 * b * (s + 1) for b, s in POINTS[:2]], [4.0 * (s - 1) for _, s in POINTS[:2]]])
    laws = fit_laws(POINTS[:2], values)
    assert laws.exact.all()
    assert np.allclose(laws.coefficients @ features(2, 100), [8 * 2 * 101, 4 * 99])


def test_sums_need_three_points_and_the_rest_is_not_called_exact() -> None:
    weights_and_rows = np.array([[1000.0 + 24 * b * s for b, s in POINTS]])
    assert not fit_laws(POINTS[:2], weights_and_rows[:, :2]).exact.any()
    laws = fit_laws(POINTS, weights_and_rows)
    assert laws.exact.all()
    assert laws.coefficients @ features(9, 9) == pytest.approx(1000 + 24 * 81)
    assert not fit_laws(POINTS, np.array([[1.0, 50.0, 3.0]])).exact.any()


@pytest.mark.parametrize(
    ("config", "checkpointing"), [("gpt2", False), ("llama", True), ("t5", True), ("mixtral", False)]
)
def test_depth_and_shape_together_are_exact(config: str, checkpointing: bool) -> None:
    step = cuda_step(config, dtype=torch.bfloat16, checkpointing=checkpointing)
    batches = ["many"] if config in ("t5", "mixtral") else ["many", "one"]
    model = compile_step(step, seq=256, batches=batches)
    for batch, seq, blocks in ((5, 480, 6), (16, 96, 4), (1, 512, 5))[: 1 + len(batches)]:
        layers = {name: blocks + 2 * index for index, name in enumerate(step.layers)}
        peak = model.peak(batch, seq, layers)
        expected, direction = full_trace(step, layers, batch, seq)
        assert peak.bytes == expected
        assert peak.phase.startswith(direction)


def test_alternating_blocks_are_repeated_by_period() -> None:
    kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(10)]
    config = transformers.Gemma3TextConfig(
        hidden_size=96, intermediate_size=208, num_hidden_layers=10, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, vocab_size=515, sliding_window=256, layer_types=kinds,
    )  # fmt: skip
    step = hf_step(config, "causal-lm", dtype=torch.bfloat16)
    assert step.base_counts() == {"num_hidden_layers": 4}
    # Below the window all blocks are alike for the kernel; above it, every third one sees the whole sequence.
    for seq in (192, 640):
        model = compile_step(step, seq=seq, batches=["many"])
        assert model.peak(2, seq).bytes == full_trace(step, {"num_hidden_layers": 10}, 2, seq)[0]
        with pytest.raises(InputError, match="multiple of 3"):
            model.peak(2, seq, {"num_hidden_layers": 9})
    with pytest.raises(InputError, match="traced for other sequence lengths"):
        model.peak(2, 192)


@pytest.fixture(scope="module")
def llama() -> tuple[StepModel, OptimizerModel]:
    step = replace(cuda_step("llama", dtype=torch.bfloat16), layers={"num_hidden_layers": 32})
    return compile_step(step), compile_optimizer(step)


def test_parts_add_up_and_name_the_place(llama: tuple[StepModel, OptimizerModel]) -> None:
    model, optimizer = llama
    peak = model.peak(4, 512, optimizer=optimizer)
    assert sum(peak.breakdown.values()) == peak.bytes
    assert peak.breakdown["optimizer"] == optimizer.state_bytes() > 2 * peak.breakdown["parameters"] * 0.99
    deep = model.peak(2, 8192)
    assert deep.phase in {"backward: loss", "forward: loss", "backward: model.layers[31]"}


def test_many_at_once_are_the_single_ones(llama: tuple[StepModel, OptimizerModel]) -> None:
    model, optimizer = llama
    batch, seq, accumulation = (
        np.array([1, 2, 7, 1, 64]),
        np.array([64, 100, 999, 4096, 128]),
        np.array([1, 3, 1, 2, 1]),
    )
    many = model.peaks(batch, seq, accumulation=accumulation, optimizer=optimizer)
    single = [
        model.peak(b, s, accumulation=a, optimizer=optimizer).bytes
        for b, s, a in zip(batch.tolist(), seq.tolist(), accumulation.tolist(), strict=True)
    ]
    assert many.tolist() == single


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_timeline_reaches_the_peak(llama: tuple[StepModel, OptimizerModel], accumulation: int) -> None:
    model, optimizer = llama
    settings: dict[str, Any] = {
        "accumulation": accumulation,
        "optimizer": optimizer,
        "layers": {"num_hidden_layers": 7},
    }
    timeline = model.timeline(2, 300, **settings)
    peak = model.peak(2, 300, **settings)
    totals = timeline.bytes.sum(axis=0)
    assert totals.max() == peak.bytes
    assert timeline.phases[int(totals.argmax())] == peak.phase
    assert timeline.bytes.min() >= 0
    usage = model.reserved(2, 300, **settings)
    assert usage.reserved >= usage.allocated >= peak.bytes


def test_operations_grow_with_depth_and_tokens(llama: tuple[StepModel, OptimizerModel]) -> None:
    model, optimizer = llama

    def flops(batch: int, seq: int, blocks: int) -> float:
        ops = model.ops(batch, seq, {"num_hidden_layers": blocks})
        return float((ops["count"] * ops["flops"]).sum())

    assert flops(8, 512, 4) == pytest.approx(4 * flops(2, 512, 4))
    assert flops(2, 64, 10) - flops(2, 64, 6) == pytest.approx(2 * (flops(2, 64, 8) - flops(2, 64, 6)))
    step = replace(cuda_step("llama", dtype=torch.bfloat16))
    traced = StepTracer(step, {"num_hidden_layers": 5}).forward_backward(3, 96)
    ops = model.ops(3, 96, {"num_hidden_layers": 5})
    for column in ("flops", "read", "written"):
        at = ("flops", "read", "written").index(column)
        assert (ops["count"] * ops[column]).sum() == pytest.approx(traced.op_numbers[:, at].sum())
    updates = optimizer.ops({"num_hidden_layers": 9})
    assert (updates["count"] * updates["read"]).sum() > 4 * 2 * model.parameter_count({"num_hidden_layers": 9})


def test_parameters_are_counted_by_depth(llama: tuple[StepModel, OptimizerModel]) -> None:
    real = cell_step("llama").build_model({"num_hidden_layers": 9})
    expected = sum(parameter.numel() for parameter in real.parameters())
    assert llama[0].parameter_count({"num_hidden_layers": 9}) == expected
    assert llama[0].parameter_count({"num_hidden_layers": 9}, trainable=False) == 0


def test_a_closed_form_costs_what_the_traced_optimizer_does(llama: tuple[StepModel, OptimizerModel]) -> None:
    model, traced = llama
    closed = ClosedForm(lambda shape, dtype: 2 * 2 * int(np.prod(shape)))
    for batch, seq in ((1, 64), (8, 2048)):
        by_form, by_trace = (model.peak(batch, seq, optimizer=o) for o in (closed, traced))
        assert by_form.bytes == pytest.approx(by_trace.bytes, rel=1e-2)
    everything = ClosedForm(closed.state_bytes, temporary="all")
    peak = model.peak(1, 16, optimizer=everything)
    assert peak.phase == "optimizer: step"
    assert peak.breakdown["temporaries"] == pytest.approx(2 * model.parameter_count(), rel=1e-3)
    assert model.timeline(1, 16, optimizer=everything).bytes.sum(axis=0).max() == peak.bytes


def test_models_survive_the_disk(llama: tuple[StepModel, OptimizerModel], tmp_path: Path) -> None:
    llama[0].save(tmp_path / "step.npz")
    llama[1].save(tmp_path / "optimizer.npz")
    model, optimizer = StepModel.load(tmp_path / "step.npz"), OptimizerModel.load(tmp_path / "optimizer.npz")
    assert model.peak(3, 777, optimizer=optimizer) == llama[0].peak(3, 777, optimizer=llama[1])
    assert np.array_equal(model.ops(3, 777), llama[0].ops(3, 777))
    assert model.parameter_counts() == llama[0].parameter_counts()


def test_processes_give_what_one_process_gives() -> None:
    jobs = [partial(compile_step, cuda_step(name), seq=128, batches=("one",)) for name in ("llama", "gpt2")]
    for parallel, alone in zip(compile_many(jobs, processes=2), compile_many(jobs, processes=1), strict=True):
        assert parallel.peak(1, 200) == alone.peak(1, 200)


def test_unreachable_requests_are_refused(llama: tuple[StepModel, OptimizerModel]) -> None:
    with pytest.raises(InputError, match="num_hidden_layers"):
        llama[0].peak(2, 64, {"num_hidden_layers": 1})
    step = cuda_step("llama")
    with pytest.raises(InputError, match="not traced for this batch size"):
        compile_step(step, batches=["many"]).peak(1, 64)
