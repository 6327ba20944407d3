"""LAWA: a window of copies and their mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.large_batch.lawa import LatestWeightAverage


def _set(model: nn.Module, value: torch.Tensor) -> None:
    with torch.no_grad():
        model.weight.copy_(value)  # type: ignore[union-attr, operator]


def test_on_a_line_the_mean_is_the_middle_of_the_window():
    model = nn.Linear(3, 2, bias=False)
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    average = LatestWeightAverage(window=4)
    times = range(0, 70, 10)
    for t in times:
        _set(model, a + b * t)
        average.push(model)
        assert len(average.snapshots) <= 4
    middle = sum(list(times)[-4:]) / 4
    average.copy_to(model)
    torch.testing.assert_close(model.weight.detach(), a + b * middle)


def test_a_window_of_one_is_the_last_snapshot():
    model = nn.Linear(3, 2, bias=False)
    average = LatestWeightAverage(window=1)
    for t in range(3):
        _set(model, torch.full((2, 3), float(t)))
        average.push(model)
    _set(model, torch.full((2, 3), 99.0))
    average.copy_to(model)
    assert torch.equal(model.weight.detach(), torch.full((2, 3), 2.0))


def test_snapshots_are_copies():
    model = nn.Linear(3, 2, bias=False)
    average = LatestWeightAverage(window=2)
    _set(model, torch.zeros(2, 3))
    average.push(model)
    _set(model, torch.ones(2, 3))
    assert not average.snapshots[0]["weight"].any()


def test_windows_are_not_shared_between_instances():
    first, second = Recipe.parse(["lawa"])["lawa"], Recipe.parse(["lawa"])["lawa"]
    first.average.push(nn.Linear(2, 2))  # type: ignore[attr-defined]
    assert not second.average.snapshots  # type: ignore[attr-defined]


def test_buffers_and_frozen_weights_stay_and_tied_ones_count_once():
    model = tiny.gpt2()  # its head is tied to its embedding
    model.register_buffer("steps", torch.tensor(7))
    frozen = model.get_parameter("transformer.wpe.weight")
    frozen.requires_grad_(False)
    average = LatestWeightAverage(window=2)
    average.push(model)
    assert "lm_head.weight" not in average.snapshots[0]
    assert "transformer.wpe.weight" not in average.snapshots[0]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    before = frozen.clone()
    average.copy_to(model)
    assert torch.equal(frozen, before)
    assert model.steps.item() == 7  # type: ignore[union-attr, operator]
    assert model.lm_head.weight is model.transformer.wte.weight  # type: ignore[union-attr]


def test_applied_restores_to_the_bit_also_after_an_error():
    model = tiny.llama()
    average = LatestWeightAverage(window=2)
    average.push(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    own = tiny.weights(model)

    def fail_inside() -> None:
        with average.applied(model):
            assert not torch.equal(model.get_parameter("lm_head.weight"), own["lm_head.weight"])
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    tiny.assert_same(tiny.weights(model), own)


def test_own_loops_agree_and_act():
    averages = []

    def make() -> loops.Setup:
        model = tiny.llama()
        average = LatestWeightAverage(window=2)
        averages.append(average)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return loops.Setup(model, optimizer, after_step=lambda step: average.push(model))

    setup, losses = loops.both_loops(make)
    plain, plain_losses = loops.baseline(tiny.llama)
    assert losses == plain_losses  # training is untouched
    tiny.assert_same(tiny.weights(setup.model), tiny.weights(plain))
    tiny.assert_same(*(average.snapshots[0] for average in averages))
    averages[0].copy_to(setup.model)
    assert not torch.equal(setup.model.get_parameter("lm_head.weight"), plain.get_parameter("lm_head.weight"))


class Recorder(TrainerCallback):
    """Copies the weights after every step, and the weights that an evaluation sees."""

    def __init__(self) -> None:
        self.trained: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        assert model is not None
        self.trained.append(tiny.weights(model))


def _mean(weights: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: sum(w[name].double() for w in weights).div(len(weights)).float() for name in weights[0]}  # type: ignore[union-attr]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trainer_saves_the_mean_and_trains_as_ever(tmp_path, family):
    build = tiny.FAMILIES[family]
    plain = tiny.trainer(tmp_path / "plain", [], build(), max_steps=5)
    plain.add_callback(recorder := Recorder())
    plain.train()
    run = loops.resumes(tmp_path, [{"lawa": {"window": 2, "every": 2}}], build, max_steps=5, step=3)
    assert tiny.losses(run) == tiny.losses(plain)
    expected = _mean([recorder.trained[1], recorder.trained[3]])  # after steps 2 and 4
    tiny.assert_same(tiny.weights(run.model), expected, atol=5e-7)
    assert not torch.equal(next(run.model.parameters()), next(plain.model.parameters()))


def test_evaluation_sees_the_mean_and_checkpoints_hold_the_weights(tmp_path):
    run = tiny.trainer(
        tmp_path,
        [{"lawa": {"window": 3, "every": 1}}],
        max_steps=4,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
    )
    run.add_callback(recorder := Recorder())
    run.train()
    reported = next(row["eval_loss"] for row in run.state.log_history if "eval_loss" in row)
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    tiny.assert_same(saved, {name: recorder.trained[2][name] for name in saved})

    model = tiny.llama()
    model.load_state_dict(_mean(recorder.trained[:3]), strict=False)
    other = tiny.trainer(tmp_path / "other", [], model)
    assert other.evaluate()["eval_loss"] == pytest.approx(reported, rel=1e-6)
    tiny.assert_same(tiny.weights(run.model), _mean(recorder.trained[1:4]), atol=5e-7)


def test_a_growing_model_starts_the_window_anew(tmp_path):
    run = tiny.trainer(
        tmp_path,
        [{"lawa": {"window": 10, "every": 1}}, {"stacking": {"start_layers": 1, "boundaries": [0.5]}}],
        tiny.llama(2),
        max_steps=6,
    )
    run.add_callback(recorder := Recorder())
    run.train()
    method: Any = run.recipe["lawa"]
    window = method.average.snapshots
    assert {len(snapshot) for snapshot in window} == {len(dict(run.model.named_parameters()))}
    assert 0 < len(window) <= 4
    tiny.assert_same(tiny.weights(run.model), _mean(recorder.trained[-len(window) :]), atol=5e-7)


def test_a_run_without_snapshots_is_refused(tmp_path):
    with pytest.raises(NotApplicable, match=r"methods\.lawa\.every=1000: lawa: .*6 steps.* Fix: set every"):
        tiny.trainer(tmp_path, ["lawa"], max_steps=6)


@pytest.mark.parametrize("settings", [{"window": 0}, {"every": 0}])
def test_bad_settings(settings):
    with pytest.raises(InputError, match=f"{next(iter(settings))} must be at least 1"):
        Recipe.parse([{"lawa": settings}])
