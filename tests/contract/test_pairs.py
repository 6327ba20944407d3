"""Every pair of methods that is not declared as a conflict trains together; a declared one is refused.

All pairs run in `make soak`. `make test` runs a share that changes every day; the seed is printed and can be set with
THRIFTY_PAIR_SEED.
"""

from __future__ import annotations

import datetime
import itertools
import os
import random

import pytest
import torch

import tiny
from thrifty.errors import InputError, NotApplicable
from thrifty.method import registry
from thrifty.recipe import Recipe

# Methods that share no task cannot stand in one recipe.
PAIRS = [pair for pair in itertools.combinations(registry.names(), 2) if tiny.task_for(*pair)]
SEED = os.environ.get("THRIFTY_PAIR_SEED") or datetime.date.today().isoformat()
SHARE = random.Random(SEED).sample(PAIRS, min(len(PAIRS), 60))


def presets(pair: tuple[str, str]) -> list:
    return [{name: dict(registry.get(name).spec.preset)} for name in pair]


def are_declared_to_conflict(first: str, second: str) -> bool:
    one, other = registry.get(first).spec, registry.get(second).spec
    return bool(
        set(one.claims) & set(other.claims)
        or {other.name, f"section:{other.section}"} & set(one.conflicts_with)
        or {one.name, f"section:{one.section}"} & set(other.conflicts_with)
    )


def train_together(tmp_path, pair):
    if are_declared_to_conflict(*pair):
        with pytest.raises(InputError, match=f"(?s){pair[0]}.*{pair[1]}|{pair[1]}.*{pair[0]}"):
            Recipe.parse(presets(pair))
        return
    recipe = Recipe.parse(presets(pair))
    steps, total = 2, 6
    try:
        run = tiny.trainer(
            tmp_path, recipe, tiny.for_method(*pair, dropout=0.1), max_steps=total, save_strategy="steps", save_steps=4
        )
    except NotApplicable as refusal:
        pytest.skip(f"refused on this machine: {refusal}")
    run.train()
    losses = tiny.losses(run)
    assert len(losses) >= steps
    assert all(torch.isfinite(torch.tensor(losses)))
    again = tiny.trainer(tmp_path / "again", presets(pair), tiny.for_method(*pair, dropout=0.1), max_steps=total)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    tiny.assert_same(tiny.weights(run.model), tiny.weights(again.model))


@pytest.mark.parametrize("pair", SHARE, ids="+".join)
def test_share_of_the_pairs(tmp_path, pair):
    print(f"THRIFTY_PAIR_SEED={SEED}")
    train_together(tmp_path, pair)


@pytest.mark.soak
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair(tmp_path, pair):
    train_together(tmp_path, pair)
