"""The planner's peak beside the measured one, and what a table says of techniques that only do as if here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.conftest import Simulated
from thrifty.bench import tables
from thrifty.bench.html import page
from thrifty.bench.measure import Job, Outcome, measure
from thrifty.bench.options import Options, read_run
from thrifty.bench.result import result_of
from thrifty.bench.session import Session
from thrifty.method import registry

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "runs" / "memory.yaml"


def result(run: dict[str, Any], folder: Path, chosen: list[str], predicts: bool = True) -> dict[str, Any]:
    class Machine(Simulated):
        def run(self, job: Job) -> Outcome:
            found = super().run(job)
            if job.predict and predicts:
                found.predicted_bytes = 990
            elif job.predict:
                found.not_predicted = "it cannot be dry-run"
            return found

    options = Options(run=run, name="tiny", chosen=chosen, steps=10, rounds=2, only="additive", quality=False)
    session = Session(options, folder, runner=Machine(lambda job: 0.05))
    session.run()
    return result_of(session)


def test_the_predicted_peak_stands_beside_the_measured_one(run: dict[str, Any], tmp_path: Path) -> None:
    found = result(run, tmp_path, ["chunked-cross-entropy"])
    assert found["arms"]["baseline"]["prediction_error"] == pytest.approx(1000 / 990 - 1)
    head, rows = tables.header(found, "additive"), tables.body(found, "additive")
    assert [row[head.index("predicted peak")] for row in rows] == ["990 B (+1.0 %)"] * 2
    assert "how far the measured one is" in tables.markdown(found)
    assert "990 B" in page(found)


def test_a_file_without_predictions_has_no_such_column(run: dict[str, Any], tmp_path: Path) -> None:
    found = result(run, tmp_path, ["chunked-cross-entropy"], predicts=False)
    assert "predicted peak" not in tables.header(found, "additive")
    assert "Not predicted: baseline: it cannot be dry-run." in tables.plain(found)


def test_what_is_emulated_is_labelled(run: dict[str, Any], tmp_path: Path) -> None:
    names = [name for name in registry.names() if "cpu" in registry.get(name).spec.emulated]
    assert {"fp8", "nvme-offload", "optimizer-offload", "activation-offload", "offload-and-recompute"} <= set(names)
    found = result(run, tmp_path, ["chunked-cross-entropy", "fp8", "activation-offload", "optimizer-offload"])
    labels = [row[0] for row in tables.body(found, "additive")]
    assert labels == [
        "baseline", "+ chunked-cross-entropy", "+ fp8 (emulated)", "+ activation-offload (emulated)",
        "+ optimizer-offload (emulated)",
    ]  # fmt: skip
    for show in (tables.markdown, tables.plain, page):
        assert "+ fp8 (emulated)" in show(found)
        assert "Emulated on this machine: activation-offload: the host is the device" in show(found)


def test_the_card_of_what_is_emulated_says_so_too() -> None:
    from thrifty.method import card_of

    for name in registry.names():
        cls = registry.get(name)
        if cls.spec.emulated:
            limits = card_of(cls).parts["Limits"]
            assert "emulated" in limits or "CPU" in limits, name
            assert set(cls.spec.to_dict()["emulated"]) == {"cpu"}


SMALLER = ("chunked-cross-entropy", "gradient-checkpointing")


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param((), id="baseline"),
        pytest.param((*SMALLER, "lion"), id="lion"),
        pytest.param((*SMALLER, "adamw-8bit"), id="adamw-8bit"),
        pytest.param((*SMALLER, "optimizer-in-backward", "adamw-8bit"), id="updates-inside"),
    ],
)
def test_predicted_and_measured_agree_in_the_published_run(chosen: tuple[Any, ...]) -> None:
    """The model of `benchmarks/runs/memory.yaml` with fewer and narrower blocks."""
    content, methods, name = read_run(str(RUN))
    assert (methods, name) == ([], "memory")
    small = {"hidden_size": 160, "num_hidden_layers": 2, "intermediate_size": 320, "num_key_value_heads": 5}
    content["model_config"] |= small
    found = measure(Job(kind="memory", arm="x", run=content, methods=chosen, steps=3, threads=1, predict=True))
    assert found.predicted_bytes is not None, found.not_predicted
    assert found.peak_bytes == pytest.approx(found.predicted_bytes, rel=0.02)
