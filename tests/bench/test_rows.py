"""Which techniques stand in the tables."""

from __future__ import annotations

import pytest

from thrifty.bench.rows import BASELINE, Arm, Tables, candidates, check_table, label_of, with_required
from thrifty.bench.session import refused
from thrifty.errors import InputError
from thrifty.method import registry


def build(tables: Tables, refuse: dict[str, str] | None = None) -> Tables:
    for arm, row in tables.build():
        tables.settle(arm, row, refused(arm) or (refuse or {}).get(arm.id))
    return tables


def test_techniques_come_by_their_own_declaration() -> None:
    declared = {name: registry.get(name).spec.bench_order for name in registry.names()}
    found = candidates(None, [])
    assert set(found) == {name for name, place in declared.items() if place is not None}
    places = [declared[str(name)] for name in found]
    assert places == sorted(places)  # type: ignore[type-var]


def test_the_run_files_own_come_first_and_a_choice_is_taken_as_it_is() -> None:
    assert candidates(None, [{"lora": {"r": 4}}, "ema"])[:2] == [{"lora": {"r": 4}}, "ema"]
    assert candidates(["lion", "bf16"], ["ema"]) == ["lion", "bf16"]
    with pytest.raises(InputError, match="did you mean 'lion'"):
        candidates(["lionn"], [])


def test_additive_rows_add_and_ablation_rows_stand_alone() -> None:
    tables = build(Tables(["bf16", "gradient-checkpointing", "lion"]))
    rows = {(row.table, row.label): row for row in tables.ordered()}
    assert [row.label for row in tables.ordered() if row.table == "additive"] == [
        BASELINE, "+ bf16", "+ gradient-checkpointing", "+ lion"
    ]  # fmt: skip
    arms = {arm.id: arm.methods for arm in tables.arms}
    assert arms[str(rows["additive", "+ lion"].arm)] == ("bf16", "gradient-checkpointing", "lion")
    assert arms[str(rows["ablation", "lion"].arm)] == ("lion",)
    # The first technique is the same recipe in both tables, and is measured once.
    assert rows["additive", "+ bf16"].arm == rows["ablation", "bf16"].arm
    assert len(tables.arms) == 6


def test_what_conflicts_says_so_and_what_follows_goes_on_without_it() -> None:
    tables = build(Tables(["bf16", "fp16", "lion"]))
    rows = {(row.table, row.label): row for row in tables.ordered()}
    assert "precision" in str(rows["additive", "+ fp16"].reason)
    assert rows["ablation", "fp16"].arm == "fp16"
    last = next(arm for arm in tables.arms if arm.id == rows["additive", "+ lion"].arm)
    assert last.methods == ("bf16", "lion")


def test_what_cannot_run_alone_is_not_added() -> None:
    tables = build(Tables(["tf32", "lion"]), refuse={"tf32": "no such units"})
    assert [row.reason for row in tables.ordered() if "tf32" in row.label] == ["no such units", "no such units"]
    assert all("tf32" not in arm.methods for arm in tables.arms)


def test_the_number_of_recipes_is_limited_and_the_rest_is_named() -> None:
    tables = build(Tables(["bf16", "gradient-checkpointing", "lion", "ema", "lawa"], most=5))
    assert len(tables.arms) <= 5
    assert tables.left_out == ["lion", "ema", "lawa"] or tables.left_out == ["ema", "lawa"]


def test_few_rows_show_one_of_each_kind() -> None:
    tables = build(Tables(["bf16", "fp16", "lion", "adafactor", "gradient-checkpointing"], most=99))
    assert tables.left_out == ["fp16", "adafactor"]
    assert build(Tables(["bf16", "fp16"])).left_out == []


def test_one_table_only() -> None:
    tables = build(Tables(["bf16", "lion"], only="ablation"))
    assert {row.table for row in tables.ordered()} == {"ablation"}
    assert [arm.id for arm in tables.arms] == [BASELINE, "bf16", "lion"]
    with pytest.raises(InputError, match="additive or ablation"):
        check_table("both")


def test_recipes_are_equal_whatever_their_order() -> None:
    assert Arm("a", ("bf16", "lion")).recipe == Arm("b", ("lion", "bf16")).recipe
    assert Arm("a", ("lion",)).recipe != Arm("b", ("lion",), {"learning_rate": 1}).recipe


def test_labels_show_settings() -> None:
    assert label_of({"lora": {"r": 4}}) == "lora (r=4)"
    assert with_required("lion") == ["lion"]
