"""Joint offloading and recomputation: optimal by exhaustive search, its limiting cases, and the same gradients."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from methods.chains import random_chain, unequal
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.checkpointing._chain import Chain, simulate
from thrifty.methods.checkpointing._checkmate import Node, checkmate
from thrifty.methods.checkpointing._executor import Meter
from thrifty.methods.offload._joint import CHOICES, Plan, as_schedule, assess, joint
from thrifty.methods.offload.activation_offload import HostActivations
from thrifty.methods.offload.offload_and_recompute import OffloadedAndRecomputed, link_bandwidth


def all_plans(chain: Chain) -> list[Plan]:
    plans = [assess(chain, choices) for choices in itertools.product(CHOICES, repeat=len(chain))]
    return [plan for plan in plans if math.isfinite(plan.time)]


def chains(seed: int, count: int, bandwidths: tuple[float, ...] = (0.0, 0.3, 1.0, 3.0, 1e9)) -> list[Chain]:
    rng = random.Random(seed)
    made = []
    for index in range(count):
        chain = random_chain(rng, rng.randint(1, 5), bandwidth=rng.choice(bandwidths))
        made.append(Chain(**{**vars(chain), "gradients": chain.inputs}) if index % 2 else chain)
    return made


def test_equals_exhaustive_search():
    for chain in chains(1, 30):
        plans = all_plans(chain)
        for memory in range(min(p.peak for p in plans), max(p.peak for p in plans) + 1, 3):
            found = joint(chain, memory)
            assert found.peak <= memory
            assert found.time == pytest.approx(min(p.time for p in plans if p.peak <= memory))
        with pytest.raises(InputError, match="no division"):
            joint(chain, min(p.peak for p in plans) - 1)


def test_no_worse_than_either_alone_and_sometimes_better():
    better = 0
    for chain in chains(2, 40, (0.5, 1.0, 2.0)):
        alone = [("keep", "offload"), ("keep", "recompute")]
        memory = (assess(chain, ("keep",) * len(chain)).peak * 2) // 3
        times = []
        for allowed in alone:
            try:
                times.append(joint(chain, memory, allowed).time)  # type: ignore[arg-type]
            except InputError:
                times.append(math.inf)
        try:
            both = joint(chain, memory).time
        except InputError:
            assert times == [math.inf, math.inf]
            continue
        assert both <= min(times)
        better += both < min(times)
    assert better > 3


def test_without_a_link_it_is_recomputation():
    for chain in chains(3, 20, (0.0,)):
        memory = assess(chain, ("recompute",) * len(chain)).peak + 5
        assert joint(chain, memory).time == joint(chain, memory, ("keep", "recompute")).time
        assert "offload" not in joint(chain, memory).choices


def test_with_an_infinite_link_nothing_is_recomputed():
    for chain in chains(4, 20, (1e12,)):
        everything = sum(chain.forward) + sum(chain.backward)
        memory = assess(chain, ("offload",) * len(chain)).peak
        assert joint(chain, memory).time == pytest.approx(everything)
        assert "recompute" not in joint(chain, memory).choices


def test_overlap_by_hand():
    """Two blocks, 4 bytes each on a link of one byte a unit. Sending the first hides behind the second's forward (3 of
    4), fetching behind its backward (6 of 4): one unit of stalling."""
    chain = Chain(forward=(1.0, 3.0), backward=(2.0, 6.0), inputs=(1, 1, 0), saved=(3, 3), bandwidth=1.0)
    assert assess(chain, ("offload", "keep")).time == 1 + 3 + 1 + 6 + 2
    # Both: the second's sending and fetching cannot hide, and the first waits for it on the same link.
    assert assess(chain, ("offload", "offload")).time == 4 + 8 + 1 + 4 + 4


def test_its_schedule_is_whole():
    for chain in chains(5, 10, (2.0,)):
        for choices in itertools.product(CHOICES, repeat=len(chain)):
            cost = simulate(chain, as_schedule(choices))
            assert list(cost.runs) == [2 if choice == "recompute" else 1 for choice in choices]


# --- POET: paging in the integer programme ---


def pages(nodes: list[Node], memory: float, page: list[float] | None) -> float:
    """The least cost of computing the last node, by shortest paths through (what is in memory, on the host, done)."""
    start = (frozenset[int](), frozenset[int](), 0)
    queue: list[tuple[float, int, Any]] = [(0.0, 0, start)]
    seen, pushed = set(), 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state in seen:
            continue
        seen.add(state)
        here, away, first = state
        if first == len(nodes):
            return cost
        moves: list[tuple[float, Any]] = [(0.0, (here - {i}, away, first)) for i in here]
        room = memory - sum(nodes[i].size for i in here)
        for i, node in enumerate(nodes):
            if i in here:
                if page is not None and i not in away:
                    moves.append((page[i], (here, away | {i}, first)))
                continue
            if node.size > room:
                continue
            # The order of first computations is that of the nodes, as in the integer programme.
            if i <= first and all(any(j in here for j in group) for group in node.needs):
                moves.append((node.cost, (here | {i}, away, max(first, i + 1))))
            if page is not None and i in away:
                moves.append((page[i], (here | {i}, away, first)))
        for further, following in moves:
            if following not in seen:
                pushed += 1
                heapq.heappush(queue, (cost + further, pushed, following))
    return math.inf


def graph(rng: random.Random, size: int) -> list[Node]:
    nodes = [Node(rng.randint(1, 9), rng.randint(1, 4))]
    for i in range(1, size):
        needs = tuple((j,) for j in sorted(rng.sample(range(i), min(i, rng.randint(1, 2)))))
        nodes.append(Node(rng.randint(1, 9), rng.randint(1, 4), needs))
    return nodes


@pytest.mark.parametrize("paging", [False, True])
def test_integer_programme_equals_exhaustive_search(paging):
    rng = random.Random(8)
    used = 0
    for _ in range(10):
        nodes = graph(rng, 5)
        page: list[float] | None = [rng.choice([0.5, 1.0]) for _ in nodes] if paging else None
        for memory in range(4, 11):
            expected = pages(nodes, memory, page)
            if math.isinf(expected):
                with pytest.raises(InputError):
                    checkmate(nodes, memory, page=page)
                continue
            found = checkmate(nodes, memory, page=page)
            assert found.time == pytest.approx(expected)
            used += found.sent is not None and bool(found.sent.any())
    assert used > 0 or not paging


def test_paging_is_used_only_where_it_is_cheaper():
    nodes = [Node(10, 3), Node(1, 2, ((0,),)), Node(1, 2, ((1,),)), Node(1, 1, ((0,), (2,)))]
    assert checkmate(nodes, 6, page=[2.0] * 4).time == 13 + 4  # 0 goes out and comes back
    assert checkmate(nodes, 6, page=[6.0] * 4).time == 13 + 10  # 0 is computed twice
    assert checkmate(nodes, 7, page=[2.0] * 4).time == 13


# --- running it ---


def _gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bandwidth", [0.0, 2e7, 1e15])
def test_gradients_and_what_really_happens(bandwidth):
    plain, ours = unequal(0.3), unequal(0.3)
    x = torch.randn(5, 8)
    expected = _gradients(plain, x)
    meter, host = Meter(), HostActivations(1, forget=False)
    running = OffloadedAndRecomputed(ours, bandwidth, budget=0.6, blocks=list(ours), host=host, meter=meter)
    tiny.assert_same(_gradients(ours, x), expected)
    calls = [block.calls for block in ours]
    tiny.assert_same(_gradients(ours, x), expected)
    assert running.plan is not None
    ran = [block.calls - before for block, before in zip(ours, calls, strict=True)]
    assert ran == [2 if choice == "recompute" else 1 for choice in running.plan.choices]
    chain = running.scheduled.chain
    assert chain is not None
    sent = [i for i, choice in enumerate(running.plan.choices) if choice == "offload"]
    assert host.moved_bytes == sum(chain.inputs[i] + chain.saved[i] for i in sent)
    if bandwidth == 0:
        assert not sent
    if bandwidth == 1e15:
        assert sent
        assert "recompute" not in running.plan.choices
    running.remove()
    tiny.assert_same(_gradients(ours, x), expected)


@pytest.mark.parametrize("family", ["gpt2", "bert", "vit"])
def test_trains_and_resumes(tmp_path, family):
    make = {
        "gpt2": lambda: tiny.gpt2(4, dropout=0.2), "bert": lambda: tiny.bert(4, dropout=0.2), "vit": lambda: tiny.vit(4)
    }[family]  # fmt: skip
    settings = {"budget": 0.6, "bandwidth": 1000.0, "least": 8}
    run = loops.resumes(tmp_path, [{"offload-and-recompute": settings}], make)
    assert "offload" in run.recipe["offload-and-recompute"].running.plan.choices
    plain = tiny.trainer(tmp_path / "plain", [], make(), max_steps=3)
    plain.train()
    tiny.assert_same(tiny.weights(run.model), tiny.weights(plain.model))


def test_own_loops_agree():
    def make() -> loops.Setup:
        model = tiny.llama(4, dropout=0.2)
        OffloadedAndRecomputed(model, 1e9, budget=0.6, host=HostActivations(1))
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    _, losses = loops.both_loops(make)
    torch.manual_seed(5)
    assert losses == loops.baseline(lambda: tiny.llama(4, dropout=0.2))[1]


def test_link_is_measured():
    assert link_bandwidth(torch.device("cpu")) > 1e8


def test_two_stacks_are_refused(tmp_path):
    with pytest.raises(NotApplicable, match="one stack of blocks, and T5"):
        tiny.trainer(tmp_path, ["offload-and-recompute"], tiny.t5())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"budget": 0}, "budget must be above"), ({"bandwidth": -1}, "bandwidth must not"), ({"least": 0}, "least must")],
)
def test_bad_settings(settings, message):
    with pytest.raises(InputError, match=message):
        Recipe.parse([{"offload-and-recompute": settings}])
