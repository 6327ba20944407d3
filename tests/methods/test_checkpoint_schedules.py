"""Schedules of recomputation: optimal by exhaustive search, replayed to the byte, the same gradients to the bit."""

from __future__ import annotations

import math
import random

import pytest
import torch
import transformers
from torch import nn

import tiny
from methods import loops
from methods.chains import exhaustive, random_chain, unequal
from thrifty.errors import InputError
from thrifty.methods.checkpointing._chain import Chain, Op, keep_all, periodic, root_size, simulate
from thrifty.methods.checkpointing._checkmate import Node, chain_nodes, chain_schedule, checkmate
from thrifty.methods.checkpointing._executor import Meter, ScheduledBlocks
from thrifty.methods.checkpointing._optimal import ChainProgram, optimal
from thrifty.methods.checkpointing.gradient_checkpointing import in_order, root_schedule, schedule_blocks


def revolve(steps: int, slots: int) -> int:
    """Griewank and Walther: the least number of advances for `steps` steps and `slots` states."""
    r = 0
    while math.comb(slots + r, slots) < steps:
        r += 1
    return r * steps - math.comb(slots + r, r - 1) if r else 0


@pytest.mark.parametrize(("steps", "slots"), [(10, 3), (20, 3), (12, 2), (9, 5), (7, 1), (30, 4)])
def test_equal_steps_give_the_counts_of_revolve(steps, slots):
    # The tensors of one step are so large that no two steps can keep theirs.
    large = 1000
    chain = Chain(forward=(1.0,) * steps, backward=(0.0,) * steps, inputs=(*(1,) * steps, 0), saved=(large,) * steps)
    advances = ChainProgram(chain, slots=steps * large).time(slots + 1 + large) - steps
    assert advances == revolve(steps, slots)


def test_equals_exhaustive_search():
    rng = random.Random(3)
    for _ in range(20):
        chain = random_chain(rng, rng.randint(1, 5))
        program = ChainProgram(chain)
        for memory in range(program.minimum - 1, program.full + 1, 3):
            assert program.time(memory) == exhaustive(chain, memory), (chain, memory)


