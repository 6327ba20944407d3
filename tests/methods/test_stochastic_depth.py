"""Stochastic depth: the line of survival, expectations, what is skipped, and that steps do not depend on their cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.architecture import branch_outputs, main_blocks
from thrifty.methods.growth._gates import keep_probability
from thrifty.methods.growth.stochastic_depth import StochasticDepthGates

PER_BATCH = {"stochastic-depth": {"survival": 0.3, "mode": "batch"}}
PER_SAMPLE = {"stochastic-depth": {"survival": 0.3}}


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_survival_is_on_a_line_that_ends_at_the_last_block():
    gates = StochasticDepthGates(tiny.llama(4), 0.5)
    assert gates.survivals == [0.875, 0.75, 0.625, 0.5]  # the first one does not survive for certain
    assert sum(keep_probability(i, 54, 0.5) for i in range(1, 55)) == pytest.approx(40.25)  # the paper's (3L - 1) / 4


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_mask_has_one_entry_a_sample(family):
    model = tiny.FAMILIES[family]()
    gates = StochasticDepthGates(model, 0.5)
    gates.draw(_rng(), rows=3)
    assert [tuple(gate.factors.shape) for gate in gates.gates] == [(2, 3), (2, 3)]
    values = {round(float(v), 4) for gate in gates.gates for v in gate.factors.flatten()}
    assert values <= {0.0, round(1 / 0.75, 4), 2.0}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_survival_of_one_is_the_plain_model(family):
    model = tiny.FAMILIES[family]().train()
    inputs = loops.batch(model)
    expected = model(**inputs).loss
    gates = StochasticDepthGates(model, 1.0)
    gates.draw(_rng(), rows=3)
    torch.testing.assert_close(model(**inputs).loss, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "vit"])
@pytest.mark.parametrize("mode", ["sample", "batch"])
def test_without_branches_only_the_skip_path_is_left(family, mode):
    model = tiny.FAMILIES[family]().train()
    inputs = loops.batch(model)
    gates = StochasticDepthGates(model, 0.5, mode)
    for gate in gates.gates:
        gate.keep, gate.factors = False, torch.zeros(2, 3)
    skipped = model(**inputs).logits
    for block in main_blocks(model, "test"):
        for name in branch_outputs(block, "test"):
            for p in block.get_submodule(name).parameters():
                nn.init.zeros_(p)
    gates.remove()
    torch.testing.assert_close(skipped, model(**inputs).logits)


@pytest.mark.parametrize("mode", ["sample", "batch"])
def test_the_mean_over_draws_is_the_whole_model(mode):
    """Of a linear branch: E[b F(x) / p] = F(x)."""
    model: Any = tiny.llama(1).train()
    gates = StochasticDepthGates(model, 0.6, mode)
    block = model.model.layers[0]
    for p in block.parameters():
        p.requires_grad_(False)
    nn.init.zeros_(block.self_attn.o_proj.weight)  # only the feed-forward branch is left, whose input is fixed then
    inputs = loops.batch(model, size=8)
    hidden: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda m, args: hidden.append(args[0]))
    rng = _rng()
    with torch.no_grad():
        for _ in range(400):
            gates.draw(rng, rows=8)
            model(**inputs)
        mean = torch.stack(hidden).mean(0)
        hidden.clear()
        model.eval()(**inputs)
    branch = (hidden[0] - model.model.embed_tokens(inputs["input_ids"])).abs().max()
    assert (mean - hidden[0]).abs().max() < 0.25 * branch


def test_evaluation_runs_everything():
    for mode in ("sample", "batch"):
        model = tiny.llama()
        inputs = loops.batch(model)
        expected = model.eval()(**inputs).logits
        gates = StochasticDepthGates(model, 0.01, mode)
        gates.draw(_rng(), rows=3)
        assert torch.equal(model.eval()(**inputs).logits, expected)


class Skips(TrainerCallback):
    """Counts the attention passes of each step, which a skipped block does not run."""

    def __init__(self, run: Any) -> None:
        self.passes: list[int] = []
        self.calls: list[int] = []
        for block in main_blocks(run.model, "test"):
            block.self_attn.register_forward_hook(lambda *_: self.calls.append(1))

    def on_step_begin(self, *args, **kwargs):
        self.calls.clear()

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.passes.append(len(self.calls))


def test_skipped_blocks_run_no_kernels(tmp_path):
    run = tiny.trainer(tmp_path, [PER_BATCH], tiny.llama(4), max_steps=12)
    skips = Skips(run)
    run.add_callback(skips)
    run.train()
    kept = sum(skips.passes)
    assert len(skips.passes) == 12
    assert kept < 48
    assert kept + sum(gate.skipped for gate in run.recipe["stochastic-depth"].gates.gates) >= 48


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("method", [PER_SAMPLE, PER_BATCH], ids=["sample", "batch"])
def test_a_step_does_not_depend_on_its_cut(tmp_path, family, method):
    if family == "bert" and method is PER_BATCH:
        pytest.skip("refused")
    results = []
    for size, accumulation in ((1, 4), (2, 2), (4, 1)):
        run = tiny.trainer(tmp_path / str(size), [method], tiny.FAMILIES[family](), max_steps=3, optim="sgd",
                           per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)  # fmt: skip
        run.train()
        results.append(tiny.weights(run.model))
    for other in results[1:]:
        tiny.assert_same(results[0], other, atol=1e-6)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_resumes(tmp_path, family):
    loops.resumes(tmp_path, [PER_SAMPLE], lambda: tiny.FAMILIES[family](2), max_steps=4)


@pytest.mark.parametrize("method", [PER_SAMPLE, PER_BATCH], ids=["sample", "batch"])
@pytest.mark.parametrize("other", [{"stacking": {"start_layers": 1, "boundaries": [0.34]}}, "gradient-checkpointing"])
def test_together(tmp_path, method, other):
    run = loops.resumes(tmp_path, [method, other], lambda: tiny.llama(2, dropout=0.1), max_steps=4, step=2)
    assert not any("forward" in vars(b) or "branch_mask" in vars(b) for b in main_blocks(run.model, "test"))


def test_phases():
    method: Any = Recipe.parse([{"stochastic-depth": {"mode": "batch"}}])["stochastic-depth"]
    assert [p.depth for p in method.phases(tiny.llama(4).config, 10)] == [0.6875]
    assert Recipe.parse(["stochastic-depth"])["stochastic-depth"].phases(tiny.llama(4).config, 10) == []


def test_in_ones_own_loop():
    def make():
        model = tiny.llama()
        gates, rng = StochasticDepthGates(model, 0.5), _rng()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return loops.Setup(model, optimizer, before_step=lambda step: gates.draw(rng, rows=2))

    _, losses = loops.both_loops(make)
    assert losses != loops.baseline(tiny.llama)[1]


def test_refused(tmp_path):
    with pytest.raises(NotApplicable, match="use mode sample"):
        tiny.trainer(tmp_path, [PER_BATCH], tiny.bert())
    for survival in (0.0, 1.5):
        with pytest.raises(InputError, match="survival"):
            Recipe.parse([{"stochastic-depth": {"survival": survival}}])
