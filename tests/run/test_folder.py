"""The folder of a run: nothing of value is overwritten, and replacing removes a run and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from thrifty.errors import InputError
from thrifty.run import folder as run_folder


def a_run(folder: Path, *, checkpoint: bool = True, finished: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text("seed: 1\n")
    if finished:
        (folder / "model.safetensors").write_bytes(b"weights")
    if checkpoint:
        (folder / "checkpoint-2").mkdir()
        (folder / "checkpoint-2" / "trainer_state.json").write_text("{}")
    return folder


def test_the_next_free_folder_is_never_an_old_one(tmp_path: Path) -> None:
    assert run_folder.next_free("demo", tmp_path / "runs") == tmp_path / "runs" / "demo-001"
    (tmp_path / "demo-002").mkdir()
    (tmp_path / "demo-x").mkdir()
    (tmp_path / "other-009").mkdir()
    assert run_folder.next_free("demo", tmp_path) == tmp_path / "demo-003"


def test_a_new_folder_is_fine_and_is_not_made(tmp_path: Path) -> None:
    run_folder.check(tmp_path / "a" / "b", overwrite=False, resume=False)
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_users_own_are_no_obstacle_and_survive(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "notes.txt").write_text("mine")
    (run / "checkpoint-notes").mkdir()
    run_folder.check(run, overwrite=True, resume=False)
    run_folder.clear(run)
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint-notes", "notes.txt"]
    run_folder.check(run, overwrite=False, resume=False)


def test_a_run_is_protected(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"overwrite=true.*resume=auto"):
        run_folder.check(run, overwrite=False, resume=False)
    run_folder.check(run, overwrite=False, resume="auto")


def test_overwrite_replaces_runs_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"not ours")
    with pytest.raises(InputError, match="no run that overwrite could replace"):
        run_folder.check(tmp_path, overwrite=True, resume=False)


def test_the_model_to_start_from_is_not_overwritten(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with pytest.raises(InputError, match="would be overwritten"):
        run_folder.check(run, overwrite=True, resume=False, sources=(str(run), None))


def test_going_on_needs_something_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="without checkpoints"):
        run_folder.check(a_run(tmp_path / "done", checkpoint=False), overwrite=False, resume="auto")
    # Killed before its first checkpoint: it starts again from the beginning.
    run_folder.check(a_run(tmp_path / "killed", checkpoint=False, finished=False), overwrite=False, resume="auto")


def test_a_checkpoint_of_another_run_does_not_continue_this_one(tmp_path: Path) -> None:
    one, two = a_run(tmp_path / "one"), a_run(tmp_path / "two")
    with pytest.raises(InputError, match="another run"):
        run_folder.check(two, overwrite=False, resume=str(one / "checkpoint-2"))
    run_folder.check(one, overwrite=False, resume=str(one / "checkpoint-2"))
    run_folder.check(tmp_path / "new", overwrite=False, resume=str(one / "checkpoint-2"))
    with pytest.raises(InputError, match="holds no checkpoint"):
        run_folder.check(tmp_path / "new", overwrite=False, resume=str(one))


def test_folders_made_on_the_way_to_an_error_vanish(tmp_path: Path) -> None:
    def fail_late() -> None:
        with run_folder.left_alone_on_failure(tmp_path / "a" / "b"):
            (tmp_path / "a" / "b").mkdir(parents=True)
            (tmp_path / "kept").mkdir()
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        fail_late()
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_checkpoints_are_in_order_of_steps(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-last").mkdir()
    assert [p.name for p in run_folder.checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
