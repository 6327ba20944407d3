"""The contract matrix: every registered method passes every test here, by being registered."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

import tiny
from thrifty import NotApplicable, Recipe, _hf, tasks
from thrifty.method import card_of, registry

NAMES = registry.names()
STEPS = 6


def preset(name: str) -> dict:
    return {name: dict(registry.get(name).spec.preset)}


def build(tmp_path, name, model=None, **overrides):
    """A trainer with this method alone; skips where the method says that it cannot work on this machine."""
    try:
        return tiny.trainer(tmp_path, [preset(name)], model or tiny.for_method(name, dropout=0.1), **overrides)
    except NotApplicable as refusal:
        pytest.skip(f"refused on this machine: {refusal}")


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory):
    """The same run without any method, for each model that a method is tested on."""

    @functools.cache
    def run_of(task: str):
        method = next(name for name in NAMES if tiny.task_for(name) == task)
        model = tiny.for_method(method, dropout=0.1)
        run = tiny.trainer(tmp_path_factory.mktemp("plain"), (), model, max_steps=STEPS)
        run.train()
        return run

    return lambda name: run_of(tiny.task_for(name))


@pytest.mark.parametrize("name", NAMES)
def test_card_is_complete(name):
    cls = registry.get(name)
    card = card_of(cls)
    assert len(card.parts["What it does"].split()) > 8
    assert cls.spec.sources
    assert all(1950 < source.year < 2030 for source in cls.spec.sources)
    json.dumps(cls.spec.to_dict())


@pytest.mark.parametrize("name", NAMES)
def test_round_trips_through_yaml(name):
    recipe = Recipe.parse([preset(name)])
    text = yaml.safe_dump(recipe.to_config())
    again = Recipe.parse(yaml.safe_load(text))
    assert again.to_config() == recipe.to_config()
    assert again.methods[0].settings() == recipe.methods[0].settings()


# Methods whose effect on the numbers is none by design; what they do is asserted in their own way.
SILENT = {
    "data-loading": lambda run: run.args.dataloader_num_workers == 1 and run.recipe["data-loading"].clock.waited > 0,
    "adamw-fused": lambda run: run.ctx.optimizer.defaults["foreach"] is True,
    "attention": lambda run: run.recipe["attention"].facts()["kernel"] == "matrix products and softmax",
    "gradient-checkpointing": lambda run: run.recipe["gradient-checkpointing"].checkpointed == 2,
    "activation-offload": lambda run: run.recipe["activation-offload"].host.moved_bytes > 0,
    "offload-and-recompute": lambda run: run.recipe["offload-and-recompute"].running.plan is not None,
    "optimizer-offload": lambda run: type(run.ctx.optimizer).__name__ == "HostAdamW",
    "nvme-offload": lambda run: type(run.ctx.optimizer).__name__ == "DiskAdamW",
    "gradient-accumulation": lambda run: run.args.gradient_accumulation_steps == 2,
    "adamw": lambda run: run.ctx.optimizer.defaults["fused"] is None,
    "lean-kernels": lambda run: "forward" in vars(run.model.model.norm),
    "ema": lambda run: run.recipe["ema"].average.updates == STEPS - 1,
    "lawa": lambda run: len(run.recipe["lawa"].average.snapshots) == 2,
}


@pytest.mark.parametrize("name", NAMES)
def test_trains_and_acts(tmp_path, name, plain_run):
    run = build(tmp_path, name, max_steps=STEPS)
    run.train()
    losses = tiny.losses(run)
    assert len(losses) == STEPS
    assert all(torch.isfinite(torch.tensor(losses)))
    if name in SILENT:
        assert SILENT[name](run)
    else:
        assert losses != tiny.losses(plain_run(name)), f"{name} changed nothing"


@pytest.mark.parametrize("name", [n for n in NAMES if registry.get(n).spec.resumable])
def test_resumes_bit_exactly(tmp_path, name):
    """Also just before and just after a change of the model: the presets make methods act from step 1 on."""
    full = build(tmp_path / "full", name, max_steps=STEPS, save_strategy="steps", save_steps=1)
    full.train()
    expected, losses = tiny.weights(full.model), tiny.losses(full)
    for step in (1, 2, 3, 5):
        again = build(tmp_path / f"again{step}", name, max_steps=STEPS)
        again.train(resume_from_checkpoint=str(tmp_path / "full" / f"checkpoint-{step}"))
        tiny.assert_same(tiny.weights(again.model), expected)
        assert tiny.losses(again) == losses, f"resumed at {step}"


@pytest.mark.parametrize("name", [n for n in NAMES if registry.get(n).spec.micro_batch_invariant])
def test_micro_batches_do_not_matter(tmp_path, name):
    """4 x 1 = 1 x 4: the loss is normalised over all tokens of a step, whatever the method."""
    results = []
    # Adaptive steps magnify the last bits of a gradient.
    rate = 1e-3 if "optimizer" in registry.get(name).spec.claims else 0.05
    for size, accumulation in ((1, 4), (4, 1)):
        methods: list = [preset(name)]
        overrides = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        if name == "gradient-accumulation":
            methods = [{name: {"steps": accumulation}}] if accumulation > 1 else []
            del overrides["gradient_accumulation_steps"]
        try:
            run = tiny.trainer(
                tmp_path / str(size),
                methods,
                tiny.for_method(name),
                max_steps=4,
                optim="sgd",
                learning_rate=rate,
                **overrides,
            )
        except NotApplicable:
            pytest.skip("refused on this machine")
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(*results, atol=1e-6)


class Loader:
    """A living process without this package that loads what it is told; a job costs no start-up."""

    def __init__(self, folder: Path) -> None:
        self.log = open(folder / "loader.log", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("loader_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "HF_HOME": str(folder / "hf")},
        )

    def logits(self, folder: Path, saves_as: str, auto: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        numbers = {key: value.tolist() for key, value in inputs.items()}
        job = {"folder": str(folder), "saves_as": saves_as, "auto": auto, "inputs": numbers}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                answer = json.loads(line.removeprefix("ANSWER "))
                assert "error" not in answer, answer["error"]
                return torch.tensor(answer["logits"])
        return pytest.fail(f"the loader died: {Path(self.log.name).read_text()[-2000:]}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=20)
        self.log.close()


@pytest.fixture(scope="session")
def loader(tmp_path_factory):
    loader = Loader(tmp_path_factory.mktemp("loader"))
    yield loader
    loader.close()


@pytest.mark.parametrize("name", NAMES)
def test_result_loads_without_thrifty(tmp_path, name, loader):
    base: Any = tiny.for_method(name, dropout=0.1)
    if registry.get(name).spec.saves_as == "peft":  # an adapter is nothing without the model that it names
        base.save_pretrained(tmp_path / "base")
        base.name_or_path = str(tmp_path / "base")
    run = build(tmp_path / "run", name, base, max_steps=3)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    model = _hf.unwrap(run.model).eval()  # without autocast: the loader has none either
    with torch.no_grad():
        inputs = tiny.fixed_inputs(tiny.for_method(name))
        expected = tiny.scores_of(model(**inputs)).flatten()
    saves_as = run.recipe[name].saves_as
    auto = tasks.get(str(tiny.task_for(name))).auto_name
    got = loader.logits(tmp_path / "saved", saves_as, auto, inputs)
    torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-4)
    if saves_as == "remote_code":
        with pytest.raises(
            ValueError, match="trust_remote_code"
        ):  # loading it as the plain architecture must fail, not give other logits
            getattr(transformers, auto).from_pretrained(tmp_path / "saved", trust_remote_code=False)


@pytest.mark.parametrize("name", NAMES)
def test_declared_conflicts_raise(name):
    spec = registry.get(name).spec
    others = [
        n
        for n in NAMES
        if n != name
        and (
            n in spec.conflicts_with
            or f"section:{registry.get(n).spec.section}" in spec.conflicts_with
            or set(spec.claims) & set(registry.get(n).spec.claims)
        )
    ]
    for other in others:
        with pytest.raises(Exception, match=f"(?s){name}.*{other}|{other}.*{name}"):
            Recipe.parse([name, other])


def test_every_method_module_has_a_name_in_the_registry():
    folder = Path(__import__("thrifty").__file__).parent / "methods"
    modules = {path.stem for path in folder.glob("*/*.py") if path.stem != "__init__" and not path.stem.startswith("_")}
    assert {registry.get(name).__module__.rpartition(".")[2] for name in NAMES} == modules
