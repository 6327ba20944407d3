"""The docs are true: generated pages are fresh, links lead somewhere, and the code in them runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import tiny

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text("utf-8"), re.S)


def test_generated_pages_are_fresh():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/generate.py"), "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, f"run `python docs/generate.py`:\n{done.stdout}{done.stderr[-1000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("index", [0, 1], ids=["plain loop", "Accelerate loop"])
def test_own_loops_run(index):
    code = blocks(ROOT / "docs/own-loop.md", "python")[index]
    model = tiny.llama(layers=4)
    before = tiny.weights(model)
    batches = [tiny.collate_text(tiny.text_samples()[i : i + 2]) for i in range(0, 12, 2)]
    for batch in batches:
        batch.pop("sample_id")
    scope = {"model": model, "batches": batches}
    exec(compile(code, "docs/own-loop.md", "exec"), scope)
    after = tiny.weights(scope.get("merged", model))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_readme_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    code = blocks(ROOT / "README.md", "python")[0].replace("max_steps=1000", "max_steps=2, use_cpu=True, report_to=[]")
    samples = [
        {k: v for k, v in s.items() if k != "sample_id"} for s in tiny.text_samples() if len(s["input_ids"]) == 12
    ]
    exec(compile(code, "README.md", "exec"), {"model": tiny.llama(), "dataset": samples})
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_readme_run_file_is_accepted(tmp_path):
    from thrifty.recipe import Recipe

    run_file = yaml.safe_load(blocks(ROOT / "README.md", "yaml")[0])
    assert len(Recipe.parse(run_file["methods"])) == 4


def test_contributing_example_is_a_method(tmp_path):
    """The one-file technique of CONTRIBUTING.md, imported as a file and trained."""
    import importlib.util

    from thrifty.method import card_of, registry

    path = tmp_path / "gradient_noise.py"
    path.write_text(blocks(ROOT / "CONTRIBUTING.md", "python")[0])
    spec = importlib.util.spec_from_file_location("gradient_noise", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gradient_noise"] = module
    try:
        spec.loader.exec_module(module)
        assert card_of(module.GradientNoise).parts["Limits"] == "none."
        noisy = tiny.trainer(tmp_path, [{"gradient-noise": {"eta": 1.0}}])
        noisy.train()
        plain = tiny.trainer(tmp_path, [])
        plain.train()
        assert tiny.losses(noisy)[0] == tiny.losses(plain)[0]
        assert tiny.losses(noisy)[2:] != tiny.losses(plain)[2:]
    finally:
        registry._methods.pop("gradient-noise", None)
        del sys.modules["gradient_noise"]
