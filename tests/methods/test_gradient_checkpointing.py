"""Gradient checkpointing: the same gradients to the bit, with dropout; the blocks and only they run twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty._hf import enable_checkpointing
from thrifty.architecture import main_blocks
from thrifty.methods.checkpointing._selective import keep_products_context
from thrifty.methods.checkpointing.gradient_checkpointing import (
    GradientCheckpointing,
    checkpoint_blocks,
    checkpoint_some,
)
from thrifty.planner._private import TorchDispatchMode, profiled_allocations

FAMILIES = {
    "llama": lambda: tiny.llama(4, dropout=0.2),
    "gpt2": lambda: tiny.gpt2(4, dropout=0.2),
    "bert": lambda: tiny.bert(4, dropout=0.2),
    "vit": lambda: tiny.vit(4),
}


class CountOps(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def _gradients(model: nn.Module, seed: int = 9) -> dict[str, torch.Tensor]:
    model.train()
    torch.manual_seed(seed)
    model(**loops.batch(model)).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_equal_and_blocks_run_twice(family, every):
    plain, thrifty_one = FAMILIES[family](), FAMILIES[family]()
    assert checkpoint_blocks(thrifty_one, every=every) == len(range(0, 4, every))
    # Hooks on a module inside each block: the block's own hooks may or may not be part of the recomputation.
    inner = [next(m for m in block.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D")
             for block in main_blocks(thrifty_one, "test")]  # fmt: skip
    calls = [loops.count_calls(module) for module in inner]
    head = loops.count_calls(thrifty_one.get_submodule(_head(thrifty_one)))
    tiny.assert_same(_gradients(thrifty_one), _gradients(plain))
    assert [len(c) for c in calls] == [2 if index % every == 0 else 1 for index in range(4)]
    assert len(head) == 1


def _head(model: nn.Module) -> str:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]


def test_dropout_really_drops():
    """The equality above would be worth little if nothing were random."""
    plain = FAMILIES["llama"]()
    first, second = _gradients(plain, seed=1), _gradients(FAMILIES["llama"](), seed=2)
    assert any(not torch.equal(first[name], second[name]) for name in first)


@contextlib.contextmanager
def _saved_bytes() -> Iterator[dict[int, int]]:
    """Bytes that autograd holds for the backward pass, by storage."""
    held: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, nn.Parameter):
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield held


def test_fewer_blocks_cost_less_memory():
    held = {}
    for every in (None, 2, 1):
        model = tiny.llama(4)
        if every is not None:
            checkpoint_blocks(model, every=every)
        model.train()
        with _saved_bytes() as saved:
            loss = model(**loops.batch(model)).loss
            held[every] = sum(saved.values())
        del loss
    assert held[1] < held[2] < held[None]


def test_own_loops_agree_and_act():
    models = []

    def make() -> loops.Setup:
        model = tiny.llama(4, dropout=0.2)
        checkpoint_blocks(model)
        models.append((model, loops.count_calls(model.get_submodule("model.layers.0.self_attn.q_proj"))))
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    setup, losses = loops.both_loops(make)
    assert [len(calls) for _, calls in models] == [2 * len(losses)] * 2
    torch.manual_seed(5)
    plain, plain_losses = loops.baseline(lambda: tiny.llama(4, dropout=0.2))
    assert losses == plain_losses
    tiny.assert_same(tiny.weights(setup.model), tiny.weights(plain))


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_and_resumes(tmp_path, family):
    run = loops.resumes(tmp_path, [{"gradient-checkpointing": {"every": 2}}], FAMILIES[family])
    assert run.recipe["gradient-checkpointing"].checkpointed == 2
    plain = tiny.trainer(tmp_path / "plain", [], FAMILIES[family](), max_steps=3)
    plain.train()
    tiny.assert_same(tiny.weights(run.model), tiny.weights(plain.model))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_with_frozen_embeddings_under_adapters(tmp_path, family):
    """The old reentrant form leaves the adapters without gradients: no input of the first block requires one."""
    calls: list[int] = []
    runs = []
    for methods in (["lora"], ["lora", "gradient-checkpointing"]):
        run = tiny.trainer(tmp_path / str(len(methods)), methods, FAMILIES[family](), max_steps=2, learning_rate=0.05)
        block = main_blocks(run.model, "test").layers[0]
        calls = loops.count_calls(next(m for n, m in block.named_modules() if n.endswith("lora_A.default")))
        run.add_callback(loops.LastStep(calls))
        run.train()
        runs.append(tiny.weights(run.model))
    assert len(calls) == 2
    tiny.assert_same(*runs)
    untouched = tiny.weights(FAMILIES[family]())
    assert any(not torch.equal(untouched[name], runs[1][name]) for name in untouched)


def test_growing_keeps_every(tmp_path):
    run = tiny.trainer(
        tmp_path,
        [{"gradient-checkpointing": {"every": 2}}, {"stacking": {"start_layers": 1, "boundaries": [0.5]}}],
        tiny.llama(4),
        max_steps=4,
    )
    run.train()
    blocks: list[Any] = list(main_blocks(run.model, "test"))
    assert [block.gradient_checkpointing for block in blocks] == [True, False, True, False]


class Unsupported(PreTrainedModel):
    config_class = PreTrainedConfig
    supports_gradient_checkpointing = False

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(2, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear.weight.sum() + input_ids.sum() + labels.sum()}


def test_refused_where_the_model_has_no_support(tmp_path):
    with pytest.raises(NotApplicable, match=r"gradient-checkpointing: Unsupported .* Fix: remove"):
        tiny.trainer(tmp_path, ["gradient-checkpointing"], Unsupported(PreTrainedConfig()))


POLICIES: list[dict[str, Any]] = [
    {"policy": "sqrt"},
    {"policy": "every-n", "every": 3},
    {"policy": "k-of-l", "k": 2},
    {"policy": "selective"},
    {"policy": "optimal", "budget": 0.6},
    {"policy": "milp", "budget": 0.8},
]


@pytest.mark.parametrize("settings", POLICIES, ids=lambda s: s["policy"])
@pytest.mark.parametrize("family", ["gpt2", "vit"])
def test_policies_train_as_without_and_resume(tmp_path, family, settings):
    run = loops.resumes(tmp_path, [{"gradient-checkpointing": settings}], FAMILIES[family])
    expected = {"k-of-l": 2, "every-n": 2}.get(settings["policy"], 4)
    assert run.recipe["gradient-checkpointing"].checkpointed == expected
    plain = tiny.trainer(tmp_path / "plain", [], FAMILIES[family](), max_steps=3)
    plain.train()
    tiny.assert_same(tiny.weights(run.model), tiny.weights(plain.model))


@pytest.mark.parametrize(("side", "twice"), [("first", [2, 2, 2, 1]), ("last", [1, 2, 2, 2])])
def test_k_of_l(side, twice):
    model = tiny.llama(4)
    checkpoint_blocks(model)
    assert checkpoint_some(model, 3, side=side) == 3
    calls = [loops.count_calls(block.get_submodule("mlp.up_proj")) for block in main_blocks(model, "test")]
    _gradients(model)
    assert [len(c) for c in calls] == twice


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_selective_runs_products_once_and_the_rest_twice(family):
    plain, ours = FAMILIES[family](), FAMILIES[family]()
    enable_checkpointing(ours, {"use_reentrant": False, "context_fn": keep_products_context})
    tiny.assert_same(_gradients(ours), _gradients(plain))
    counts = []
    for model in (plain, ours):
        counter = CountOps()
        with counter:
            _gradients(model)
        counts.append(counter.counts)
    # Attention with dropout is made of products of batches here, which are kept.
    for name in ("aten.mm", "aten.addmm", "aten.bmm"):
        assert counts[0].get(name, 0) == counts[1].get(name, 0)
    cheap = {"llama": "aten.silu", "bert": "aten.gelu"}[family]
    assert counts[1][cheap] == counts[0][cheap] + 4


def test_selective_keeps_between_nothing_and_all():
    held = {}
    for name, kwargs in (("full", {}), ("selective", {"context_fn": keep_products_context}), ("none", None)):
        model = tiny.llama(4)
        if kwargs is not None:
            enable_checkpointing(model, {"use_reentrant": False, **kwargs})
        model.train()
        inputs = loops.batch(model)
        with torch.profiler.profile(profile_memory=True) as profile:
            loss = model(**inputs).loss
        held[name] = sum(profiled_allocations(profile))
        del loss
    assert held["full"] < held["selective"] < held["none"]


def test_memory_budget_is_set_for_the_compiler(tmp_path):
    import torch._functorch.config as compiler

    before = compiler.activation_memory_budget
    with pytest.raises(NotApplicable, match="the model is not compiled"):
        tiny.trainer(tmp_path, [{"gradient-checkpointing": {"policy": "memory-budget"}}])
    method = GradientCheckpointing(policy="memory-budget", budget=0.25)
    method.on_train_begin(None, None, None, model=tiny.llama())  # type: ignore[arg-type]
    assert compiler.activation_memory_budget == 0.25
    method.on_train_end(None, None, None)  # type: ignore[arg-type]
    assert compiler.activation_memory_budget == before


def test_schedules_refuse_compiled_models(tmp_path):
    with pytest.raises(NotApplicable, match="the compiler does not see"):
        tiny.trainer(tmp_path, [{"gradient-checkpointing": {"policy": "sqrt"}}], torch_compile=True)


def test_growing_keeps_the_schedule(tmp_path):
    methods: list[Any] = [{"gradient-checkpointing": {"policy": "optimal"}}]
    grow = {"stacking": {"start_layers": 1, "boundaries": [0.5]}}
    runs = []
    for recipe in ([*methods, grow], [grow]):
        run = tiny.trainer(tmp_path / str(len(recipe)), recipe, tiny.llama(4, dropout=0.1), max_steps=4)
        run.train()
        runs.append(run)
    assert len(runs[0].recipe["gradient-checkpointing"].scheduled.blocks) == 4
    tiny.assert_same(tiny.weights(runs[0].model), tiny.weights(runs[1].model))


def test_schedules_with_adapters(tmp_path):
    runs = []
    for methods in (["lora"], ["lora", {"gradient-checkpointing": {"policy": "optimal", "budget": 0.6}}]):
        run = tiny.trainer(tmp_path / str(len(methods)), methods, FAMILIES["llama"](), max_steps=2, learning_rate=0.05)
        run.train()
        runs.append(tiny.weights(run.model))
    tiny.assert_same(*runs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"every": 2, "policy": "sqrt"}, "every=2 does not go with the policy sqrt"),
        ({"policy": "k-of-l", "k": 0}, "k must be at least 1"),
        ({"policy": "optimal", "budget": 1.5}, "budget must be above 0"),
        ({"budget_bytes": 100}, "goes with optimal and milp only"),
        ({"policy": "twice"}, "is not one of"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(InputError, match=message):
        Recipe.parse([{"gradient-checkpointing": settings}])
