"""Dry runs on disk: read instead of repeated, also those that came to nothing; and sizes from which a method acts."""

from __future__ import annotations

import pytest

from thrifty.errors import InputError
from thrifty.hardware.devices import get_device
from thrifty.planner import fit
from thrifty.planner.classes import compile_all
from thrifty.planner.events import TraceMismatch
from thrifty.planner.plan import estimate
from thrifty.planner.store import forget_compiled
from thrifty.planner.structure import Structure
from thrifty.planner.workload import make_workload
from thrifty.recipe import Recipe

TINY = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 500,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    forget_compiled()
    yield tmp_path
    forget_compiled()


def structures(names: list[list[str]], seq_len: int) -> list[Structure]:
    workload = make_workload(TINY, task="causal-lm", seq_len=seq_len)
    return [Structure(workload, Recipe.parse(methods), get_device("a100")) for methods in names]


@pytest.mark.parametrize("seq_len", [1024, 4096])
def test_a_size_from_which_a_method_acts_does_not_rule_it_out(seq_len: int) -> None:
    """What LoRA's matrices of rank 8 give has 8 numbers a token: it stays on the device below 2,048 tokens."""
    options = {"device": "a100", "task": "causal-lm", "seq_len": seq_len}
    alone = estimate(TINY, methods=["lora"], **options)
    moved = estimate(TINY, methods=["lora", "activation-offload"], **options)
    assert moved.breakdown["activations"] < alone.breakdown["activations"]
    kept = estimate(TINY, methods=["lora", {"activation-offload": {"least": 10**9}}], **options)
    assert kept.breakdown["activations"] == alone.breakdown["activations"]


def test_a_dry_run_that_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(*args: object, **kwargs: object) -> None:
        tried.append(kwargs)
        raise TraceMismatch("the operations differ")

    monkeypatch.setattr(fit, "compile_step", fails)
    first = compile_all(structures([["lora"]], 256), processes=1)
    count = len(tried)
    assert count
    second = compile_all(structures([["lora"]], 256), processes=1)
    assert len(tried) == count
    for found in (*first, *second):
        assert isinstance(found, InputError)
        assert "lora: the operations differ" in str(found)
