"""Checkpoints that a thread writes: the same files, and the same guarantees."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

import tiny
from thrifty.errors import InputError
from thrifty.safety import background, checkpointing
from thrifty.safety.background import CannotCopy, copy_of, put_off
from thrifty.safety.options import Guards
from thrifty.safety.store import CheckpointStore


def run_of(folder, wish="on", methods=(), **arguments):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **arguments}
    run = tiny.trainer(folder, methods, tiny.llama(dropout=0.1), **settings)
    run.guards = Guards(background_save=wish)
    return run


def slow(monkeypatch, seconds, fail_at=None):
    """Makes every write that is put off slow, and one of them fail as on a full disk; counts them."""
    original, count = background.BackgroundSave._run, [0]

    def run(self):
        for i, write in enumerate(self._writes):

            def later(write=write):
                count[0] += 1
                assert threading.current_thread() is not threading.main_thread()
                time.sleep(seconds)
                if count[0] == fail_at:
                    raise OSError(errno.ENOSPC, "No space left on device")
                write()

            self._writes[i] = later
        original(self)

    monkeypatch.setattr(background.BackgroundSave, "_run", run)
    return count


def content(folder):
    # The arguments hold the folder and the time; the manifest their hash.
    left_out = ("training_args.bin", "thrifty_manifest.json")
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.name not in left_out}


@pytest.mark.parametrize("methods", [(), ({"lawa": {"window": 2, "every": 1}},)])
def test_files_are_those_of_a_foreground_save(tmp_path, monkeypatch, methods):
    count = slow(monkeypatch, 0.05)  # so slow that the next step has changed the weights long before
    for wish in ("on", "off"):
        run_of(tmp_path / wish, wish, methods).train()
    assert count[0] >= 6, "weights, optimizer and schedule of two checkpoints"
    for step in (2, 4):
        ours, theirs = (content(tmp_path / wish / f"checkpoint-{step}") for wish in ("on", "off"))
        assert ours.keys() == theirs.keys()
        assert {"model.safetensors", "optimizer.pt"} <= ours.keys()
        assert [name for name in ours if ours[name] != theirs[name]] == []
        assert CheckpointStore(tmp_path / "on", read_only=True).verify(tmp_path / "on" / f"checkpoint-{step}") == []


def test_training_goes_on_meanwhile_and_the_next_save_waits(tmp_path, monkeypatch):
    slow(monkeypatch, 0.1)
    seen = {}

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen[state.global_step] = {p.name for p in tmp_path.glob("*checkpoint-*")}

    run = run_of(tmp_path, max_steps=5)
    run.add_callback(Look())
    run.train()
    assert seen[3] == {".tmp-checkpoint-2"}, "still being written"
    assert seen[5] == {"checkpoint-2", ".tmp-checkpoint-4"}
    assert {p.name for p in tmp_path.glob("*checkpoint-*")} == {"checkpoint-2", "checkpoint-4", "checkpoint-5"}


def test_full_disk_is_told_and_older_checkpoints_stay(tmp_path, monkeypatch, capsys):
    slow(
        monkeypatch, 0.01, fail_at=4
    )  # the first write of the second checkpoint: each has weights, optimizer and schedule
    run = run_of(tmp_path, max_steps=6)
    run.train()
    assert sorted(p.name for p in tmp_path.glob("*checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    assert "checkpoint-4 was not saved: No space left on device" in capsys.readouterr().out
    newest = CheckpointStore(tmp_path, read_only=True).newest_complete()
    assert (newest.path, newest.skipped) == (tmp_path / "checkpoint-6", [])


def test_best_checkpoint_is_not_named_where_it_was_not_saved(tmp_path, monkeypatch):
    slow(monkeypatch, 0.01, fail_at=4)
    evaluate = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "save_total_limit": 1}
    run = run_of(tmp_path, max_steps=4, learning_rate=1e-2, **evaluate)
    run.train()
    assert run.state.best_global_step == 4
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("error", [RuntimeError("of the user"), KeyboardInterrupt()])
def test_error_in_training_waits_for_the_checkpoint(tmp_path, monkeypatch, error):
    slow(monkeypatch, 0.05)

    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise error

    run = run_of(tmp_path)
    run.add_callback(Fail())
    with pytest.raises(type(error)):
        run.train()
    assert CheckpointStore(tmp_path, read_only=True).newest_complete().path == tmp_path / "checkpoint-2"
    assert not list(tmp_path.glob(".tmp-*"))


def test_fault_that_is_no_storage_fault_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing.BackgroundSave, "_run", _forgets_the_weights)
    with pytest.raises(RuntimeError, match="checkpoint-2 was not written in full: lacks weights"):
        run_of(tmp_path).train()
    assert not list(tmp_path.glob("*checkpoint-*"))


_run = background.BackgroundSave._run


def _forgets_the_weights(self):
    del self._writes[0]
    _run(self)


def test_no_room_for_the_copy_writes_at_once(tmp_path, monkeypatch):
    count = slow(monkeypatch, 0)
    monkeypatch.setattr(checkpointing, "fits_on_host", lambda size: size < 0)
    run_of(tmp_path).train()
    assert count[0] == 0
    assert CheckpointStore(tmp_path, read_only=True).newest_complete().path == tmp_path / "checkpoint-4"


def test_memory_that_runs_out_while_copying_writes_at_once(tmp_path, monkeypatch):
    count = slow(monkeypatch, 0)

    def fail(value):
        raise MemoryError

    monkeypatch.setattr(background, "copy_of", fail)
    run_of(tmp_path).train()
    assert count[0] == 0
    assert CheckpointStore(tmp_path, read_only=True).newest_complete().path == tmp_path / "checkpoint-4"


def test_auto_leaves_a_listener_its_files(tmp_path, monkeypatch):
    count = slow(monkeypatch, 0)
    found = []

    class Upload(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            found.append((tmp_path / f"checkpoint-{state.global_step}" / "model.safetensors").exists())

    run = run_of(tmp_path, "auto")
    run.add_callback(Upload())
    run.train()
    assert found == [True, True]
    assert count[0] == 0
    run_of(tmp_path / "without", "auto").train()
    assert count[0] > 0


def test_wish_that_cannot_be_is_refused(tmp_path):
    run = run_of(tmp_path)
    run.guards.atomic_checkpoints = False
    with pytest.raises(InputError, match="atomic_checkpoints is off"):
        run.train()


def test_unknown_wish_is_refused():
    with pytest.raises(InputError, match="background_save"):
        Guards(background_save="yes")


def test_fits_counts_what_the_host_has():
    assert background.fits_on_host(0)
    assert not background.fits_on_host(1 << 60)


def test_copy_keeps_shared_storage_and_views():
    base = torch.arange(12.0).reshape(3, 4)
    shared = {"betas": (0.9, 0.95)}
    value = {"a": base, "b": base[1:, ::2], "c": [base.T, shared, shared], "weight": torch.nn.Parameter(base.clone())}
    copied = copy_of(value)
    base.zero_()
    assert torch.equal(copied["a"], torch.arange(12.0).reshape(3, 4))
    assert copied["b"].untyped_storage()._cdata == copied["a"].untyped_storage()._cdata
    assert copied["b"].stride() == value["b"].stride()
    assert copied["c"][1] is copied["c"][2]
    assert copied["c"][1] is not shared
    assert isinstance(copied["weight"], torch.nn.Parameter)


@pytest.mark.parametrize("odd", [{1, 2}, torch.eye(2).to_sparse(), torch.ones(1, requires_grad=True), object()])
def test_what_cannot_be_copied_is_refused(odd):
    with pytest.raises(CannotCopy):
        copy_of({"x": [odd]})


def test_only_this_folder_and_this_thread_are_put_off(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir(), outside.mkdir()
    original = torch.save
    with put_off(inside) as writes:
        torch.save({"x": torch.ones(1)}, inside / "a.pt")
        torch.save({"x": torch.ones(1)}, outside / "b.pt")
        torch.save({"x": object}, inside / "odd.pt")
        other = threading.Thread(target=lambda: torch.save({"x": torch.ones(1)}, inside / "c.pt"))
        other.start()
        other.join()
    assert torch.save is original
    assert not (inside / "a.pt").exists()
    assert all(path.exists() for path in (outside / "b.pt", inside / "odd.pt", inside / "c.pt"))
    for write in writes:
        write()
    assert torch.equal(torch.load(inside / "a.pt")["x"], torch.ones(1))
