"""Progressive layer dropping: the schedule, the expectation, and that a dropped block computes nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.architecture import branch_outputs, main_blocks
from thrifty.methods.growth.layer_drop import LayerDropper, keep_probability, theta_bar

PRE_NORM = {"llama": tiny.llama, "gpt2": tiny.gpt2, "vit": tiny.vit}
ALWAYS_LATE = {"layer-drop": {"theta": 0.3, "gamma": 100.0}}  # at full strength from the second step on


def _dropper(run: Any) -> LayerDropper:
    return run.recipe["layer-drop"].dropper


def test_schedule():
    assert [round(theta_bar(t, 1000), 4) for t in (0, 10, 50, 100)] == [1.0, 0.6839, 0.5034, 0.5]
    assert [theta_bar(t, 1000) for t in (10, 50)] == pytest.approx([0.5 * (1 + math.exp(-x)) for x in (1, 5)])


def test_mean_share_of_kept_blocks():
    kept = [keep_probability(layer, 12, 0.5) for layer in range(1, 13)]
    assert sum(kept) / 12 == pytest.approx(0.7292, abs=5e-5)
    assert sum(kept) / 12 == pytest.approx(1 - 13 / 24 * 0.5)
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 0.5


def test_drawn_gates_follow_the_probabilities():
    dropper = LayerDropper(tiny.llama(4), total_steps=10, gamma=100.0)
    rng = torch.Generator().manual_seed(0)
    counts = [0] * 4
    for _ in range(2000):
        dropper.set_step(9, rng)
        for i, gate in enumerate(dropper.gates):
            counts[i] += gate.keep
    for i, count in enumerate(counts, start=1):
        p = 1 - i / 4 * 0.5
        assert abs(count / 2000 - p) < 4 * math.sqrt(p * (1 - p) / 2000)


def _first_call(model: nn.Module) -> tuple[torch.Tensor, Callable[[nn.Module], torch.Tensor]]:
    """The hidden state that the first block gets, and a function that calls a block in the same way."""
    caught: list[tuple[Any, Any]] = []
    model.config.use_cache = False  # type: ignore[union-attr]
    block = main_blocks(model, "test").layers[0]
    handle = block.register_forward_pre_hook(lambda m, a, k: caught.append((a, k)), with_kwargs=True)
    with torch.no_grad():
        model(**loops.batch(model))
    handle.remove()
    args, kwargs = caught[0]

    def call(block: nn.Module) -> torch.Tensor:
        out = block(args[0].clone(), *args[1:], **kwargs)
        return out[0] if isinstance(out, tuple) else out

    return args[0].detach(), call


@pytest.mark.parametrize("branch", [0, 1])
@pytest.mark.parametrize("family", PRE_NORM)
def test_expectation_over_the_gates_is_the_block(family, branch):
    """Exact where the block is linear in its branches: so one of the two is silenced in turn."""
    model = PRE_NORM[family]()
    block = main_blocks(model, "test").layers[0]
    silenced = block.get_submodule(branch_outputs(block, "test")[branch])
    for p in silenced.parameters():
        nn.init.zeros_(p)
    hidden, run = _first_call(model)
    model.train()
    with torch.no_grad():
        expected = run(block)
        dropper = LayerDropper(model, total_steps=10)
        gate, p = dropper.gates[0], 0.6
        gate.probability, gate.keep = p, True
        kept = run(block)
        gate.keep = False
        dropped = run(block)
    assert torch.equal(dropped, hidden)
    assert not torch.allclose(kept, expected, atol=1e-6)
    torch.testing.assert_close(p * kept + (1 - p) * dropped, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", PRE_NORM)
def test_dropped_blocks_run_no_kernels(family):
    model = PRE_NORM[family](4) if family != "vit" else tiny.vit(4)
    dropper = LayerDropper(model, total_steps=10)
    model.train()
    model(**loops.batch(model))  # all kept: the blocks have learned what they return
    calls = [[loops.count_calls(m) for m in block.modules() if m is not block] for block in main_blocks(model, "test")]
    keep = [True, False, True, False]
    for gate, kept in zip(dropper.gates, keep, strict=True):
        gate.keep = kept
    model(**loops.batch(model)).loss.backward()
    for block_calls, kept in zip(calls, keep, strict=True):
        assert any(block_calls) is kept
    gradients = [any(p.grad is not None for p in block.parameters()) for block in main_blocks(model, "test")]
    assert gradients == keep


@pytest.mark.parametrize("family", PRE_NORM)
def test_evaluation_keeps_everything_and_removal_leaves_no_trace(family):
    model, plain = PRE_NORM[family](), PRE_NORM[family]().eval()
    inputs = loops.batch(model)
    dropper = LayerDropper(model, total_steps=10)
    for gate in dropper.gates:
        gate.keep, gate.probability = False, 0.3
    model.eval()
    with torch.no_grad():
        expected = plain(**inputs).logits
        assert torch.equal(model(**inputs).logits, expected)
        dropper.remove()
        model.train()
        plain.train()
        assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_copied_block_has_a_gate_of_its_own():
    model = tiny.llama()
    dropper = LayerDropper(model, total_steps=10)
    block = main_blocks(model, "test").layers[0]
    twin = copy.deepcopy(block)
    gate: Any = vars(twin)["forward"]
    assert gate is not dropper.gates[0]
    assert gate.block is twin
    _, run = _first_call(model)
    twin.train()
    gate.keep, gate.probability = True, 0.5
    with torch.no_grad():
        scaled = run(twin)
        gate.probability = 1.0
        assert not torch.equal(scaled, run(twin))


def test_own_loops_agree_and_act():
    droppers = []

    def make() -> loops.Setup:
        model = tiny.llama(4)
        dropper = LayerDropper(model, total_steps=4, theta=0.2, gamma=100.0)
        droppers.append(dropper)

        def before(step: int) -> None:
            dropper.set_step(step, torch.Generator().manual_seed(step))

        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2), before_step=before)

    _, losses = loops.both_loops(make)
    _, plain = loops.baseline(lambda: tiny.llama(4))
    assert losses[0] == plain[0]  # theta is 1 at the start
    assert losses[1:] != plain[1:]
    assert [sum(gate.skipped for gate in d.gates) for d in droppers] == [sum(g.skipped for g in droppers[0].gates)] * 2
    assert sum(gate.skipped for gate in droppers[0].gates) > 0


@pytest.mark.parametrize("family", PRE_NORM)
def test_trains_and_resumes(tmp_path, family):
    build = PRE_NORM[family]
    run = loops.resumes(tmp_path, [ALWAYS_LATE], lambda: build(4), max_steps=5, step=2)
    plain = tiny.trainer(tmp_path / "plain", [], build(4), max_steps=5)
    plain.train()
    assert tiny.losses(run)[0] == tiny.losses(plain)[0]
    assert tiny.losses(run)[1:] != tiny.losses(plain)[1:]
    assert sum(gate.skipped for gate in _dropper(run).gates) > 0


def test_trainer_draws_from_the_seed_and_the_step_only(tmp_path):
    """So that every process draws the same gates: the global RNG has no part in it."""
    seen: list[list[list[bool]]] = []
    for attempt in range(2):
        run = tiny.trainer(tmp_path / str(attempt), [ALWAYS_LATE], tiny.llama(4), max_steps=5)
        gates = _dropper(run).gates
        drawn: list[list[bool]] = []

        class Watch(TrainerCallback):
            def on_pre_optimizer_step(self, *args, gates=gates, drawn=drawn, attempt=attempt, **kwargs):
                drawn.append([gate.keep for gate in gates])
                torch.rand(attempt)

        run.add_callback(Watch())
        run.train()
        seen.append(drawn)
    assert seen[0] == seen[1]
    assert len({tuple(row) for row in seen[0]}) > 1


def test_with_checkpointing(tmp_path):
    """The recomputation takes the same gates."""
    results = []
    for methods in ([ALWAYS_LATE], [ALWAYS_LATE, "gradient-checkpointing"]):
        run = tiny.trainer(tmp_path / str(len(methods)), methods, tiny.llama(4, dropout=0.1), max_steps=4)
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(*results)


def test_settings_reach_the_gates(tmp_path):
    run = tiny.trainer(tmp_path, [{"layer-drop": {"theta": 0.25, "gamma": 50.0}}], tiny.llama(4), max_steps=3)
    run.train()
    assert [g.probability for g in _dropper(run).gates] == pytest.approx([1 - i / 4 * 0.75 for i in range(1, 5)])


def test_post_norm_is_refused(tmp_path):
    with pytest.raises(NotApplicable, match=r"layer-drop: BertForMaskedLM .* Fix: use a pre-norm model"):
        tiny.trainer(tmp_path, ["layer-drop"], tiny.bert())


@pytest.mark.parametrize("settings", [{"theta": 0.0}, {"theta": 1.5}, {"gamma": -1.0}])
def test_bad_settings(settings):
    with pytest.raises(InputError, match=next(iter(settings))):
        Recipe.parse([{"layer-drop": settings}])
