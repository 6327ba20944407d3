"""How long a whole run takes, and what the command line says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thrifty.cli import main
from thrifty.errors import InputError
from thrifty.hardware.devices import get_device
from thrifty.planner.duration import Length, sentence, total_steps, with_duration
from thrifty.planner.plan import estimate
from thrifty.planner.workload import make_workload

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 611, "max_position_embeddings": 256,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("length", "arguments", "expected"),
    [
        (Length(samples=52002, epochs=3), {}, 3 * 407),  # 406 whole batches of 128 and one of 34, three times
        (Length(samples=52002), {}, 3 * 407),
        (Length(samples=52002), {"num_train_epochs": 1}, 407),
        (Length(samples=52002, epochs=0.5), {}, 204),
        (Length(), {"max_steps": 1000}, 1000),
        (Length(), {}, None),
        (Length(), {"max_steps": -1}, None),
    ],
)
def test_steps_are_counted_as_the_trainer_counts_them(length: Length, arguments: Any, expected: int | None) -> None:
    assert total_steps(make_workload(LLAMA, **arguments), 128, length) == expected


@pytest.mark.parametrize(
    ("values", "key"),
    [({"samples": 0}, "samples"), ({"samples": 5, "epochs": -1}, "epochs"), ({"epochs": 3}, "epochs")],
)
def test_bad_lengths(values: Any, key: str) -> None:
    with pytest.raises(InputError, match=key):
        Length(**values)


def test_hours_are_steps_times_their_seconds_and_shorter_samples_take_less() -> None:
    workload, device = make_workload(LLAMA, seq_len=256), get_device("rtx4090")
    found = estimate(workload, device=device, micro_batch=4, accumulation=2)
    assert with_duration(found, workload, device, Length()) == found
    full = with_duration(found, workload, device, Length(samples=800, epochs=3))
    assert full.total_steps == 300
    assert full.total_hours == pytest.approx(300 * found.step_seconds / 3600)
    short = with_duration(found, workload, device, Length(samples=800, epochs=3, mean_len=64))
    assert short.total_hours is not None
    assert full.total_hours is not None
    assert 0.1 < short.total_hours / full.total_hours <= 1
    assert short.peak_allocated_bytes == full.peak_allocated_bytes
    assert "300 steps for 800 samples of 64 tokens" in sentence(short, Length(samples=800, epochs=3, mean_len=64))
    with pytest.raises(InputError, match="mean_len"):
        with_duration(found, workload, device, Length(samples=800, mean_len=257))


def test_the_command_line_says_the_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA))
    words = ["--model", str(model), "--device", "rtx4090", "--seq-len", "128", "--samples", "1000", "--epochs", "2"]
    assert main(["estimate", *words, "--micro-batch", "8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["total_steps"] == 250
    assert data["total_hours"] == pytest.approx(250 * data["step_seconds"] / 3600)
    assert main(["plan", *words, "--global-batch", "8", "--mean-len", "64"]) == 0
    assert "The run of 250 steps for 1,000 samples of 64 tokens" in capsys.readouterr().out
