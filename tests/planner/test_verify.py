"""What real steps show corrects the plan."""

from __future__ import annotations

import json
import math

import pytest

from thrifty.errors import InputError
from thrifty.hardware.devices import get_device
from thrifty.method import Phase
from thrifty.planner.measure import measure
from thrifty.planner.periods import crossed
from thrifty.planner.plan import estimate, plan
from thrifty.planner.residuals import Residual, Residuals, forget_residuals, workload_key
from thrifty.planner.structure import Structure
from thrifty.planner.verify import verified_plan
from thrifty.planner.workload import Workload, make_workload
from thrifty.recipe import Recipe

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 611,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def workload() -> Workload:
    forget_residuals("cpu")
    return make_workload(LLAMA, task="causal-lm", seq_len=48, methods=["adamw"])


VIT = {
    "model_type": "vit", "image_size": 64, "patch_size": 8, "num_attention_heads": 2, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2,
}  # fmt: skip


def residual(workload: Workload, memory: float, seconds: float, micro_batch: int = 2) -> Residual:
    structure = Structure(workload, Recipe.parse(workload.methods), get_device("cpu"))
    return Residual(
        workload=workload_key(workload), structure=structure.key, micro_batch=micro_batch, accumulation=1,
        memory=memory, seconds=seconds, date="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


def test_the_plan_is_measured_and_says_so() -> None:
    forget_residuals("cpu")
    workload = make_workload(VIT, task="image-classification")
    found = verified_plan(workload, device=get_device("cpu"), global_batch=2)
    assert found.chosen is not None
    last = found.verified[-1]
    assert last["measured_bytes"] == pytest.approx(last["predicted_bytes"], rel=0.02)
    assert found.chosen.micro_batch in {entry["micro_batch"] for entry in found.verified}
    stored = Residuals("cpu").entries
    assert [entry.micro_batch for entry in stored] == [entry["micro_batch"] for entry in found.verified]
    assert found.chosen.step_seconds == pytest.approx(last["measured_seconds"], rel=0.35)
    json.dumps(found.to_dict())


def test_residuals_correct_the_class_and_guide_the_others(workload: Workload) -> None:
    before = estimate(workload, device="cpu", micro_batch=2)
    other = workload.with_methods(["adamw", "gradient-checkpointing"])
    plain = estimate(other, device="cpu", micro_batch=2)
    Residuals("cpu").add(residual(workload, memory=1.25, seconds=2.0))
    after = estimate(workload, device="cpu", micro_batch=2)
    assert after.peak_allocated_bytes == pytest.approx(1.25 * before.peak_allocated_bytes, rel=1e-3)
    assert sum(after.breakdown.values()) == after.peak_allocated_bytes
    assert after.step_seconds == pytest.approx(2 * before.step_seconds)
    assert estimate(other, device="cpu", micro_batch=2).step_seconds == pytest.approx(2 * plain.step_seconds)
    unrelated = make_workload({**LLAMA, "vocab_size": 700}, task="causal-lm", seq_len=48)
    assert estimate(unrelated, device="cpu", micro_batch=2).memory_residual == 1.0


def test_a_residual_replaces_the_older_one_and_several_give_their_mean(workload: Workload) -> None:
    store = Residuals("cpu")
    store.add(residual(workload, 3.0, 3.0))
    store.add(residual(workload, 1.0, 2.0))
    store.add(residual(workload, 4.0, 8.0, micro_batch=4))
    again = Residuals("cpu")
    assert len(again.entries) == 2
    structure = again.entries[0].structure
    assert again.of(workload_key(workload), structure) == pytest.approx((2.0, 4.0))


def test_a_choice_that_no_longer_fits_is_left() -> None:
    forget_residuals("cpu")
    workload = make_workload(VIT, task="image-classification")
    free = plan(workload, device="cpu", global_batch=4, memory="1GiB").require()
    limit = round(free.device_total_bytes * 1.1)
    assert plan(workload, device="cpu", global_batch=4, memory=limit).require().micro_batch == free.micro_batch
    structure = Structure(workload.with_methods(free.methods), Recipe.parse(free.methods), get_device("cpu")).key
    Residuals("cpu").add(
        Residual(workload=workload_key(workload), structure=structure, micro_batch=free.micro_batch, accumulation=1,
                 memory=1.3, seconds=1.0, date="2026-01-01T00:00:00+00:00")
    )  # fmt: skip
    corrected = plan(workload, device="cpu", global_batch=4, memory=limit).require()
    assert (corrected.methods, corrected.micro_batch) != (free.methods, free.micro_batch)


def test_a_device_that_is_not_here_cannot_be_verified(workload: Workload) -> None:
    with pytest.raises(InputError, match="not in this machine"):
        verified_plan(workload, device=get_device("h100-80gb"), global_batch=4)
    with pytest.raises(InputError, match="one device"):
        verified_plan(workload, device=get_device("cpu"), devices=2, global_batch=4)


def test_a_damaged_store_is_named(workload: Workload) -> None:
    store = Residuals("cpu")
    store.path.parent.mkdir(parents=True, exist_ok=True)
    store.path.write_text("{")
    with pytest.raises(InputError, match=r"cpu\.json"):
        Residuals("cpu")
    forget_residuals("cpu")


def test_images_wait_for_their_turn_in_memory() -> None:
    """The trainer fetches all micro-batches of a step at once."""
    workload = make_workload(VIT, task="image-classification")
    predicted = estimate(workload, device="cpu", micro_batch=2, accumulation=8)
    took = measure(workload, micro_batch=2, accumulation=8, steps=1)
    assert took.peak_allocated_bytes == pytest.approx(predicted.peak_allocated_bytes, rel=0.02)
    assert predicted.breakdown["other"] > 8 * 2 * 3 * 64 * 64 * 4


def test_cheaper_phases_make_the_mean_step_cheaper() -> None:
    plain, grown = (
        estimate("gpt2", task="causal-lm", seq_len=256, device="rtx4090", micro_batch=8, methods=methods)
        for methods in ([], ["stacking"])
    )
    assert grown.peak_allocated_bytes == plain.peak_allocated_bytes
    assert 0.7 * plain.step_seconds < grown.step_seconds < 0.95 * plain.step_seconds


def test_phases_of_two_methods_are_crossed() -> None:
    first = [Phase(steps=2, description="a", depth=0.5), Phase(steps=8, description="b")]
    second = [Phase(steps=5, description="c", length=0.25), Phase(steps=5, description="d")]
    merged = crossed(first, second)
    assert [(p.steps, p.depth, p.length) for p in merged] == [(2, 0.5, 0.25), (3, 1.0, 0.25), (5, 1.0, 1.0)]
    assert math.isclose(sum(p.steps for p in merged), 10)


def test_offloading_is_priced_and_the_host_is_told() -> None:
    plain, moved, states = (
        estimate("gpt2", task="causal-lm", seq_len=256, device="rtx4090", micro_batch=8, methods=methods)
        for methods in ([], ["activation-offload"], ["optimizer-offload"])
    )
    assert plain.host_bytes == 0
    assert moved.peak_allocated_bytes < 0.8 * plain.peak_allocated_bytes
    # What left the device is on the host.
    assert moved.host_bytes >= plain.breakdown["activations"] - moved.breakdown["activations"]
    # Every byte crosses the link twice, beside the computation of its pass.
    assert moved.step_seconds > moved.host_bytes / get_device("rtx4090").host_bandwidth
    assert states.breakdown["optimizer"] == 0
    assert states.host_bytes == pytest.approx(12 * plain.parameters, rel=0.01)
    assert states.step_seconds > plain.step_seconds + 8 * plain.parameters / get_device("rtx4090").host_bandwidth * 0.9
