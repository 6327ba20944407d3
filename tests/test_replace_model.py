"""`trainer.replace_model`: the one door through which the model changes in mid-run."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import TrainerCallback

import tiny
from thrifty.methods.growth.stacking import stack


class ReplaceAt(TrainerCallback):
    """Calls a function at the end of one step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act(kwargs["model"])


def run(tmp_path, act=None, at=5, **overrides):
    trained = tiny.trainer(tmp_path, (), tiny.llama(dropout=0.1), max_steps=18, **overrides)
    if act is not None:
        trained.add_callback(ReplaceAt(at, lambda model: act(trained, model)))
    trained.train()
    return trained


@pytest.mark.parametrize("at", [5, 12])  # in the middle of an epoch of 12 steps, and at its end
@pytest.mark.parametrize("overrides", [{}, {"gradient_accumulation_steps": 2}, {"fp16": False, "bf16": True}])
def test_replacing_a_model_by_its_copy_changes_nothing(tmp_path, at, overrides):
    plain = run(tmp_path / "a", **overrides)
    replaced = run(tmp_path / "b", lambda t, m: t.replace_model(_bare_copy(t, m), {}), at, **overrides)
    assert tiny.losses(plain) == tiny.losses(replaced)
    assert len(tiny.losses(plain)) == 18
    tiny.assert_same(tiny.weights(plain.model), tiny.weights(replaced.model))


def _bare_copy(trained, model):
    bare = trained.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    return copy.deepcopy(bare)


def test_events_and_logs_are_those_of_one_run(tmp_path):
    """A segment that ends looks like the end of an epoch to the parent, but nobody else may see one."""

    class Count(TrainerCallback):
        def __init__(self):
            self.events = []

        def on_epoch_end(self, args, state, control, **kwargs):
            self.events.append(("epoch", state.global_step))

        def on_save(self, args, state, control, **kwargs):
            self.events.append(("save", state.global_step))

        def on_evaluate(self, args, state, control, **kwargs):
            self.events.append(("evaluate", state.global_step))

    seen = []
    for act in (None, lambda t, m: t.replace_model(_bare_copy(t, m), {})):
        count = Count()
        trained = tiny.trainer(
            tmp_path / str(act is None),
            (),
            tiny.llama(),
            max_steps=18,
            save_strategy="steps",
            save_steps=5,
            eval_strategy="steps",
            eval_steps=5,
        )
        trained.add_callback(count)
        if act:
            trained.add_callback(ReplaceAt(5, lambda model, t=trained, a=act: a(t, model)))
        trained.train()
        seen.append((count.events, [row["step"] for row in trained.state.log_history]))
    assert seen[0] == seen[1]


def test_optimizer_state_follows_the_map(tmp_path):
    states = {}

    def grow(trained, model):
        old = {n: trained.optimizer.optimizer.state[p]["exp_avg"].clone() for n, p in model.named_parameters()}
        mapping = stack(model, 4)
        mapping["model.layers.3.mlp.up_proj.weight"] = None
        trained.replace_model(model, mapping)
        new = trained.optimizer.optimizer.state
        states.update(old=old, new={n: new.get(p, {}).get("exp_avg") for n, p in trained.model.named_parameters()})
        states["new"] = {n: v.clone() if v is not None else None for n, v in states["new"].items()}

    trained = run(tmp_path, grow)
    assert len(trained.model.model.layers) == 4
    old, new = states["old"], states["new"]
    assert torch.equal(new["model.layers.2.mlp.up_proj.weight"], old["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(new["model.layers.3.self_attn.q_proj.weight"], old["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(new["lm_head.weight"], old["lm_head.weight"])
    assert new["model.layers.3.mlp.up_proj.weight"] is None
    copies = [trained.model.model.layers[i].mlp.up_proj.weight for i in (0, 2)]
    assert not torch.equal(*copies), "the copy must train on its own"


def test_schedule_goes_on_where_it_was(tmp_path):
    rates = []
    for act in (None, lambda t, m: t.replace_model(m, stack(m, 4))):
        trained = run(tmp_path / str(act is None), act)
        rates.append([row["learning_rate"] for row in trained.state.log_history if "learning_rate" in row])
    assert rates[0] == rates[1]
