"""ReZero: the identity at the start, its gradients by hand, and a result that loads without this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForVideoClassification,
    GPT2LMHeadModel,
    Qwen3Config,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
)

import tiny
from methods import loops
from thrifty import NotApplicable, Recipe
from thrifty.architecture import main_blocks
from thrifty.methods.initialization.rezero import rezero


@pytest.fixture(autouse=True)
def _modules_of_written_code(tmp_path, monkeypatch):
    """transformers copies the code that it trusts into a cache: one for each test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def _stack_input(model: nn.Module) -> tuple[torch.Tensor, Any]:
    """What goes into the first block, and a function that runs all blocks on something else as the model would."""
    caught: list[tuple[Any, Any]] = []
    blocks = list(main_blocks(model, "test"))
    model.config.use_cache = False  # type: ignore[union-attr]
    handles = [b.register_forward_pre_hook(lambda m, a, k: caught.append((a, k)), with_kwargs=True) for b in blocks]
    with torch.no_grad():
        model(**loops.batch(model))
    for handle in handles:
        handle.remove()

    def run(hidden: torch.Tensor) -> torch.Tensor:
        for block, (args, kwargs) in zip(blocks, caught, strict=True):
            hidden = block(hidden, *args[1:], **kwargs)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return hidden

    return caught[0][0][0].detach().clone(), run


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_stack_is_the_identity_and_so_is_its_jacobian(family):
    model = tiny.FAMILIES[family](3)
    rezero(model)
    hidden, run = _stack_input(model.eval())
    assert torch.equal(run(hidden), hidden)
    row = hidden[:1]
    direction = torch.randn_like(row, generator=None)

    def one(x: torch.Tensor) -> torch.Tensor:
        return run(torch.cat([x, hidden[1:]]))[:1]

    # The Jacobian in three directions, each way: J v = v and v J = v, to the bit.
    for _ in range(3):
        direction = torch.randn_like(row)
        x = row.clone().requires_grad_(True)
        out = one(x)
        (pulled,) = torch.autograd.grad(out, x, direction)
        assert torch.equal(pulled, direction)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_first_gradients_are_those_of_the_scalars_alone(family):
    """d loss / d alpha = <F(x), d loss / d x>, F being the sum of the branches; what is in a branch gets exactly 0."""
    model: Any = tiny.FAMILIES[family](2)
    settings = rezero(model)
    model.eval()
    blocks: list[Any] = list(main_blocks(model, "test"))
    outputs: list[dict[str, Any]] = [{} for _ in blocks]
    flowing: list[Any] = []
    for index, block in enumerate(blocks):
        for name in settings["branches"]:
            module = block.get_submodule(name)
            # Runs before the hook that scales: it sees F(x) itself.
            module.register_forward_hook(
                lambda m, i, o, n=name, k=index: outputs[k].update({n: o.detach()}), prepend=True
            )
    blocks[-1].register_forward_hook(lambda m, i, o: flowing.append(o[0] if isinstance(o, tuple) else o))
    loss = model(**loops.batch(model)).loss
    flowing[0].retain_grad()
    loss.backward()
    upstream = flowing[0].grad
    assert upstream is not None
    for index, block in enumerate(blocks):
        expected = sum((f.view_as(upstream) * upstream).sum() for f in outputs[index].values())
        torch.testing.assert_close(block.rezero_alpha.grad, torch.as_tensor(expected).view(1), rtol=1e-4, atol=1e-7)
        assert block.rezero_alpha.grad.abs() > 0
        for name, p in block.named_parameters():
            if "rezero_alpha" not in name:
                assert p.grad is None or not p.grad.any(), name


@pytest.mark.parametrize(("family", "norms"), [("llama", 2), ("gpt2", 2), ("bert", 2), ("vit", 2)])
def test_norms_leave_the_blocks_and_stay_at_the_end(family, norms):
    model = tiny.FAMILIES[family](2)
    before = [name for name, m in model.named_modules() if "norm" in type(m).__name__.lower()]
    settings = rezero(model)
    after = [name for name, m in model.named_modules() if "norm" in type(m).__name__.lower()]
    assert len(settings["norms"]) == norms
    assert len(settings["branches"]) == 2
    assert len(before) - len(after) == 2 * norms
    assert not any(name.startswith(settings["blocks"] + ".") for name in after)


def test_the_branch_is_scaled_not_the_skip():
    model: Any = tiny.llama(1)
    rezero(model)
    block: Any = main_blocks(model, "test").layers[0]
    hidden, run = _stack_input(model.eval())
    with torch.no_grad():
        block.rezero_alpha.fill_(1.0)
        full = run(hidden)
        model.model.layers[0].mlp.down_proj.weight.zero_()  # one branch is enough: the other sees its output
        block.rezero_alpha.fill_(1.0)
        one = run(hidden) - hidden
        block.rezero_alpha.fill_(0.25)
        torch.testing.assert_close(run(hidden), hidden + 0.25 * one)
    assert not torch.allclose(full, hidden)


