"""What a trace records, and that the dialects run the operations they promise."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from planner.cells import CONFIGS, cell_step
from thrifty.errors import InputError
from thrifty.planner import _private
from thrifty.planner.fit import _outline
from thrifty.planner.step import Step, hf_step, layer_counts, with_counts
from thrifty.planner.trace import (
    ALLOC,
    CATEGORIES,
    DIRECTIONS,
    FREE,
    GRADIENTS,
    PARAMETERS,
    Trace,
)
from thrifty.planner.tracer import StepTracer


def traced(step: Step, batch: int = 3, seq: int = 64, *, meta: bool = False) -> Trace:
    return StepTracer(step, step.base_counts(), meta=meta).forward_backward(batch, step.fixed_seq or seq)


def living(trace: Trace) -> np.ndarray:
    """Bytes of every category at the end."""
    out = np.zeros(len(CATEGORIES))
    for kind, sign in ((ALLOC, 1), (FREE, -1)):
        ident = trace.ident[trace.kind == kind]
        np.add.at(out, trace.category[ident], sign * trace.nbytes[ident])
    return out


def test_private_names_are_where_they_were() -> None:
    assert _private.canary() == []


def test_only_parameters_gradients_and_batch_outlive_the_step() -> None:
    step = cell_step("llama")
    trace = traced(step)
    at_end = living(trace)
    size = sum(int(np.prod(shape)) * 4 for shape, _, _ in trace.parameters)
    assert at_end[PARAMETERS] == at_end[GRADIENTS] == size
    assert at_end[CATEGORIES.index("activations")] == 0
    # The loss is dropped too; what is left are buffers and the batch.
    assert at_end[CATEGORIES.index("temporaries")] == 0


def test_tied_weights_are_one_allocation() -> None:
    tied, free = (living(traced(cell_step(name)))[PARAMETERS] for name in ("tied-llama", "llama"))
    assert free - tied == 515 * 96 * 4


def test_frozen_parameters_have_no_gradients() -> None:
    def freeze(model: nn.Module) -> None:
        model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]

    trace = traced(cell_step("llama", transform_model=freeze))
    assert living(trace)[PARAMETERS] - living(trace)[GRADIENTS] == 515 * 96 * 4


def test_checkpointing_recomputes_and_keeps_less() -> None:
    def activations(trace: Trace) -> float:
        kept = trace.category == CATEGORIES.index("activations")
        made_forward = trace.direction == DIRECTIONS.index("forward")
        idents = trace.ident[(trace.kind == ALLOC) & made_forward]
        return trace.nbytes[idents[kept[idents]]].sum()

    plain, recomputed = (traced(cell_step("llama", checkpointing=on)) for on in (False, True))
    assert activations(recomputed) < 0.6 * activations(plain)
    recompute = DIRECTIONS.index("recompute")
    assert (recomputed.direction == recompute).any()
    assert not (plain.direction == recompute).any()


@pytest.mark.parametrize(
    ("fields", "dtype", "kernel"),
    [
        ({}, torch.bfloat16, "aten._scaled_dot_product_flash_attention"),
        ({"padded": True}, torch.bfloat16, "aten._scaled_dot_product_efficient_attention"),
        ({}, torch.float32, "aten._scaled_dot_product_efficient_attention"),
        ({"attention": "math"}, torch.bfloat16, None),
    ],
)
def test_cuda_attention(fields: dict[str, Any], dtype: torch.dtype, kernel: str | None) -> None:
    step = replace(cell_step("llama", dtype=dtype, **fields), dialect="cuda")
    names = Counter(name for name in traced(step).op_names if name.startswith("aten._scaled_dot_product"))
    if kernel is None:
        assert not names
    else:
        assert names == {kernel: 2, f"{kernel}_backward": 2}


def test_cuda_dropout_keeps_masks_of_one_byte() -> None:
    step = cell_step("gpt2", attn_implementation="eager")
    cpu, cuda = traced(step), traced(replace(step, dialect="cuda"))
    assert "aten.native_dropout" not in cpu.op_names
    masks = [n for n, source in zip(cuda.nbytes, cuda.source, strict=True) if source == "aten.native_dropout"]
    # Output and mask of each, in float32 and bool.
    assert sorted(masks)[: len(masks) // 2] == sorted(n / 4 for n in sorted(masks)[len(masks) // 2 :])


def test_cuda_layer_norm_keeps_float32_statistics() -> None:
    step = replace(cell_step("gpt2", dtype=torch.bfloat16), dialect="cuda")
    statistics = {
        n for n, s in zip(*(lambda t: (t.nbytes, t.source))(traced(step)), strict=True) if s == "aten.native_layer_norm"
    }
    assert min(statistics) == 3 * 64 * 4


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_meta_tensors_give_the_trace_of_fake_ones(config: str, autocast: torch.dtype | None) -> None:
    step = replace(cell_step(config, autocast=autocast), dialect="cuda")
    assert np.array_equal(_outline(traced(step)), _outline(traced(step, meta=True)))


def test_flops_are_six_a_parameter_and_token() -> None:
    step = replace(cell_step("llama", dtype=torch.bfloat16), dialect="cuda")
    trace = traced(step, batch=2, seq=32)
    products = sum(int(np.prod(shape)) for shape, _, _ in trace.parameters if len(shape) == 2) - 515 * 96
    # Two blocks, batch of two, six heads of 16; two products forward, five backward.
    attention = 2 * (2 + 5) * 2 * 2 * 6 * 32 * 32 * 16
    assert trace.op_numbers[:, 0].sum() == pytest.approx(6 * products * 64 + attention, rel=1e-4)


def test_optimizer_state_and_temporaries() -> None:
    def trace(**options: Any) -> Trace:
        step = cell_step("llama", build_optimizer=lambda p: torch.optim.AdamW(p, **options))
        return StepTracer(step, step.base_counts()).optimizer_step(step)

    size = sum(int(np.prod(shape)) * 4 for shape, _, _ in traced(cell_step("llama")).parameters)
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        found = trace(**options)
        assert living(found)[CATEGORIES.index("optimizer")] == pytest.approx(2 * size, rel=1e-3)
    made = {
        name: trace(**{name: True}).nbytes.sum() - living(trace(**{name: True})).sum() for name in ("fused", "foreach")
    }
    assert made["fused"] < 0.01 * size < size <= made["foreach"]


def test_counts_of_blocks() -> None:
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(14)]
    gemma = transformers.Gemma3TextConfig(num_hidden_layers=14, layer_types=kinds)
    assert layer_counts(gemma) == ({"num_hidden_layers": 14}, {"num_hidden_layers": 6})
    assert with_counts(gemma, {"num_hidden_layers": 8}).layer_types == kinds[:8]
    t5 = transformers.T5Config(num_layers=3, num_decoder_layers=5)
    assert layer_counts(t5)[0] == {"num_layers": 3, "num_decoder_layers": 5}
    gpt2 = with_counts(transformers.GPT2Config(n_layer=12), {"num_hidden_layers": 2})
    assert gpt2.n_layer == 2


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(InputError, match="did you mean 'causal-lm'"):
        hf_step(CONFIGS["llama"][0](), "causal_lm")