def test_its_schedules_take_what_it_says():
    rng = random.Random(4)
    for _ in range(60):
        chain = random_chain(rng, rng.randint(1, 9))
        chain = Chain(**{**vars(chain), "gradients": chain.inputs, "sources": frozenset({len(chain) // 2} - {0})})
        program = ChainProgram(chain)
        times = []
        for memory in range(program.minimum, program.full + 6):
            cost = simulate(chain, program.schedule(memory))
            assert cost.peak <= memory
            assert cost.time == program.time(memory)
            times.append(cost.time)
        assert times == sorted(times, reverse=True)
        assert times[-1] == sum(chain.forward) + sum(chain.backward)
        with pytest.raises(InputError, match="allow at least"):
            program.schedule(program.minimum - 1)


def test_never_slower_than_periodic():
    rng = random.Random(5)
    better = 0
    for _ in range(15):
        chain = random_chain(rng, 12)
        # Sizes of many digits: the programme has to round.
        chain = Chain(**{**vars(chain), "saved": tuple(s * 100_003 + 17 for s in chain.saved)})
        for size in range(1, 12):
            reference = simulate(chain, periodic(12, size))
            ours = simulate(chain, optimal(chain, reference.peak))
            assert ours.peak <= reference.peak
            assert ours.time <= reference.time
            better += ours.time < reference.time
    assert better > 100


# --- Checkmate ---

DIAMOND = [Node(1, 2), Node(1, 2, ((0,),)), Node(1, 2, ((0,),)), Node(1, 1, ((1,), (2,)))]


def test_diamond_by_hand():
    """0 -> 1, 2 -> 3: the three values below the top are needed at once (6); with 5 there is no way at all."""
    solution = checkmate(DIAMOND, 6)
    assert solution.time == 4
    assert solution.computed.sum() == 4
    with pytest.raises(InputError, match="no schedule"):
        checkmate(DIAMOND, 5)


def test_recomputes_where_memory_is_short():
    """0 -> 1 -> 2, and 3 needs 0 and 2: with room for all, four runs; with one value less, 0 is computed twice."""
    graph = [Node(1, 3), Node(1, 2, ((0,),)), Node(1, 2, ((1,),)), Node(1, 1, ((0,), (2,)))]
    assert checkmate(graph, 7).time == 4
    assert checkmate(graph, 6).time == 5


def test_checkmate_equals_exhaustive_search_on_chains():
    rng = random.Random(6)
    for _ in range(8):
        chain = random_chain(rng, rng.randint(2, 4))
        program = ChainProgram(chain)
        for memory in (program.minimum, (program.minimum + program.full) // 2, program.full):
            cost = simulate(chain, chain_schedule(chain, memory))
            assert cost.peak <= memory
            assert cost.time == exhaustive(chain, memory) == program.time(memory)


def test_infinite_memory_computes_each_once():
    chain = random_chain(random.Random(7), 4)
    nodes, goals = chain_nodes(chain)
    solution = checkmate(nodes, 1e6, goals=goals)
    assert solution.time == sum(chain.forward) + sum(chain.backward)


# --- the executor ---


def _gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("budget", [0.4, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("policy", ["optimal", "milp"])
def test_replay_reaches_the_predicted_peak_to_the_byte(policy, budget):
    plain, ours = unequal(0.3), unequal(0.3)
    x = torch.randn(5, 8)
    expected = _gradients(plain, x)
    meter = Meter()
    scheduled = schedule_blocks(ours, policy, blocks=list(ours), budget=budget, meter=meter)
    tiny.assert_same(_gradients(ours, x), expected)  # the pass that measures
    calls = [block.calls for block in ours]
    meter.peak = meter.bytes
    meter.add(x)
    tiny.assert_same(_gradients(ours, x), expected)
    assert scheduled.chain is not None
    assert scheduled.schedule is not None
    # The meter does not see gradients.
    bare = Chain(**{**vars(scheduled.chain), "gradients": ()})
    cost = simulate(bare, scheduled.schedule)
    assert meter.peak == cost.peak
    assert tuple(after.calls - before for after, before in zip(ours, calls, strict=True)) == cost.runs
    assert cost.peak <= budget * simulate(scheduled.chain, keep_all(8)).peak


def test_faster_than_periodic_on_unequal_blocks():
    """Both replayed for real: in the memory of the periodic schedule, fewer floating-point operations."""
    flops = {}
    for size in (2, 3, 4):
        model = unequal()
        x = torch.randn(5, 8)
        scheduled = schedule_blocks(model, "optimal", blocks=list(model), budget=1.0)
        _gradients(model, x)
        _gradients(model, x)
        chain = scheduled.chain
        assert chain is not None
        scheduled.remove()
        reference = simulate(chain, periodic(8, size))
        for name, ops in (("periodic", periodic(8, size)), ("optimal", optimal(chain, reference.peak))):
            calls = [block.calls for block in model]
            attached = ScheduledBlocks(model, model, ops)
            _gradients(model, x)
            attached.remove()
            ran = [block.calls - before for block, before in zip(model, calls, strict=True)]
            flops[name, size] = sum(n * f for n, f in zip(ran, chain.forward, strict=True))
        assert flops["optimal", size] < flops["periodic", size]


def t5() -> nn.Module:
    transformers.set_seed(1)
    config = transformers.T5Config(
        d_model=16, d_ff=64, d_kv=4, num_heads=4, num_layers=3, num_decoder_layers=3, vocab_size=97,
        decoder_start_token_id=0, dropout_rate=0.1,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("policy", ["sqrt", "optimal"])
def test_encoder_and_decoder(policy):
    """Two stacks; the decoder's blocks also take the encoder's output and a table of positions with a gradient."""
    inputs = {"input_ids": torch.arange(3, 23).view(2, 10), "labels": torch.arange(3, 15).view(2, 6)}
    grads = []
    for scheduled in (False, True):
        model = t5().train()
        handle = schedule_blocks(model, policy, budget=0.5) if scheduled else None
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(8)
            model(**inputs).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    tiny.assert_same(*grads)
    assert handle is not None
    if policy == "optimal":
        assert handle.chain.sources == {3}
        periodic_cost = simulate(handle.chain, root_schedule([3, 3]))
        assert simulate(handle.chain, optimal(handle.chain, periodic_cost.peak)).time <= periodic_cost.time


def test_root_schedule():
    assert [root_size(n) for n in (1, 4, 9, 12, 24)] == [1, 2, 3, 3, 5]
    assert [op.stage for op in root_schedule([4, 4]) if op.kind == "hold"] == [2, 4, 6]
    model = t5()
    assert [stack.prefix for stack in in_order(model)] == ["encoder.block", "decoder.block"]


def test_a_graph_that_is_thrown_away_leaves_nothing():
    model, meter = unequal(), Meter()
    schedule_blocks(model, "sqrt", blocks=list(model), meter=meter)
    for _ in range(2):
        loss = model(torch.randn(5, 8)).sum()
        assert meter.bytes > 0
        del loss
    assert meter.bytes == 0


def test_backward_twice_is_refused():
    model = unequal()
    schedule_blocks(model, "sqrt", blocks=list(model))
    loss = model(torch.randn(5, 8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="policies full or every-n"):
        loss.backward()


def test_a_schedule_must_be_whole():
    chain = random_chain(random.Random(1), 2)
    for ops in ([Op("run", 1)], keep_all(2)[:-1], [Op("back", 1)], [Op("run", 0), Op("run", 1), Op("back", 1)]):
        with pytest.raises(ValueError, match=r"input of stage|does not run all|cannot run backward"):
            simulate(chain, ops)


def test_own_loops_agree():
    def make() -> loops.Setup:
        model = tiny.llama(5, dropout=0.2)
        schedule_blocks(model, "optimal", budget=0.5, costs="measured")
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    setup, losses = loops.both_loops(make)
    torch.manual_seed(5)
    plain, plain_losses = loops.baseline(lambda: tiny.llama(5, dropout=0.2))
    assert losses == plain_losses
    tiny.assert_same(tiny.weights(setup.model), tiny.weights(plain))
