"""Every registered method is dry-run as it is: the planner's peak is that of real steps through the trainer."""

from __future__ import annotations

import datetime
import os
import random
from typing import Any

import pytest

from thrifty.errors import InputError, NotApplicable
from thrifty.method import overrides, registry
from thrifty.planner.measure import measure
from thrifty.planner.plan import estimate
from thrifty.planner.workload import make_workload

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "causal-lm": {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 611, **SIZES},
    "masked-lm": {"model_type": "bert", "vocab_size": 611, **SIZES},
    "text-classification": {"model_type": "bert", "vocab_size": 611, **SIZES},
    "image-classification": {"model_type": "vit", "image_size": 32, "patch_size": 4, **SIZES},
}
# Methods that make some steps cheaper: the plan is for the dearest, which the few real steps here need not reach.
AT_MOST = {
    name for name in registry.names() if overrides(registry.get(name)(**registry.get(name).spec.preset), "phases")
}
# What depends on values, which a dry run has not: real over predicted bytes.
ROUGH = {
    "importance-sampling": (0.9, 1.02),  # which samples a step has
    "mass": (0.93, 1.02),  # how long the masked spans are
    # Their growth falls into the measured steps, and holds the old model beside the new one.
    **dict.fromkeys(("bert2bert", "ligo", "net2net"), (0.0, 1.2)),
    "moe-upcycle": (0.98, 1.12),  # how unevenly tokens choose experts: balanced in a dry run
}
SETTINGS = {
    "budget": {"tokens": 10**9},  # the preset's budget ends before a step is measured
    # The preset compares gradients anew in the measured step, which is not what an ordinary step needs.
    "activation-compression": {"least": 64, "level": "L2", "refresh": 1000},
}


pytestmark = pytest.mark.usefixtures("own_cache")


# A share that changes every day in `make test`, all of them in `make soak`.
SEED = os.environ.get("THRIFTY_PAIR_SEED") or datetime.date.today().isoformat()
SHARE = sorted(random.Random(SEED).sample(registry.names(), min(24, len(registry.names()))))


@pytest.mark.parametrize("name", SHARE)
def test_predicted_peak_is_the_real_one(name: str) -> None:
    check(name)


@pytest.mark.soak
@pytest.mark.parametrize("name", registry.names())
def test_every_predicted_peak_is_the_real_one(name: str) -> None:
    check(name)


# The memory methods under settings that change what lives at the peak.
MEMORY_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gradient-checkpointing", {"policy": "every-n", "every": 2}),
    ("gradient-checkpointing", {"policy": "sqrt"}),
    ("gradient-checkpointing", {"policy": "k-of-l", "k": 2}),
    ("gradient-checkpointing", {"policy": "k-of-l", "k": 1, "side": "last"}),
    ("gradient-checkpointing", {"policy": "selective"}),
    ("gradient-checkpointing", {"policy": "optimal"}),
    ("gradient-checkpointing", {"policy": "optimal", "budget": 0.7}),
    ("gradient-checkpointing", {"policy": "milp"}),
    *(("activation-compression", {"least": 64, "level": level}) for level in ("L1", "L1.1", "L1.2", "actnn", "mesa")),
    ("bf16-pure", {"rounding": "stochastic"}),
    ("compile", {}),  # with the compiler's own kernels
    ("chunked-cross-entropy", {"chunks": 4}),
    ("lora", {"target_modules": "all-linear", "r": 4}),
]
MEMORY_SHARE = random.Random(SEED).sample(MEMORY_VARIANTS, 3)


def _label(value: Any) -> str:
    return value if isinstance(value, str) else ",".join(str(v) for v in value.values())


@pytest.mark.parametrize(("name", "settings"), MEMORY_SHARE, ids=_label)
def test_predicted_peak_of_a_variant_is_the_real_one(name: str, settings: dict[str, Any]) -> None:
    check(name, settings)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "settings"), MEMORY_VARIANTS, ids=_label)
def test_every_predicted_peak_of_a_variant_is_the_real_one(name: str, settings: dict[str, Any]) -> None:
    check(name, settings)


MEMORY_SECTIONS = ("precision", "checkpointing", "offload", "loss", "peft", "attention", "sharing", "compilation")


def test_what_is_outside_two_per_cent_is_no_method_of_memory_but_where_it_says_why() -> None:
    memory = {name for name in registry.names() if registry.get(name).spec.section in MEMORY_SECTIONS}
    assert {"gradient-checkpointing", "activation-compression", "nvme-offload", "lora", "fp8"} <= memory
    assert not memory & ({*ROUGH} | AT_MOST)


def check(name: str, settings: dict[str, Any] | None = None) -> None:
    spec = registry.get(name).spec
    task = next((task for task in spec.tasks if task in MODELS), None) if spec.tasks else "causal-lm"
    if task is None:
        pytest.skip(f"no small model for {spec.tasks}")
    methods = [*spec.requires, {name: settings or SETTINGS.get(name) or dict(spec.preset)}]
    options: dict[str, Any] = {} if task.startswith("image") else {"seq_len": 48}
    workload = make_workload(MODELS[task], task=task, methods=methods, **options)
    try:
        predicted = estimate(workload, device="cpu", micro_batch=4)
    except InputError as refusal:
        pytest.skip(f"refused on this machine: {refusal}")
    try:
        took = measure(workload, micro_batch=4, steps=1)
    except NotApplicable as refusal:
        pytest.skip(f"needs a longer run: {refusal}")
    assert took.peak_allocated_bytes is not None
    ratio = took.peak_allocated_bytes / predicted.peak_allocated_bytes
    least, most = (0.0, 1.02) if name in AT_MOST else (0.98, 1.02)
    least, most = ROUGH.get(name, (least, most))
    assert least < ratio < most, f"{took.peak_allocated_bytes} / {predicted.peak_allocated_bytes}"
