"""The checkpoint store against the real faults: kills at every call, full disks, broken files, lost members."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from thrifty.errors import InputError
from thrifty.safety import store as store_module
from thrifty.safety.manifest import MANIFEST_NAME, problems, read_manifest
from thrifty.safety.store import CheckpointNotSaved, CheckpointStore


def write_members(folder: Path, step: int, world_size: int = 1) -> None:
    save_file({"w": torch.full((64, 8), float(step))}, folder / "model.safetensors")
    torch.save({"state": {0: torch.ones(64)}, "param_groups": []}, folder / "optimizer.pt")
    torch.save({"last_epoch": step}, folder / "scheduler.pt")
    for name in ["rng_state.pth"] if world_size == 1 else [f"rng_state_{r}.pth" for r in range(world_size)]:
        torch.save({"cpu": torch.get_rng_state()}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def save(store: CheckpointStore, step: int, then: Callable[[Path], object] = str, **options: Any) -> Path:
    with store.writing(step, **options) as folder:
        write_members(folder, step)
        then(folder)
    return store.path(step)


def hidden(run_dir: Path) -> list[str]:
    return sorted(p.name for p in run_dir.iterdir() if p.name.startswith((".tmp", ".old", ".del")))


def test_saved_checkpoint_verifies_and_its_manifest_describes_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    path = save(store, 7, fingerprint={"seed": 1})
    manifest = read_manifest(path)
    assert manifest is not None
    assert manifest["step"] == 7
    assert manifest["world_size"] == 1
    assert manifest["members"]["optimizer.pt"]["size"] == (path / "optimizer.pt").stat().st_size
    assert manifest["versions"]["torch"].startswith("2.")
    assert store.verify(path) == []
    assert store.newest_complete() == (path, [])
    assert store.fingerprint(path) == {"seed": 1}
    assert hidden(store.run_dir) == []


def test_order_is_data_flush_manifest_flush_rename_folder_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    calls: list[tuple[str, str]] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def rename(source: str | Path, target: str | Path) -> None:
        calls.append(("rename", str(target)))
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(store, 3)
    staging = str(store.staging(3))
    manifest_at = calls.index(("fsync", f"{staging}/{MANIFEST_NAME}"))
    rename_at = calls.index(("rename", str(store.path(3))))
    data = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
    data_at = [calls.index(("fsync", f"{staging}/{name}")) for name in data]
    folder_at = max(i for i, call in enumerate(calls) if call == ("fsync", staging))
    parent_at = max(i for i, call in enumerate(calls) if call == ("fsync", str(tmp_path)))
    assert max(data_at) < manifest_at < folder_at < rename_at < parent_at


CRASH_SCRIPT = """
import os, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_store import write_members
from thrifty.safety.store import CheckpointStore
run_dir, stop_at = Path(sys.argv[1]), int(sys.argv[2])
store = CheckpointStore(run_dir)
count = 0
def crashing(real):
    def call(*args, **kwargs):
        global count
        count += 1
        if count == stop_at:
            os._exit(9)
        return real(*args, **kwargs)
    return call
for name in ("fsync", "rename", "unlink", "rmdir", "mkdir", "open"):
    setattr(os, name, crashing(getattr(os, name)))
with store.writing(2) as folder:
    write_members(folder, 2)
store.rotate(1)
print("done", count)
"""


def test_death_before_any_system_call_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """One forked process per call: it dies just before its n-th call to the file system replacing checkpoint-2."""
    template = tmp_path / "template"
    for step in (1, 2):
        save(CheckpointStore(template), step)
    reached_end = False
    for stop_at in range(1, 200):
        run_dir = tmp_path / f"run{stop_at}"
        shutil.copytree(template, run_dir)
        child = os.fork()
        if child == 0:
            sys.argv = ["x", str(run_dir), str(stop_at)]
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            exec(CRASH_SCRIPT.format(here=str(Path(__file__).parent)), {})
            os._exit(0)
        _, status = os.waitpid(child, 0)
        reached_end = os.waitstatus_to_exitcode(status) == 0
        after = CheckpointStore(run_dir)
        path, skipped = after.newest_complete()
        assert path == after.path(2), (stop_at, skipped)
        assert skipped == []
        assert hidden(run_dir) == []
        save(after, 3)
        assert after.newest_complete().path == after.path(3)
        if reached_end:
            assert after.steps() == [2, 3]
            assert stop_at > 25
            break
    assert reached_end


KILL_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_store import write_members
from thrifty.safety.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
step = max(store.steps(), default=0)
print("ready", flush=True)
while True:
    step += 1
    with store.writing(step) as folder:
        print("begin", step, flush=True)
        write_members(folder, step)
    print("saved", step, flush=True)
    store.rotate(2)
"""


