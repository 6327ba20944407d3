"""What is imported by the first step of `thrifty train`, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import json, sys
import thrifty
alone = sorted(sys.modules)
import torch
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler
before = set(sys.modules)

class FirstStep(Exception):
    pass

def on_step_end(*args, **kwargs):
    raise FirstStep

CallbackHandler.on_step_end = on_step_end
from thrifty.cli.train import train
try:
    train([f"output_dir={sys.argv[1]}", "num_threads=1"])
except FirstStep:
    print("MODULES", json.dumps([alone, sorted(set(sys.modules) - before)]))
"""
NEEDED = {"annotated_types", "pydantic", "pydantic_core", "thrifty", "typing_inspection", "torch", "transformers"}
COMMAND_LINE = {"annotated_doc", "click", "markdown_it", "mdurl", "pygments", "rich", "shellingham", "typer"}
SMALL = {"psutil", "xxhash", "yaml"}


def test_nothing_is_imported_that_the_run_does_not_need(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert "MODULES" in done.stdout, done.stderr[-3000:]
    alone, new = json.loads(done.stdout.split("MODULES", 1)[1])
    heavy = {"torch", "transformers", "numpy", "pydantic", "datasets", "accelerate", "yaml", "typer"}
    assert not heavy & set(alone), "import thrifty"
    tops = {name.partition(".")[0] for name in new if not name.startswith("_")}
    foreign = {name for name in tops if name not in sys.stdlib_module_names} - NEEDED - COMMAND_LINE - SMALL
    assert not foreign, "packages that neither torch nor transformers' Trainer had imported"
    methods = [name for name in new if name.startswith("thrifty.methods.") and name.count(".") == 3]
    assert "thrifty.methods.optimizers.muon" in methods
    sections = {name.split(".")[2] for name in methods if not name.split(".")[3].startswith("_")}
    assert sections == {"optimizers"}, "the recipe has muon alone"
    assert not [name for name in new if name.startswith(("thrifty.bench", "thrifty.report.charts"))]
