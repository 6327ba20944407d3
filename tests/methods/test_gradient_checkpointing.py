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
from thrifty.architecture import main_blocks
from thrifty.methods.checkpointing.gradient_checkpointing import checkpoint_blocks

FAMILIES = {
    "llama": lambda: tiny.llama(4, dropout=0.2),
    "gpt2": lambda: tiny.gpt2(4, dropout=0.2),
    "bert": lambda: tiny.bert(4, dropout=0.2),
    "vit": lambda: tiny.vit(4),
}


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


def test_bad_settings():
    with pytest.raises(InputError, match="every must be at least 1"):
        Recipe.parse([{"gradient-checkpointing": {"every": 0}}])
