"""Selective backpropagation: which samples are picked, and that picking all is plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe, tasks
from thrifty.methods.attention.packing import collate_packed, pack
from thrifty.methods.selection.selective_backprop import LossSelector
from thrifty.samples import join_samples, split_samples


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0, 3.0])
def test_mean_share_that_is_picked(beta):
    selector, rng = LossSelector(beta, history=2048), _rng()
    losses = torch.rand(400, 32, generator=_rng(1))
    picked = [selector.pick(row, rng).float().mean() for row in losses]
    assert torch.stack(picked[64:]).mean().item() == pytest.approx(1 / (beta + 1), abs=0.015)


def test_beta_zero_picks_all_and_the_floor_is_a_floor():
    losses = torch.rand(50, 32, generator=_rng(1))
    everything, floored, bare = LossSelector(0.0), LossSelector(50.0, floor=0.25), LossSelector(50.0)
    assert all(everything.pick(row, _rng(i)).all() for i, row in enumerate(losses))
    shares = [torch.stack([s.pick(row, _rng(i)).float().mean() for i, row in enumerate(losses)]).mean().item()
              for s in (floored, bare)]  # fmt: skip
    assert shares[0] == pytest.approx(0.27, abs=0.03)
    assert shares[1] < 0.1


def test_only_ranks_matter():
    losses = torch.rand(30, 8, generator=_rng(2)) * 5
    picks = []
    for transform in (lambda x: x, lambda x: x.exp(), lambda x: 3 * x - 100, lambda x: x**3):
        selector = LossSelector(2.0)
        picks.append(torch.stack([selector.pick(transform(row), _rng(i)) for i, row in enumerate(losses)]))
    for other in picks[1:]:
        assert torch.equal(picks[0], other)
    assert 0 < picks[0].float().mean() < 1


def test_probability_is_the_rank_among_recent_losses_to_the_power():
    selector = LossSelector(2.0, history=100)
    selector.losses.extend(range(96))
    counts = torch.zeros(4)
    losses = torch.tensor([9.5, 49.5, 89.5, 200.0])
    for i in range(4000):
        selector.losses.clear()
        selector.losses.extend(range(96))
        counts += selector.pick(losses, _rng(i))
    ranks = [sum(h <= x for h in [*range(96), *losses.tolist()]) / 100 for x in losses.tolist()]
    torch.testing.assert_close(counts / 4000, torch.tensor(ranks) ** 2, rtol=0, atol=0.03)


def test_the_history_is_bounded_and_recent():
    selector = LossSelector(1.0, history=10)
    selector.pick(torch.arange(100.0), _rng())
    assert list(selector.losses) == [float(x) for x in range(90, 100)]
    assert selector.seen == 100


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_split_and_joined_samples_have_the_losses_they_had(family):
    """Also where samples of batches of other lengths come together."""
    model = tiny.FAMILIES[family]().eval()
    task = tasks.infer(model)
    expected, samples = [], []
    for inputs in loops.loader(model):
        keep = torch.tensor([True, len(samples) % 3 > 0])
        with torch.no_grad():
            expected.append(task.per_sample_loss(model, inputs)[keep])
        samples += split_samples(inputs, keep)
    if family != "vit":
        assert len({len(sample["input_ids"]) for sample in samples}) > 1
    with torch.no_grad():
        joined = task.per_sample_loss(model, join_samples(samples))
    torch.testing.assert_close(joined, torch.cat(expected), rtol=1e-5, atol=1e-6)


def test_packed_rows_stay_apart_when_joined():
    """An attention mask, added for rows of unequal lengths, would let the samples of a packed row see each other."""
    model = tiny.llama()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=_rng(p.numel())))
    model.eval()
    task = tasks.infer(model)
    texts = tiny.text_samples()
    batches = [collate_packed([pack(texts[:3])]), collate_packed([pack(texts[3:5]), pack(texts[5:6])])]
    for inputs in batches:
        del inputs["sample_id"]
    with torch.no_grad():
        expected = torch.cat([task.per_sample_loss(model, inputs) for inputs in batches])
        samples = [s for inputs in batches for s in split_samples(inputs, torch.ones(len(inputs["labels"])) > 0)]
        assert len({len(sample["input_ids"]) for sample in samples}) > 1
        joined = task.per_sample_loss(model, join_samples(samples))
        mask = torch.ones_like(join_samples(samples)["input_ids"])
        leaking = task.per_sample_loss(model, {**join_samples(samples), "attention_mask": mask})
    assert (leaking - expected).abs().max() > 0.01
    torch.testing.assert_close(joined, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        {"max_steps": 5},
        {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2},
        {"max_steps": 8, "per_device_train_batch_size": 4, "dataloader_drop_last": True, "bf16": True},
    ],
)
@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
def test_beta_zero_is_plain_training_to_the_bit(tmp_path, family, overrides):
    """7 samples: the last batch is smaller, and the last accumulation group incomplete. With dropout."""
    build = {"llama": lambda: tiny.llama(dropout=0.1), "bert": lambda: tiny.bert(dropout=0.1), "vit": tiny.vit}[family]
    samples = (tiny.image_samples() if family == "vit" else tiny.text_samples())[:7]
    runs = []
    for methods in ([], [{"selective-backprop": {"beta": 0.0}}]):
        run = tiny.trainer(tmp_path / str(len(methods)), methods, build(), samples=samples, **overrides)
        run.train()
        runs.append(run)
    assert tiny.losses(runs[0]) == tiny.losses(runs[1])
    tiny.assert_same(tiny.weights(runs[0].model), tiny.weights(runs[1].model))
    assert runs[0].state.global_step == runs[1].state.global_step


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trains_on_full_batches_of_the_picked_and_resumes(tmp_path, family):
    sizes: list[int] = []
    run = loops.resumes(
        tmp_path, [{"selective-backprop": {"beta": 2.0, "history": 16}}], tiny.FAMILIES[family], max_steps=4, step=2
    )
    method = run.recipe["selective-backprop"]
    assert method.draws * 2 > method.picked  # reads more than it trains on
    assert method.picked == 4 * 2 + len(method.queue)
    assert method.selector.seen == method.draws * 2

    again = tiny.trainer(tmp_path / "sizes", run.recipe.to_config(), tiny.FAMILIES[family](), max_steps=2)
    original = again.training_step

    def step(model: nn.Module, inputs: dict[str, Any], *args: Any) -> torch.Tensor:
        sizes.append(len(inputs["labels"]))
        return original(model, inputs, *args)

    again.training_step = step  # type: ignore[method-assign]
    again.train()
    assert sizes[-2:] == [2, 2]


def test_selection_leaves_no_graph_and_no_dropout(tmp_path):
    """The losses that decide are those of the model as it is evaluated, and training mode comes back."""
    run = tiny.trainer(tmp_path, [{"selective-backprop": {"beta": 1.0}}], tiny.llama(dropout=0.5), max_steps=1)
    run.model.train()
    method: Any = run.recipe["selective-backprop"]
    inputs = loops.batch(run.model)
    first, second = method._losses(run.ctx, inputs), method._losses(run.ctx, inputs)
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert run.model.training
    run.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(first, tasks.infer(run.model).per_sample_loss(run.model, inputs))


def test_own_loops_agree_and_act():
    def train(accelerate: bool) -> tuple[nn.Module, list[float], int]:
        model = net = tiny.llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches, backward = loops.loader(model), torch.Tensor.backward
        if accelerate:
            accelerator = loops.new_accelerator()
            net, optimizer, batches = accelerator.prepare(model, optimizer, batches)
            backward = accelerator.backward
        task, selector, rng = tasks.infer(model), LossSelector(1.0), _rng()
        queue: list[dict[str, torch.Tensor]] = []
        losses: list[float] = []
        drawn = 0
        for _ in range(4):
            for inputs in batches:
                with torch.no_grad():
                    keep = selector.pick(task.per_sample_loss(net.eval(), inputs), rng)
                drawn += len(keep)
                queue += split_samples(inputs, keep)
                while len(queue) >= 2:
                    optimizer.zero_grad()
                    loss = net.train()(**join_samples(queue[:2])).loss
                    backward(loss)
                    optimizer.step()
                    queue = queue[2:]
                    losses.append(loss.item())
        return model, losses, drawn

    model, losses, drawn = train(False)
    wrapped, again, _ = train(True)
    assert losses == again
    tiny.assert_same(tiny.weights(model), tiny.weights(wrapped))
    assert 0 < 2 * len(losses) < drawn


def test_too_little_data_is_refused(tmp_path):
    with pytest.raises(NotApplicable, match=r"per_device_train_batch_size=4: selective-backprop: .* Fix: make it sm"):
        tiny.trainer(tmp_path, ["selective-backprop"], samples=tiny.text_samples()[:3], per_device_train_batch_size=4)


@pytest.mark.parametrize("setting", [{"beta": -1.0}, {"floor": 1.5}, {"history": 0}])
def test_bad_settings(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Recipe.parse([{"selective-backprop": setting}])


def test_what_the_collator_tells_the_model_stays_with_the_samples():
    """CLIP gives no loss unless it is asked for it."""
    batch = {"input_ids": torch.ones(3, 4, dtype=torch.long), "return_loss": True, "longest": 4}
    joined = join_samples(split_samples(batch, torch.tensor([True, False, True])))
    assert joined["return_loss"] is True
    assert joined["input_ids"].shape == (2, 4)
    assert "longest" not in joined  # numbers are the batch's own
