"""Lottery tickets: densities, nested masks, rewinding to the bit, and the schedule of each round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TrainerCallback, get_scheduler

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.sparsity._masks import block_weights
from thrifty.methods.sparsity.lottery_ticket import Rounds, Ticket

TICKET = {"rounds": 2, "fraction": 0.5, "rewind": 0.25}
# Rounds of 4 steps, rewound to their step 1, begin at the steps 0, 4 and 7; the last one gets the step that is left.
STEPS = 11


class Watch(TrainerCallback):
    """Weights, masks, states and learning rates around every step."""

    def __init__(self, run: Any) -> None:
        self.run, self.rates = run, []
        self.begin: list[dict[str, torch.Tensor]] = []
        self.masks: list[dict[str, torch.Tensor]] = []
        self.fresh: list[bool] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin.append(tiny.weights(self.run.model))
        self.masks.append({n: m.clone() for n, m in self.run.recipe["lottery-ticket"].weights.masks.items()})
        self.fresh.append(not self.run.ctx.optimizer.state)
        self.rates.append(self.run.optimizer.param_groups[0]["lr"])


def _run(folder: Any, build: Any = tiny.llama, max_steps: int = STEPS, **settings: Any) -> tuple[Any, Watch]:
    run = tiny.trainer(folder, [{"lottery-ticket": {**TICKET, **settings}}], build(), max_steps=max_steps)
    run.add_callback(watch := Watch(run))
    run.train()
    return run, watch


@pytest.mark.parametrize("total", [3, 7, 50, 101])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("rewind", [0.0, 0.3])
def test_rounds_fill_the_run(total, count, rewind):
    division = Rounds.divide(total, count, rewind)
    if division.length < 1:
        assert total < count + 1
        return
    assert division.starts == sorted(set(division.starts))
    assert division.starts[-1] < total
    places = [division.place(step) for step in range(total)]
    for start in division.starts:
        assert places[start] == division.rewind
        assert places[start - 1] == division.length - 1  # each round but the last is trained to its end
    assert places[-1] == division.length_of(count) - 1
    assert division.length_of(count) - division.length <= count + 1


@pytest.mark.parametrize("family", ["gpt2", "bert", "vit"])
def test_densities_nesting_and_rewinding(tmp_path, family):
    run, watch = _run(tmp_path, tiny.FAMILIES[family])
    division: Rounds = run.recipe["lottery-ticket"].division
    assert (division.length, division.rewind, division.starts) == (4, 1, [4, 7])
    size = sum(mask.numel() for mask in watch.masks[0].values())
    kept = [sum(int(m.sum()) for m in masks.values()) for masks in watch.masks]
    expected = [size] * 4 + [round(0.5 * size)] * 3 + [round(0.25 * size)] * 4
    assert kept == expected
    early = watch.begin[division.rewind]
    for start in division.starts:
        for name, value in watch.begin[start].items():
            mask = watch.masks[start].get(name)
            assert torch.equal(value, early[name] if mask is None else early[name] * mask), name
    assert [step for step, fresh in enumerate(watch.fresh) if fresh] == [0, *division.starts]
    for before, after in zip(watch.masks[:-1], watch.masks[1:], strict=True):
        assert all(not (after[name] & ~before[name]).any() for name in after)
    for name, mask in watch.masks[-1].items():
        assert not run.model.get_parameter(name)[~mask].any()


def test_the_smallest_trained_weights_go(tmp_path):
    trained = []

    class AtTheEnd(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                trained.append(tiny.weights(kwargs["model"]))

    run = tiny.trainer(tmp_path, [{"lottery-ticket": TICKET}], max_steps=STEPS)
    run.add_callback(watch := Watch(run))
    run.add_callback(AtTheEnd())
    run.train()
    masks = watch.masks[4]
    kept = min(float(trained[0][n][m].abs().min()) for n, m in masks.items() if m.any())
    gone = max(float(trained[0][n][~m].abs().max()) for n, m in masks.items() if not m.all())
    assert kept >= gone


def test_each_round_has_the_schedule_from_where_it_is_rewound_to(tmp_path):
    _, watch = _run(tmp_path)
    peak = 1e-2

    def plain(length: int) -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
        scheduler: Any = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=length)
        return [peak * scheduler.lr_lambdas[0](step) for step in range(length)]

    expected = plain(4) + plain(4)[1:] + plain(5)[1:]
    assert watch.rates == pytest.approx(expected)


def test_nothing_pruned_is_plain_training_to_the_bit(tmp_path):
    """Up to the first rewinding the run is that of a plain one of a round's length."""
    run, watch = _run(tmp_path / "ticket", fraction=0.0)
    plain = tiny.trainer(tmp_path / "plain", [], tiny.llama(), max_steps=4)
    steps: list[dict[str, torch.Tensor]] = []

    class Keep(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            steps.append(tiny.weights(plain.model))

    plain.add_callback(Keep())
    plain.train()
    assert tiny.losses(plain) == tiny.losses(run)[:4]
    for first, second in zip(steps, watch.begin, strict=False):
        tiny.assert_same(first, second)
    assert all(mask.all() for mask in watch.masks[-1].values())


@pytest.mark.parametrize("step", [1, 4, 5])
def test_resumes_around_every_rewinding(tmp_path, step):
    loops.resumes(tmp_path, [{"lottery-ticket": TICKET}], lambda: tiny.gpt2(dropout=0.1), max_steps=STEPS, step=step)


def test_by_layer_each_layer_loses_the_same_share(tmp_path):
    _, watch = _run(tmp_path, scope="layer")
    for mask in watch.masks[-1].values():
        assert int(mask.sum()) == round(0.25 * mask.numel())


def test_controls(tmp_path):
    tickets = {name: _run(tmp_path / name, control=name) for name in ("none", "random", "reinit")}
    start = 4
    _, plain = tickets["none"]
    _, random = tickets["random"]
    _, reinit = tickets["reinit"]
    tiny.assert_same(plain.masks[start], reinit.masks[start])  # the same ticket ...
    early = plain.begin[1]
    for name, mask in plain.masks[start].items():
        assert not torch.equal(reinit.begin[start][name], early[name] * mask)  # ... with other values
        values = reinit.begin[start][name][mask]
        assert torch.isin(values, early[name]).all()
    assert any(not torch.equal(plain.masks[start][n], random.masks[start][n]) for n in plain.masks[start])
    assert sum(int(m.sum()) for m in random.masks[start].values()) == sum(
        int(m.sum()) for m in plain.masks[start].values()
    )


def test_own_loops_agree_and_act():
    def make() -> loops.Setup:
        model = tiny.gpt2()
        ticket = Ticket(block_weights(model, "test"))
        ticket.remember(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def after_step(step: int) -> None:
            ticket.apply(optimizer)
            if step == 1:
                ticket.prune(0.5)
                ticket.rewind(model)
                optimizer.state.clear()

        return loops.Setup(model, optimizer, after_backward=lambda step: ticket.mask_gradients(), after_step=after_step)

    setup, losses = loops.both_loops(make)
    plain = loops.baseline(tiny.gpt2)[1]
    assert losses[:2] == plain[:2]
    assert losses[2:] != plain[2:]
    weights = block_weights(setup.model, "test")
    assert sum(int((p == 0).sum()) for p in weights.values()) == sum(p.numel() for p in weights.values()) // 2


def test_refused_before_training(tmp_path):
    with pytest.raises(NotApplicable, match=r"rounds=5: lottery-ticket: 3 steps are too few.* Fix: train longer"):
        tiny.trainer(tmp_path, ["lottery-ticket"], max_steps=3)
    run = tiny.trainer(
        tmp_path, [{"lottery-ticket": TICKET}], lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps",
        eval_steps=1, max_steps=STEPS,
    )  # fmt: skip
    with pytest.raises(NotApplicable, match="not a function of the step"):
        run.train()


@pytest.mark.parametrize(
    "setting", [{"rounds": 0}, {"fraction": 1.0}, {"rewind": 1.0}, {"scope": "no"}, {"control": "no"}]
)
def test_bad_settings(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Recipe.parse([{"lottery-ticket": setting}])
