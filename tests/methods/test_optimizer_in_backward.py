"""The optimizer's step inside the backward pass: bit for bit the usual step, and gradients never exist together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.optimizers.optimizer_in_backward import StepInBackward
from thrifty.planner._private import profiled_allocations


def _runs(tmp_path, methods: list[Any], build: Callable[[], nn.Module], **overrides: Any) -> list[Any]:
    """The same training without and with the method."""
    runs = []
    for extra in ([], ["optimizer-in-backward"]):
        settings = {"max_steps": 5, "max_grad_norm": 0.0, **overrides}
        runs.append(tiny.trainer(tmp_path / str(len(extra)), [*methods, *extra], build(), **settings))
        runs[-1].train()
    return runs


@pytest.mark.parametrize(
    ("optimizer", "family"),
    [
        ({"adamw": {"implementation": "loop"}}, "llama"),
        ({"adamw": {"implementation": "foreach"}}, "gpt2"),
        ("adamw", "bert"),
        ("adamw", "vit"),
        ("lion", "gpt2"),
        ("muon", "gpt2"),
        ("lamb", "llama"),
        ("adafactor", "llama"),
    ],
)
def test_equals_the_usual_step_bit_for_bit(tmp_path, optimizer, family):
    """Schedule with warm-up, weight decay, dropout, tied weights."""
    build = (lambda: tiny.FAMILIES[family](dropout=0.1)) if family != "vit" else tiny.vit
    usual, early = _runs(tmp_path, [optimizer], build)
    assert tiny.losses(early) == tiny.losses(usual)
    tiny.assert_same(tiny.weights(early.model), tiny.weights(usual.model))
    wanted, found = (run.ctx.optimizer.state_dict()["state"] for run in (usual, early))
    assert found.keys() == wanted.keys()
    for index, state in wanted.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found[index][key]), torch.as_tensor(value)), (index, key)


def test_the_default_optimizer_of_the_run_and_the_logged_norm(tmp_path):
    usual, early = _runs(tmp_path, [], tiny.llama)
    tiny.assert_same(tiny.weights(early.model), tiny.weights(usual.model))
    norms = [[row["grad_norm"] for row in run.state.log_history if "grad_norm" in row] for run in (usual, early)]
    assert len(norms[0]) == 5
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    rates = [[row["learning_rate"] for row in run.state.log_history if "loss" in row] for run in (usual, early)]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 3


class _Watch(TrainerCallback):
    def __init__(self, model: nn.Module) -> None:
        self.model, self.left = model, 0

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.left += sum(p.grad is not None for p in self.model.parameters())


def test_resumes_and_no_gradient_is_left(tmp_path):
    watches = []

    def watch(run: Any) -> TrainerCallback:
        watches.append(_Watch(run.model))
        return watches[0]

    loops.resumes(tmp_path, ["optimizer-in-backward"], lambda: tiny.gpt2(dropout=0.1), max_steps=4, watch=watch)
    assert watches[0].left == 0


def test_with_checkpointing_bf16_lora_and_growth(tmp_path):
    for index, methods in enumerate((["gradient-checkpointing", "bf16"], [{"lora": {"r": 2}}])):
        usual, early = _runs(tmp_path / str(index), methods, lambda: tiny.llama(dropout=0.1), max_steps=3)
        tiny.assert_same(tiny.weights(early.model), tiny.weights(usual.model))
    preset = dict(Recipe.parse(["stacking"])["stacking"].spec.preset)
    usual, early = _runs(tmp_path / "grown", [{"stacking": preset}], lambda: tiny.llama(4), max_steps=6)
    tiny.assert_same(tiny.weights(early.model), tiny.weights(usual.model))


class Deep(nn.Module):
    """Weights are nearly all its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def _peak(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    x = torch.ones(1, 128)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # now the state exists
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    return int(np.cumsum(profiled_allocations(profile)).max())


def test_peak_of_memory_falls_by_the_gradients():
    gradients = 4 * sum(p.numel() for p in Deep().parameters())
    usual, early = Deep(), Deep()
    first = torch.optim.AdamW(usual.parameters(), foreach=False)
    second = torch.optim.AdamW(early.parameters(), foreach=False)
    StepInBackward(second)
    before, after = _peak(first, usual), _peak(second, early)
    assert before > gradients
    assert after < 0.35 * gradients


def test_the_planner_sees_no_gradients(tmp_path, monkeypatch):
    from thrifty.planner.plan import estimate

    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    config = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6,
              "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
              "max_position_embeddings": 64}  # fmt: skip
    usual, early = (
        estimate(config, device="t4", seq_len=8, methods=methods) for methods in ([], ["optimizer-in-backward"])
    )
    gradients = 4 * usual.parameters
    assert usual.peak_allocated_bytes - early.peak_allocated_bytes > 0.7 * gradients


def test_own_loops_agree():
    def make() -> loops.Setup:
        model = tiny.bert()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        StepInBackward(optimizer)
        return loops.Setup(model, optimizer)

    setup, losses = loops.both_loops(make)
    model, expected = loops.baseline(tiny.bert)
    assert losses == expected
    tiny.assert_same(tiny.weights(setup.model), tiny.weights(model))


class _SharedCounter(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


def test_an_optimizer_with_a_counter_for_all_parameters_is_refused():
    model = tiny.llama()
    StepInBackward(_SharedCounter(model.parameters(), lr=0.1))
    with pytest.raises(NotApplicable, match="counts its steps"):
        model(**loops.batch(model)).loss.backward()


def test_a_loss_that_is_not_finite_updates_nothing(tmp_path):
    run = tiny.trainer(tmp_path, ["optimizer-in-backward"], max_steps=3)
    seen: list[Any] = []

    def poisoned(model: nn.Module, args: Any, output: Any) -> Any:
        if run.state.global_step == 1 and model.training:
            seen.append(tiny.weights(model))
            output["loss"] = output["loss"] * float("nan")
        return output

    run.model.register_forward_hook(poisoned)

    class After(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                seen.append(tiny.weights(run.model))

    run.add_callback(After())
    run.train()
    tiny.assert_same(seen[-1], seen[-2])
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path):
    run = tiny.trainer(tmp_path, ["optimizer-in-backward"], max_steps=3)
    weight = run.model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda grad: grad * float("inf") if run.state.global_step == 1 else grad)
    with pytest.raises(InputError, match="not finite"):
        run.train()


def test_a_micro_batch_is_not_split(tmp_path):
    run = tiny.trainer(tmp_path, ["optimizer-in-backward"], max_steps=3)
    weight = run.model.model.layers[0].mlp.up_proj.weight

    def full(grad: torch.Tensor) -> torch.Tensor:
        if run.state.global_step == 1:
            raise torch.OutOfMemoryError("out of memory")
        return grad

    weight.register_hook(full)
    with pytest.raises(InputError, match="cannot be split"):
        run.train()


REFUSED: Iterable[tuple[dict[str, Any], str]] = [
    ({"gradient_accumulation_steps": 2}, "first micro-batch"),
    ({"max_grad_norm": 0.5}, "max_grad_norm"),
    ({"fp16": True}, "scaler"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_refuses_what_needs_the_whole_gradient(tmp_path, arguments, words):
    with pytest.raises(InputError, match=words):
        tiny.trainer(tmp_path, ["optimizer-in-backward"], **arguments)


@pytest.mark.parametrize("other", ["gradient-accumulation", "fp16", "schedule-free", "rigl"])
def test_refuses_methods_that_need_the_whole_gradient(other):
    with pytest.raises(InputError, match=other):
        Recipe.parse(["optimizer-in-backward", other])
