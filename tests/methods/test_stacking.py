"""Progressive stacking: what is copied where, and what a run really computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, TrainerCallback, set_seed

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.architecture import branch_outputs, main_blocks
from thrifty.methods.growth.stacking import stack, stages

GROWING = {"stacking": {"start_layers": 1, "boundaries": [0.34, 0.67]}}


def _blocks(model: nn.Module) -> list[Any]:
    return list(main_blocks(model, "test"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_blocks_are_equal_layer_by_layer_and_share_nothing(family):
    model: Any = tiny.FAMILIES[family](3)
    original = [{n: p.clone() for n, p in block.named_parameters()} for block in _blocks(model)]
    mapping = stack(model, 6)
    blocks = _blocks(model)
    assert len(blocks) == 6
    prefix = main_blocks(model, "test").prefix
    names = dict(model.named_parameters())
    for index, block in enumerate(blocks):
        for name, p in block.named_parameters():
            assert torch.equal(p, original[index % 3][name])
            assert mapping[f"{prefix}.{index}.{name}"] == f"{prefix}.{index % 3}.{name}"
    assert set(mapping) == {name for name in names if name.startswith(prefix)}
    storages = [p.untyped_storage().data_ptr() for block in blocks for p in block.parameters()]
    assert len(set(storages)) == len(storages)
    assert model.config.num_hidden_layers == 6
    for index, block in enumerate(blocks):
        assert {m.layer_idx for m in block.modules() if hasattr(m, "layer_idx")} <= {index}


def test_caches_do_not_collide():
    """Generation with the cache equals generation without it: wrong indices would mix up keys and values."""
    for build in (tiny.llama, tiny.gpt2):
        model: Any = build(2)
        stack(model, 4)
        with torch.no_grad():
            for p in model.parameters():  # random weights of a size that makes the tokens vary
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
        prompt = torch.arange(3, 9)[None]
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        cached = model.generate(prompt, use_cache=True, **settings)
        assert torch.equal(cached, model.generate(prompt, use_cache=False, **settings))


def _gemma(layers: int) -> Any:
    set_seed(1)
    config = Gemma2Config(
        vocab_size=tiny.VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"][:layers],
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("start", [2, 3])
def test_lists_in_the_configuration_follow(tmp_path, start):
    """What is saved after growing has as many entries as blocks, and loads to the same logits."""
    model = _gemma(4)
    stack(model, start)
    assert len(model.config.layer_types) == start
    stack(model, 2 * start)
    assert model.config.layer_types == (["sliding_attention", "full_attention", "sliding_attention"][:start]) * 2
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    inputs = {"input_ids": torch.arange(3, 15)[None]}  # longer than the window
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(**inputs).logits, model.eval()(**inputs).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "vit"])
def test_identity_blocks_stack_to_the_identity(family):
    model = tiny.FAMILIES[family](2)
    for block in _blocks(model):
        for name in branch_outputs(block, "test"):
            for p in block.get_submodule(name).parameters():
                nn.init.zeros_(p)
    inputs = loops.batch(model)
    model.eval()
    with torch.no_grad():
        expected = model(**inputs).logits
        stack(model, 4)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=0)


def test_the_schedule_of_the_paper():
    plan = stages(12, 3, (0.125, 0.3), 400)
    assert plan == [(0, 3), (50, 6), (120, 12)]
    method = Recipe.parse([{"stacking": {"start_layers": 3}}])["stacking"]
    phases = method.phases(tiny.llama(12).config, 400)
    assert phases is not None
    cost = sum(phase.steps * int(phase.description.split()[0]) for phase in phases)
    assert cost == 3 * 50 + 6 * 70 + 12 * 280
    assert sum(phase.steps for phase in phases) == 400
    assert [phase.depth for phase in phases] == [3 / 12, 6 / 12, 1.0]


@pytest.mark.parametrize(
    ("depth", "start", "boundaries"), [(5, 2, (0.2,)), (7, 1, (0.1, 0.2, 0.3)), (4, 3, (0.5, 0.6))]
)
def test_every_schedule_ends_at_the_full_depth(depth, start, boundaries):
    plan = stages(depth, start, boundaries, 100)
    assert plan[-1][1] == depth
    assert [layers for _, layers in plan] == sorted({layers for _, layers in plan})
    assert [step for step, _ in plan] == sorted({step for step, _ in plan})


class Watch(TrainerCallback):
    """Counts the blocks that run in each step, and keeps the optimizer's states."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks: list[int] = []
        self._calls = 0
        kind = type(_blocks(model)[0])
        self._handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_: self._count() if isinstance(module, kind) else None
        )

    def _count(self) -> None:
        self._calls += 1

    def on_step_begin(self, *args, **kwargs):
        self._calls = 0

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.blocks.append(self._calls)

    def on_train_end(self, *args, **kwargs):
        self._handle.remove()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trains_grows_and_resumes(tmp_path, family):
    """6 steps: 1 block for 2, 2 blocks for 2, 4 blocks for 2. The work is 14 block passes instead of 24."""
    build = lambda: tiny.FAMILIES[family](4)  # noqa: E731
    watch = Watch(build())
    run = loops.resumes(tmp_path, [GROWING], build, max_steps=6, step=2, watch=lambda _: watch)
    assert watch.blocks == [1, 1, 2, 2, 4, 4]
    rates = [row["learning_rate"] for row in run.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([0.0, 0.01, 0.008, 0.006, 0.004, 0.002])  # one schedule over all stages
    blocks = [p for block in _blocks(run.model) for p in block.parameters()]
    assert len({p.untyped_storage().data_ptr() for p in blocks}) == len(blocks)


@pytest.mark.parametrize("state", ["copy", "reset"])
def test_optimizer_states_at_a_doubling(tmp_path, state):
    run = tiny.trainer(
        tmp_path,
        [{"stacking": {"start_layers": 2, "boundaries": [0.5], "optimizer_state": state}}],
        tiny.llama(4),
        max_steps=4,
    )
    seen: dict[str, dict[str, torch.Tensor]] = {}

    class Look(TrainerCallback):
        def on_step_begin(self, args, control_state, control, **kwargs):
            if control_state.global_step == 2:
                optimizer: Any = run.ctx.optimizer
                for name, p in run.model.named_parameters():
                    found = {k: v.clone() for k, v in optimizer.state.get(p, {}).items() if k != "step"}
                    seen[name] = found
                storages = [v.untyped_storage().data_ptr() for s in optimizer.state.values() for v in s.values()]
                assert len(set(storages)) == len(storages)

    run.add_callback(Look())
    run.train()
    assert len(seen) == len(dict(run.model.named_parameters()))
    if state == "reset":
        assert not any(seen.values())
        return
    for name, found in seen.items():
        assert found["exp_avg"].any(), name
        for old, new in (("layers.0.", "layers.2."), ("layers.1.", "layers.3.")):
            if old in name:
                tiny.assert_same(seen[name.replace(old, new)], found)


def test_own_loops_agree_and_act():
    """Grow in the middle; a new optimizer takes the new parameters."""

    def train(accelerate: bool) -> tuple[nn.Module, list[float]]:
        model = tiny.llama(1)
        losses: list[float] = []
        for depth in (1, 2):
            stack(model, depth)
            setup = loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            losses += (loops.accelerate_loop if accelerate else loops.plain_loop)(setup)
        return model, losses

    model, losses = train(False)
    wrapped, again = train(True)
    assert losses == again
    tiny.assert_same(tiny.weights(model), tiny.weights(wrapped))
    first, second = (tiny.weights(block) for block in _blocks(model))
    assert any(not torch.equal(first[name], second[name]) for name in first)  # the copies have gone their own ways


def test_the_loss_jumps_and_recovers():
    """Doubling does not preserve the function; after it the deeper model gets below the smaller one's loss."""
    model = tiny.llama(1)
    inputs = loops.batch(model, size=8)

    def train(steps: int) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.train()
        for _ in range(steps):
            optimizer.zero_grad()
            model(**inputs).loss.backward()
            optimizer.step()

    def loss() -> float:
        with torch.no_grad():
            return model.eval()(**inputs).loss.item()

    train(25)
    small = loss()
    stack(model, 2)
    assert loss() > small + 0.01
    train(25)
    assert loss() < small


@pytest.mark.parametrize(
    ("settings", "layers", "match"),
    [
        ({"start_layers": 2}, 2, r"stacking: the model has 2 blocks.* Fix: set it below 2"),
        ({"start_layers": 1, "boundaries": [0.9, 0.95, 0.99]}, 8, r"stacking: the run has 6 steps.* Fix: train longer"),
    ],
)
def test_refused(tmp_path, settings, layers, match):
    with pytest.raises(NotApplicable, match=match):
        tiny.trainer(tmp_path, [{"stacking": settings}], tiny.llama(layers), max_steps=6)


@pytest.mark.parametrize(
    "settings",
    [{"boundaries": []}, {"boundaries": [0.5, 0.2]}, {"boundaries": [1.0]}, {"start_layers": 0}, {"start_layers": -1},
     {"optimizer_state": "keep"}],
)  # fmt: skip
def test_bad_settings(settings):
    """No boundary at all would never grow: the model would stay shallow to its end."""
    with pytest.raises(InputError, match=next(iter(settings))):
        Recipe.parse([{"stacking": settings}])