def test_sigkill_during_saves_never_loses_what_was_committed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILL_SCRIPT.format(here=str(Path(__file__).parent))))
    run_dir, rng, inside = tmp_path / "run", random.Random(0), 0
    for kill in range(20):
        if kill >= 4 and inside:
            break  # a busy machine needs more of them until one falls inside a save
        with subprocess.Popen([sys.executable, str(script), str(run_dir)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            threading.Timer(rng.uniform(0.02, 0.3), child.send_signal, [signal.SIGKILL]).start()
            lines = child.stdout.read().split("\n")
        assert child.returncode == -signal.SIGKILL
        said = [line.split() for line in lines if line.count(" ") == 1]
        inside += bool(said) and said[-1][0] == "begin"
        committed = max((int(step) for word, step in said if word == "saved"), default=0)
        store = CheckpointStore(run_dir)
        path, skipped = store.newest_complete()
        assert skipped == []
        assert hidden(run_dir) == []
        assert committed == 0 or (path is not None and int(path.name.split("-")[1]) >= committed)
        store.close()
    assert inside >= 1, "no kill fell inside a save"


def mounted(folder: Path, options: str) -> bool:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    return done.returncode == 0


@pytest.mark.parametrize("writer", ["torch", "safetensors", "text", "flush"])
def test_full_disk_keeps_the_older_checkpoint_and_the_next_save_works(tmp_path: Path, writer: str) -> None:
    disk = tmp_path / "disk"
    if not mounted(disk, "size=512k"):
        pytest.skip("may not mount a file system")
    try:
        store = CheckpointStore(disk / "run")
        save(store, 1)

        def fail(folder: Path) -> None:
            if writer == "torch":
                torch.save(torch.zeros(1 << 20), folder / "optimizer.pt")
            elif writer == "safetensors":
                save_file({"w": torch.zeros(1 << 20)}, folder / "model.safetensors")
            elif writer == "text":
                (folder / "trainer_state.json").write_text("x" * (1 << 20))
            else:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        with pytest.raises(CheckpointNotSaved, match=r"checkpoint-2 was not saved: .*intact"):
            save(store, 2, then=fail)
        assert hidden(store.run_dir) == []
        assert store.newest_complete() == (store.path(1), [])
        assert store.newest_complete().path == store.path(1)
        save(store, 3)
        assert store.newest_complete().path == store.path(3)
        store.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_disk_that_fills_while_the_manifest_is_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if not mounted(disk, "size=256k"):
        pytest.skip("may not mount a file system")
    try:
        store = CheckpointStore(disk / "run")
        save(store, 1)

        def fill(folder: Path) -> None:
            (folder / "filler").write_bytes(b"x" * shutil.disk_usage(disk).free)

        with pytest.raises(CheckpointNotSaved, match="No space left"):
            save(store, 2, then=fill)
        assert hidden(store.run_dir) == []
        assert store.newest_complete() == (store.path(1), [])
        store.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_read_only_folder_is_refused_before_training(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if not mounted(disk, "ro"):
        pytest.skip("may not mount a file system")
    try:
        with pytest.raises(InputError, match=r"output_dir=.*Read-only file system.*Fix: choose a folder"):
            CheckpointStore(disk / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_fault_of_the_caller_is_not_called_a_storage_fault(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(ZeroDivisionError), store.writing(1):
        _ = 1 / 0
    with pytest.raises(RuntimeError, match=r"not written in full: lacks optimizer\.pt"):
        save(store, 1, then=lambda folder: (folder / "optimizer.pt").unlink())
    with pytest.raises(RuntimeError, match=r"lacks thrifty_state\.pt"):
        save(store, 1, required=["thrifty_state.pt"])
    assert store.steps() == []
    assert hidden(tmp_path) == []


def truncate(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.truncate(path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


MEMBERS = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


@pytest.mark.parametrize("damage", [truncate, flip_bit, Path.unlink])
@pytest.mark.parametrize("member", [*MEMBERS, MANIFEST_NAME])
def test_damage_to_any_member_is_found_and_the_older_checkpoint_taken(tmp_path: Path, damage, member: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    newest = save(store, 2)
    damage(newest / member)
    path, skipped = store.newest_complete()
    if member == MANIFEST_NAME and damage is Path.unlink:
        assert path == newest  # without a manifest it is judged as a plain checkpoint, and it is whole
        return
    assert path == store.path(1)
    assert len(skipped) == 1
    assert skipped[0][0] == newest
    assert member in skipped[0][1]


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_plain_checkpoint_without_manifest_is_judged_by_its_members(tmp_path: Path, damage, member: str) -> None:
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    write_members(folder, 4)
    assert problems(folder) == []
    damage(folder / member)
    assert len(found := problems(folder)) == 1
    assert member in found[0]


def test_bit_flip_inside_a_torch_file_without_manifest_is_found_by_its_crc(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    write_members(folder, 4)
    raw = bytearray((folder / "optimizer.pt").read_bytes())
    at = raw.find(torch.ones(64).numpy().tobytes())
    raw[at + 5] ^= 4
    (folder / "optimizer.pt").write_bytes(raw)
    assert problems(folder)
    assert "CRC" in problems(folder)[0]
    assert problems(folder, deep=False) == []


def test_plain_checkpoint_kinds(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    write_members(folder, 4)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickle" in problems(folder)[0]
    (folder / "pytorch_model.bin").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    assert problems(folder) == ["lacks model-2.safetensors"]
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-1.safetensors").rename(folder / "adapter_model.safetensors")
    assert problems(folder) == []
    (folder / "rng_state.pth").rename(folder / "rng_state_1.pth")
    assert problems(folder) == ["lacks rng_state_0.pth"]


def test_weights_only_checkpoint_is_kept_but_never_resumed_from(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        with store.writing(step, resumable=False) as folder:
            save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    path, skipped = store.newest_complete()
    assert path is None
    assert [p.name for p, _ in skipped] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]
    assert "lacks optimizer.pt" in skipped[0][1]
    store.rotate(1)
    assert store.steps() == [3]


def test_rotation_keeps_the_last_k_complete_ones_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(1, 7):
        save(store, step)
    (store.path(6) / "optimizer.pt").unlink()
    assert store.rotate(2, best=2) == [store.path(1), store.path(3)]
    assert store.steps() == [2, 4, 5, 6]  # 6 is broken: it stays as evidence and does not count
    assert store.rotate(None) == []
    with pytest.raises(InputError, match="save_total_limit=0"):
        store.rotate(0)


def test_renamed_folder_is_found_out(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1).rename(store.path(9))
    assert store.verify(store.path(9)) == ["is named checkpoint-9 but holds step 1"]


def test_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    script = "import sys; from thrifty.safety.store import CheckpointStore; CheckpointStore(sys.argv[1])"
    store = CheckpointStore(tmp_path)
    blocked = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert blocked.returncode != 0
    assert "another run is writing to this folder" in blocked.stderr
    assert store.newest_complete() == (None, [])
    CheckpointStore(tmp_path, read_only=True)
    store.close()
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


class Gang:
    """Two threads as two ranks: a real all-reduce of "are all of us fine" over a real barrier."""

    def __init__(self, size: int) -> None:
        self.votes = [True] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def all_ok(self, rank: int, mine: bool) -> bool:
        self.votes[rank] = mine
        self.barrier.wait()
        answer = all(self.votes)
        self.barrier.wait()
        return answer


@pytest.mark.parametrize("failing_rank", [None, 0, 1])
def test_ranks_write_together_and_one_that_fails_stops_all(tmp_path: Path, failing_rank: int | None) -> None:
    gang, outcomes = Gang(2), ["", ""]

    def work(rank: int) -> None:
        store = CheckpointStore(tmp_path, rank=rank, world_size=2, all_ok=lambda mine: gang.all_ok(rank, mine))
        gang.barrier.wait()
        try:
            with store.writing(5) as folder:
                if rank == 0:
                    write_members(folder, 5, world_size=2)
                    (folder / "rng_state_1.pth").unlink()
                if rank == failing_rank:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if rank == 1:
                    time.sleep(0.05)
                    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state_1.pth")
            outcomes[rank] = "saved"
        except CheckpointNotSaved as error:
            outcomes[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    newest = CheckpointStore(tmp_path, read_only=True).newest_complete()
    if failing_rank is None:
        assert outcomes == ["saved", "saved"]
        assert newest == (tmp_path / "checkpoint-5", [])
        manifest = read_manifest(tmp_path / "checkpoint-5")
        assert manifest is not None
        assert manifest["world_size"] == 2
        assert "rng_state_1.pth" in manifest["members"]
    else:
        assert "No space left" in outcomes[failing_rank]
        assert "another process failed" in outcomes[1 - failing_rank]
        assert newest == (None, [])
        assert hidden(tmp_path) == []


def test_storage_reason_reads_only_storage_faults() -> None:
    assert store_module.storage_reason(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"
    # A small file that torch could not write in full: it says so when it closes the file.
    assert "full" in str(store_module.storage_reason(RuntimeError("basic_ios::clear: iostream error")))
    assert store_module.storage_reason(RuntimeError("CUDA out of memory")) is None
    assert store_module.storage_reason(KeyboardInterrupt()) is None
