"""Estimates and plans of a tiny model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from thrifty.errors import InputError
from thrifty.planner.html import page
from thrifty.planner.plan import MARGIN, estimate, plan
from thrifty.planner.workload import make_workload, parse_bytes, parse_methods

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip

# What is decided needs no dry run of its alternatives.
DECIDED = ["gradient-checkpointing", "chunked-cross-entropy", "activation-offload", "adamw"]


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def unlimited():
    return plan(TINY, device="a100", global_batch=16, seq_len=128, processes=1)


def test_an_estimate_has_the_documented_fields() -> None:
    found = estimate(TINY, device="t4", micro_batch=2, accumulation=2, seq_len=128)
    data = json.loads(json.dumps(found.to_dict()))
    wanted = (
        "peak_allocated_bytes peak_reserved_bytes device_total_bytes breakdown peak_phase step_seconds "
        "tokens_per_second model_flops fits"
    )
    assert set(wanted.split()) <= data.keys()
    assert (
        sum(found.breakdown.values())
        == found.peak_allocated_bytes
        <= found.peak_reserved_bytes
        < found.device_total_bytes
    )
    assert found.tokens_per_second == pytest.approx(2 * 2 * 128 / found.step_seconds)
    assert found.fits
    assert "<table>" in found._repr_html_()


def test_parameters_are_those_of_the_real_model() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from thrifty.planner.catalogue import make_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(TINY))
    found = estimate(TINY, device="t4", seq_len=128)
    assert found.parameters == found.trainable_parameters == sum(p.numel() for p in model.parameters())


def test_model_flops_are_six_a_parameter_and_token_and_those_of_attention() -> None:
    found = estimate(TINY, device="t4", micro_batch=4, seq_len=128)
    embeddings, attention = 512 * 64, 12 * 6 * 128 * 64
    # Backward attention computes the scores once more than the formula counts.
    assert found.model_flops == pytest.approx((6 * (found.parameters - embeddings) + attention) * 4 * 128, rel=0.06)


def test_recomputation_costs_time_and_saves_memory_but_no_model_flops() -> None:
    plain = estimate(TINY, device="a100", micro_batch=16, seq_len=256)
    recomputed = estimate(TINY, device="a100", micro_batch=16, seq_len=256, methods=["gradient-checkpointing"])
    assert recomputed.peak_allocated_bytes < plain.peak_allocated_bytes
    assert recomputed.step_seconds > plain.step_seconds
    assert recomputed.model_flops == pytest.approx(plain.model_flops, rel=0.01)


def test_peak_matches_the_step_model() -> None:
    from thrifty.hardware.devices import get_device
    from thrifty.planner.structure import Structure
    from thrifty.recipe import Recipe

    workload = make_workload(TINY, seq_len=128)
    compiled = Structure(workload, Recipe([]), get_device("a100")).compile()
    for batch, later in ((1, False), (3, False), (5, True)):
        moments = compiled.moments(np.array([batch]), 128, later=later)[0]
        peak = compiled.step.peak(batch, 128, accumulation=2 if later else 1, optimizer=compiled.optimizer)
        assert moments.sum(-1).max() == peak.bytes
        assert compiled.phase(int(moments.sum(-1).argmax()), batch, later=later) == peak.phase


def test_operations_are_those_of_the_step_model() -> None:
    from thrifty.hardware.devices import get_device
    from thrifty.planner.structure import Structure
    from thrifty.recipe import Recipe

    compiled = Structure(make_workload(TINY, seq_len=128), Recipe([]), get_device("a100")).compile()
    ours = compiled.ops(np.array([3, 5]), 128)
    for row, batch in enumerate((3, 5)):
        theirs = compiled.step.ops(batch, 128)
        for field in ("flops", "read", "written"):
            assert ours[field][row] @ ours["count"][row] == pytest.approx(theirs[field] @ theirs["count"])


def test_micro_batches_after_the_first_add_to_gradients() -> None:
    from thrifty.hardware.devices import get_device
    from thrifty.planner.search import Evaluator
    from thrifty.planner.structure import Structure
    from thrifty.planner.time import TimeModel
    from thrifty.recipe import Recipe

    device, workload = get_device("a100"), make_workload(TINY, seq_len=128)
    compiled = Structure(workload, Recipe([]), device).compile()
    adding = compiled.adding_ops
    assert adding["written"] @ adding["count"] == compiled.bytes["gradients"]
    assert (adding["read"] == 2 * adding["written"]).all()
    evaluator = Evaluator(workload, device, 1)
    times = evaluator.times(compiled, np.array([2]))
    one, two, five = evaluator.step_seconds(compiled, times, np.array([1, 2, 5]), "none")
    later = times.seconds[0] + TimeModel(device).step(adding).seconds[0]
    assert two - one == pytest.approx(later)
    assert five - two == pytest.approx(3 * later)


def test_with_room_the_plan_takes_no_saving_choice(unlimited) -> None:
    assert unlimited.chosen is not None
    assert unlimited.chosen.methods == []
    assert unlimited.chosen.micro_batch * unlimited.chosen.accumulation == 16
    assert unlimited.configurations >= 3 * 5
    assert unlimited.configurations % 5 == 0
    assert json.loads(json.dumps(unlimited.to_dict()))["pareto"]


def test_under_pressure_it_fits_and_nothing_fitting_is_faster(unlimited) -> None:
    least = min(c.device_total_bytes for c in unlimited.pareto)
    limit = round(least * 1.04 / (1 - MARGIN))
    found = plan(TINY, device="a100", global_batch=16, seq_len=128, memory=limit, processes=1)
    assert found.chosen is not None
    assert found.chosen.fits
    assert found.chosen.device_total_bytes <= limit
    for micro in (1, 2, 4, 8, 16):
        for methods in ([], ["gradient-checkpointing"], [{"gradient-checkpointing": {"every": 2}}]):
            other = estimate(
                TINY,
                device="a100",
                micro_batch=micro,
                accumulation=16 // micro,
                seq_len=128,
                memory=limit,
                methods=methods,
            )
            assert not other.fits or other.step_seconds >= found.chosen.step_seconds * 0.998


def test_what_does_not_fit_is_told_the_least_that_would() -> None:
    found = plan(TINY, device="a100", global_batch=4, seq_len=128, memory="100KiB", processes=1)
    assert found.chosen is None
    assert "needs" in found.explanation[0]
    assert any("weights alone" in line for line in found.explanation)
    with pytest.raises(InputError):
        found.run_keys()


def test_the_mathematics_change_only_with_leave() -> None:
    names = {json.dumps(c.methods) for c in plan(TINY, device="a100", global_batch=4, seq_len=128, processes=1).pareto}
    assert not any("bf16" in n or "lora" in n for n in names)
    allowed = plan(TINY, device="a100", global_batch=64, seq_len=256, methods=DECIDED, allow=["bf16"], processes=1)
    assert any("bf16" in json.dumps(c.methods) for c in allowed.pareto)


def test_a_precision_that_the_device_lacks_is_refused_with_the_reason() -> None:
    found = plan(TINY, device="t4", global_batch=4, seq_len=128, methods=DECIDED, allow=["bf16"], processes=1)
    assert "no bf16 units" in next(why for names, why in found.rejected.items() if "bf16" in names)
    with pytest.raises(InputError, match="no bf16 units"):
        estimate(TINY, device="t4", seq_len=128, methods=["bf16"])


def test_the_optimizer_stays_the_users() -> None:
    from thrifty.planner.search import alternatives

    def optimizers(**arguments) -> set[str]:
        recipes = alternatives(make_workload(TINY, seq_len=128, **arguments), ())
        return {owner.name for r in recipes if (owner := r.owner("optimizer")) is not None}

    assert "adamw" in optimizers()
    assert optimizers(optim="sgd") == set()


def test_state_of_an_optimizer_that_cannot_be_traced_is_its_real_state() -> None:
    import torch

    from thrifty.planner.compiled import measured_form

    parameter = torch.nn.Parameter(torch.zeros(1000, 300))
    for build in (torch.optim.Adafactor, lambda p: torch.optim.Adam(p, amsgrad=True)):
        form = measured_form(build)
        optimizer = build([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        real = sum(v.nbytes for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor))
        assert form.state_bytes((1000, 300), "float32") == pytest.approx(real, abs=16)


def test_devices_divide_the_states() -> None:
    found = {
        s: estimate(TINY, device="a100", devices=8, sharding=s, seq_len=128).breakdown
        for s in ("ddp", "zero1", "zero2", "zero3")
    }
    assert found["zero1"]["optimizer"] == pytest.approx(found["ddp"]["optimizer"] / 8, rel=1e-3)
    assert found["zero3"]["parameters"] == pytest.approx(found["ddp"]["parameters"] / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "a1000"}, "did you mean"),
        ({"task": "causal"}, "did you mean 'causal-lm'"),
        ({"seq_len": 512}, "256 positions"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"memory": "lots"}, "not a size"),
        ({"dtype": "float8"}, "unknown data type"),
        ({"sharding": "zero3"}, "does not go with 1 device"),
        ({"methods": ["lorra"]}, "did you mean 'lora'"),
    ],
)
def test_nonsense_is_answered(changes, message: str) -> None:
    arguments = {"device": "a100", "seq_len": 128} | changes
    with pytest.raises(InputError, match=message):
        estimate(TINY, **arguments)


def test_an_unknown_choice_is_answered() -> None:
    with pytest.raises(InputError, match="did you mean 'lora'"):
        plan(TINY, device="a100", global_batch=4, seq_len=128, allow=["lorra"])


def test_the_page_is_self_contained(unlimited) -> None:
    text = page(unlimited)
    assert text.count("<svg") == 2
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in text
    assert "<svg" in unlimited._repr_html_()


def test_sizes_and_methods_are_parsed() -> None:
    assert parse_bytes("24GiB") == 24 * 2**30
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert parse_methods("bf16,lora:r=32,alpha=64,gradient-checkpointing") == [
        "bf16",
        {"lora": {"r": 32, "alpha": 64}},
        "gradient-checkpointing",
    ]
    for text in ("r=3", "lora:r"):
        with pytest.raises(InputError):
            parse_methods(text)


@pytest.mark.parametrize(
    ("device", "expected"), [("a100", ["bf16", "tf32"]), ("t4", ["fp16"]), ("h100-80gb", ["bf16", "tf32"])]
)
def test_precision_auto_is_that_of_the_device_planned_for(device: str, expected: list[str], tmp_path) -> None:
    from thrifty.config import parse_config

    run = parse_config({"model_config": TINY, "embedded_corpus": "kjv", "max_length": 128, "precision": "auto"})
    assert estimate(run, device=device).methods == expected
