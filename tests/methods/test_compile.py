"""torch.compile: the same numbers, names that stay, evaluation as written, recompilations counted and limited."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.compilation import compile as module
from thrifty.methods.compilation.compile import CompileCounts, PadToMultiple, compile_in_training, undo


def _step(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.config.use_cache = False
    model.train()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
def test_numbers_and_names_are_those_of_the_model(family):
    plain, compiled = tiny.FAMILIES[family](), tiny.FAMILIES[family]()
    batch = loops.batch(plain)
    names = list(compiled.state_dict())
    assert compile_in_training(compiled, backend="eager") == 2
    counts = CompileCounts()
    wanted, found = _step(plain, batch), _step(compiled, batch)
    assert torch.equal(wanted[0], found[0])
    tiny.assert_same(found[1], wanted[1])
    assert counts.read() == {"graphs": 1, "recompiles": 0, "graph_breaks": 0}  # one graph for both blocks
    assert list(compiled.state_dict()) == names
    copied = copy.deepcopy(compiled)
    assert all(m._compiled_call_impl is None for m in copied.modules())


def test_a_compiled_backward_has_the_same_gradients():
    plain, compiled = tiny.gpt2(), tiny.gpt2()
    compile_in_training(compiled, backend="aot_eager")
    batch = loops.batch(plain)
    wanted, found = _step(plain, batch), _step(compiled, batch)
    tiny.assert_same(found[1], wanted[1], atol=1e-6)


@pytest.mark.soak
def test_inductor():
    plain, compiled = tiny.gpt2(), tiny.gpt2()
    compile_in_training(compiled)
    batch = loops.batch(plain)
    wanted, found = _step(plain, batch), _step(compiled, batch)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    tiny.assert_same(found[1], wanted[1], atol=1e-5)


def test_evaluation_runs_as_written():
    model = tiny.llama()
    model.config.use_cache = False
    compile_in_training(model, backend="eager")
    counts = CompileCounts()
    model.eval()(**loops.batch(model))
    assert counts.read()["graphs"] == 0
    undo(model)
    model.train()(**loops.batch(model))
    assert counts.read()["graphs"] == 0


def _of_length(length: int) -> dict[str, torch.Tensor]:
    ids = torch.ones(2, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def test_recompilations_are_counted_with_their_reason():
    model = tiny.llama()
    compile_in_training(model, backend="eager", dynamic=False)
    counts = CompileCounts()
    for length in (8, 9, 8, 11, 9):
        _step(model, _of_length(length))
        counts.read()
    assert counts.read() == {"graphs": 3, "recompiles": 2, "graph_breaks": 0}
    assert "size mismatch" in counts.reason


def test_dynamic_shapes_are_compiled_twice_at_most():
    model = tiny.llama()
    compile_in_training(model, backend="eager")
    counts = CompileCounts()
    for length in range(8, 16):
        _step(model, _of_length(length))
    assert counts.read()["graphs"] <= 3


def test_padding_changes_nothing_but_the_shape():
    model = tiny.bert()
    samples = tiny.text_samples()[:3]
    collate = PadToMultiple(tiny.collate_text, 16, pad_token_id=5)
    padded, plain = collate(samples), tiny.collate_text(samples)
    assert padded["input_ids"].shape == (3, 16)
    assert (padded["input_ids"][:, plain["input_ids"].shape[1] :] == 5).all()
    assert torch.equal(padded.pop("sample_id"), plain.pop("sample_id"))
    torch.testing.assert_close(model.eval()(**padded).loss, model(**plain).loss)
    packed = PadToMultiple(lambda _: {"input_ids": torch.ones(1, 5), "position_ids": torch.arange(5)[None]}, 4)([])
    assert packed["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert PadToMultiple(tiny.collate_text, 1)(samples)["input_ids"].shape == plain["input_ids"].shape


@pytest.fixture(scope="module")
def compiled_run(tmp_path_factory):
    plain = tiny.trainer(tmp_path_factory.mktemp("plain"), (), tiny.llama(dropout=0.1))
    plain.train()
    methods = [{"compile": {"backend": "eager", "pad_to_multiple_of": 16}}]
    run = tiny.trainer(tmp_path_factory.mktemp("compiled"), methods, tiny.llama(dropout=0.1))
    run.train()
    return run, plain


def test_the_run_reports_what_was_compiled(compiled_run):
    run, _ = compiled_run
    facts = run.recipe["compile"].facts()
    assert facts["compiled modules"] == 2
    assert facts["graphs"] <= 2
    assert facts["graph breaks"] == 0
    (part,) = run.recipe.describe()
    assert "compiled modules: 2" in part["facts"]
    assert all(m._compiled_call_impl is None for m in run.model.modules())  # finished


def test_too_many_shapes_end_the_run(tmp_path):
    samples = [{"input_ids": [5] * n, "labels": [5] * n, "sample_id": n} for n in (20, 21, 22, 23, 24, 25)]
    methods = [{"compile": {"backend": "eager", "dynamic": False, "most_graphs": 2}}]
    run = tiny.trainer(tmp_path, methods, samples=samples, per_device_train_batch_size=1)
    with pytest.raises(InputError, match="pad_to_multiple_of"):
        run.train()


def test_with_checkpointing_and_chunked_loss(tmp_path):
    methods: list[Any] = [{"compile": {"backend": "eager"}}, "gradient-checkpointing", "chunked-cross-entropy"]
    plain = tiny.trainer(tmp_path / "a", [], tiny.llama(), max_steps=2)
    run = tiny.trainer(tmp_path / "b", methods, tiny.llama(), max_steps=2)
    plain.train()
    run.train()
    assert tiny.losses(run) == pytest.approx(tiny.losses(plain), rel=1e-4)


def test_own_loops_agree():
    def make() -> loops.Setup:
        model = tiny.llama()
        model.config.use_cache = False
        compile_in_training(model, backend="eager")
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    loops.both_loops(make)


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="did you mean 'inductor'"):
        tiny.trainer(tmp_path, [{"compile": {"backend": "inductr"}}])
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(NotApplicable, match=r"C\+\+ compiler"):
        tiny.trainer(tmp_path, ["compile"])
    with pytest.raises(NotApplicable, match="no input_ids"):
        tiny.trainer(tmp_path, [{"compile": {"backend": "eager", "pad_to_multiple_of": 8}}], tiny.vit())
    for bad in ({"pad_to_multiple_of": 0}, {"most_graphs": 0}, {"backend": "eager", "mode": "max-autotune"}):
        with pytest.raises(InputError, match=list(bad)[-1]):
            Recipe.parse([{"compile": bad}])