def test_norms_of_queries_and_keys_stay():
    config = Qwen3Config(vocab_size=tiny.VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=4)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    rezero(model)
    left = [name for name, m in model.named_modules() if "norm" in type(m).__name__.lower()]
    assert len([name for name in left if name.endswith(("q_norm", "k_norm"))]) == 4
    assert len(left) == 5  # and the one at the end


def test_own_loops_agree_and_act():
    def make() -> loops.Setup:
        model = tiny.gpt2()
        rezero(model)
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    setup, losses = loops.both_loops(make)
    assert losses != loops.baseline(tiny.gpt2)[1]
    assert all(block.rezero_alpha.abs() > 0 for block in main_blocks(setup.model, "test"))  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trains_and_resumes(tmp_path, family):
    run = loops.resumes(tmp_path, ["rezero"], tiny.FAMILIES[family])
    assert all(block.rezero_alpha.abs() > 0 for block in main_blocks(run.model, "test"))  # type: ignore[operator, union-attr]


def test_scalars_do_not_decay_and_may_learn_faster(tmp_path):
    run = tiny.trainer(tmp_path, [{"rezero": {"alpha_lr": 5.0}}], max_steps=1, learning_rate=1e-3)
    run.create_optimizer()
    names = {id(p): name for name, p in run.model.named_parameters()}
    assert run.optimizer is not None
    groups = [({names[id(p)] for p in g["params"]}, g["lr"], g["weight_decay"]) for g in run.optimizer.param_groups]
    alphas = [group for group in groups if any("rezero_alpha" in name for name in group[0])]
    assert len(alphas) == 1
    assert alphas[0] == ({f"model.layers.{i}.rezero_alpha" for i in range(2)}, 5e-3, 0.0)
    assert {lr for name, lr, _ in groups if name != alphas[0][0]} == {1e-3}
    assert sum(len(group[0]) for group in groups) == len(names)


LOADER = """
import sys, json, torch
sys.modules["thrifty"] = None
import transformers
for folder in sys.argv[1:]:
    auto = next(key for key in json.load(open(folder + "/config.json"))["auto_map"] if key != "AutoConfig")
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    inputs = torch.load(folder + "/inputs.pt")
    with torch.no_grad():
        print("LOGITS", json.dumps([auto, model(**inputs).logits.flatten().tolist()]))
"""


def test_loads_without_this_package_and_not_as_the_plain_architecture(tmp_path):
    autos: dict[str, Any] = {
        "gpt2": AutoModelForCausalLM,
        "bert": AutoModelForMaskedLM,
        "vit": AutoModelForImageClassification,
    }
    expected, folders = {}, []
    for family in autos:
        run = tiny.trainer(tmp_path / "runs" / family, ["rezero"], tiny.FAMILIES[family](), max_steps=3)
        run.train()
        folder = tmp_path / family
        run.save_model(str(folder))
        folders.append(str(folder))
        inputs = {k: v for k, v in loops.batch(run.model).items() if k != "labels"}
        torch.save(inputs, folder / "inputs.pt")
        with torch.no_grad():
            expected[family] = run.model.eval()(**inputs).logits.flatten()
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *folders],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf")},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line.removeprefix("LOGITS ")) for line in done.stdout.splitlines() if line.startswith("LOGITS")]
    for (family, logits), (auto, values) in zip(expected.items(), rows, strict=True):
        assert auto == autos[family].__name__
        torch.testing.assert_close(torch.tensor(values), logits, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="trust_remote_code"):
            autos[family].from_pretrained(tmp_path / family, trust_remote_code=False)


def test_weights_are_saved_under_the_names_they_are_loaded_by(tmp_path):
    """transformers renames this family's weights when it saves, and back by a `model_type` that is another one now."""
    config = VideoMAEConfig(image_size=8, patch_size=4, num_channels=1, num_frames=2, tubelet_size=1, hidden_size=16,
                            num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)  # fmt: skip
    model: Any = VideoMAEForVideoClassification(config).eval()
    method: Any = Recipe.parse(["rezero"])["rezero"]
    method.prepare_model(model, None)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(tmp_path)
    method.save_files(model, str(tmp_path), None)
    config_file = tmp_path / "config.json"
    config_file.write_text(config_file.read_text().replace('"AutoModel"', '"AutoModelForVideoClassification"'))
    loaded = AutoModelForVideoClassification.from_pretrained(tmp_path, trust_remote_code=True).eval()
    video = torch.randn(1, 2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(loaded(video).logits, model(video).logits)


class Custom(GPT2LMHeadModel):
    """A class of the user's own, on which no modelling file can build."""


def test_refused_before_training(tmp_path):
    with pytest.raises(NotApplicable, match=r"rezero: .*Custom is not a public class.* Fix: "):
        tiny.trainer(tmp_path, ["rezero"], Custom(tiny.gpt2().config))  # type: ignore[arg-type]
    model = tiny.llama()
    rezero(model)
    with pytest.raises(NotApplicable, match=r"rezero: the norms of .* are not found.* Fix: "):
        tiny.trainer(tmp_path, ["rezero"], model)
