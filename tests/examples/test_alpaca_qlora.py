"""The example runs as its README says, at toy size: base model, instructions, QLoRA, merged, generated from."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from thrifty import run
from thrifty.config import parse_config

FOLDER = Path(__file__).parents[2] / "examples" / "alpaca_qlora"


def _values(file: str, **changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load((FOLDER / file).read_text()), **changes}


def test_the_example(tmp_path, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / "make_data.py"))["main"](["instructions.json", "--count", "60"])
    records = json.loads(Path("instructions.json").read_text())
    assert len(records) == 60
    assert all(record["instruction"] and record["output"] for record in records)

    small = {"use_cpu": True, "max_new_tokens": 4, "max_length": 128}
    base = _values(
        "base.yaml", **{**small, "max_length": 32}, vocab_size=300, max_steps=2, per_device_train_batch_size=2
    )
    del base["embedded_corpus"]
    base["model_config"] |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    lines = [f"{r['instruction']} {r['input']} {r['output']}" for r in records]
    Path("text.txt").write_text("\n\n".join(lines))
    run.train(parse_config({**base, "train_file": "text.txt"}))
    before = AutoModelForCausalLM.from_pretrained("base")

    tuned = _values("qlora.yaml", **small, max_steps=4, logging_steps=1)
    result = run.train(parse_config(tuned))
    assert result.output_dir == Path("tuned")
    model = AutoModelForCausalLM.from_pretrained("tuned")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (Path("tuned") / "adapter" / "adapter_model.safetensors").is_file()
    names = dict(before.named_parameters())
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, names[name])]
    assert changed
    assert all("layers" in name and "norm" not in name for name in changed)

    from thrifty.run.generation import generate

    prompt = (FOLDER / "prompt.txt").read_text()
    text = generate("tuned", prompt, max_new_tokens=5, temperature=0.0)
    assert len(text) > len(prompt.strip())
    capsys.readouterr()


def test_the_readme_names_what_is_there():
    readme = (FOLDER / "README.md").read_text()
    for file in ("make_data.py", "base.yaml", "qlora.yaml", "prompt.txt"):
        assert file in readme
        assert (FOLDER / file).is_file()


def test_the_readme_says_what_the_planner_says_of_the_real_thing(tmp_path, monkeypatch):
    """The configuration that the README's command chooses; the search itself takes longer than a test should."""
    from thrifty.hardware.devices import get_device
    from thrifty.planner.duration import Length, with_duration
    from thrifty.planner.plan import estimate
    from thrifty.planner.workload import make_workload, parse_methods

    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    readme = (FOLDER / "README.md").read_text()
    command = next(line for line in readme.splitlines() if line.startswith("thrifty plan")).split()
    option = dict(zip(command[2::2], command[3::2], strict=True))
    assert (option["--model"], option["--device"], option["--samples"]) == ("llama2-7b", "rtx4090", "52002")
    micro, times = map(int, re.findall(r"micro-batch of (\d+), accumulated (\d+) times", readme)[0])
    assert micro * times == int(option["--global-batch"])
    workload = make_workload(
        option["--model"], seq_len=int(option["--seq-len"]), dtype=option["--dtype"],
        methods=parse_methods(option["--methods"]),
    )  # fmt: skip
    device = get_device(option["--device"])
    found = estimate(workload, device=device, micro_batch=micro, accumulation=times)
    assert found.fits
    needs, has = map(float, re.findall(r"with ([\d.]+) GiB of the ([\d.]+) GiB", readme)[0])
    assert found.device_total_bytes / 2**30 == pytest.approx(needs, rel=0.02)
    assert found.memory_limit_bytes / 2**30 == pytest.approx(has, rel=0.001)
    length = Length(
        samples=int(option["--samples"]), epochs=float(option["--epochs"]), mean_len=int(option["--mean-len"])
    )
    hours = with_duration(found, workload, device, length).total_hours
    assert hours == pytest.approx(float(re.findall(r"take ([\d.]+) hours", readme)[0]), rel=0.05)
    assert hours < 24  # "within hours"
