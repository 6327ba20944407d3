"""Faults of the storage and polite ends: full disks, damaged files, read-only folders, signals.

    python benchmarks/soak/disk.py --out benchmarks/results/soak-disk.json

Every row trains a small model for real in a forked child. A save that fails must not end training, and must leave the
older checkpoints whole; whatever lies in the folder, `auto` must resume from the newest complete checkpoint and end,
bit for bit, where the unbroken run ends. Full file systems are mounted (tmpfs) where the user may do that.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import table  # sets the environment and the path of the next one
from transformers import TrainerCallback

import tiny
from thrifty.errors import InputError, ThriftyError
from thrifty.safety.manifest import MANIFEST_NAME, problems
from thrifty.trainer import Trainer  # noqa: F401 - before the children are forked

STEPS = 8
METHODS: list[Any] = [{"lawa": {"window": 3, "every": 2}}]
Row = dict[str, Any]


class At(TrainerCallback):
    """Calls a function when a step begins, once the checkpoint of the step before is on the disk, or refused."""

    def __init__(self, acts: dict[int, Callable[[], None]], run: Any) -> None:
        self.acts, self.run = acts, run

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        act = self.acts.get(state.global_step + 1)
        if act is not None:
            self.run.finish_saving()
            act()


def train(
    folder: Path, log: Path, acts: dict[int, Callable[[], None]] | None = None, first: Callable[[], None] | None = None
) -> tuple[int, str, Any]:
    """Trains in a child, resuming where there is something; returns its exit code, its output and its result."""
    result = log.with_suffix(".json")
    result.unlink(missing_ok=True)
    log.write_text("")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sys.stdout = sys.stderr = open(log, "a")  # noqa: SIM115
            if first is not None:
                first()
            run = tiny.trainer(
                folder, METHODS, tiny.llama(dropout=0.1), max_steps=STEPS, save_strategy="steps", save_steps=1
            )
            run.add_callback(At(acts or {}, run))
            try:
                run.train(resume_from_checkpoint="auto")
                digest = hashlib.sha256()
                for name, value in sorted(tiny.weights(run.model).items()):
                    digest.update(name.encode() + value.numpy().tobytes())
                result.write_text(json.dumps({"weights": digest.hexdigest(), "losses": tiny.losses(run)}))
                code = 0
            except ThriftyError as error:
                print(error, flush=True)
                code = getattr(error, "exit_code", 2 if isinstance(error, InputError) else 1)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):  # the log may meet the limit that the row sets
                sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, log.read_text(), json.loads(result.read_text()) if result.exists() else None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; one that is not whole is an error."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    for path in found:
        if wrong := problems(path):
            raise AssertionError(f"{path}: {wrong}")
    return found


@contextmanager
def tmpfs(path: Path, size: int) -> Iterator[Path]:
    """A small file system of its own."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def may_mount(root: Path) -> bool:
    try:
        with tmpfs(root / "probe", 1 << 20):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


class Soak:
    """All rows over one unbroken run."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root / "log.txt"
        code, told, self.expected = train(root / "unbroken", self.log)
        assert code == 0, told
        self.size = sum(f.stat().st_size for f in (root / "unbroken" / f"checkpoint-{STEPS}").rglob("*"))
        self.rows: list[Row] = []

    def add(self, fault: str, good: bool, said: str) -> None:
        line = next((s for s in said.splitlines() if "not saved" in s or "skipped" in s or "ended by" in s), "")
        self.rows.append({"fault": fault, "good": bool(good), "said": line.replace(str(self.root), "")[:240]})
        print(self.rows[-1], flush=True)
        if not good:
            print(said[-2000:], flush=True)

    def full_disk(self, share: float) -> None:
        """A file system for two checkpoints and a share of the third: it fills in the midst of a file."""
        fault = f"full file system, {share:.0%} of the third checkpoint fit"
        with tmpfs(self.root / "small", int(self.size * (2 + share)) + (64 << 10)) as folder:
            code, told, result = train(folder / "run", self.log)
            whole = len(checkpoints(folder / "run"))
            subprocess.run(["mount", "-o", f"remount,size={self.size * 20}", str(folder)], check=True)
            again, _, resumed = train(folder / "run", self.log)
        good = code == again == 0 and result == resumed == self.expected and 1 <= whole < STEPS and "not saved" in told
        self.add(fault, good, told)
        (self.root / "small").rmdir()

    def freed_disk(self) -> None:
        """The disk is full for three steps; then somebody makes room."""
        with tmpfs(self.root / "small", self.size * 12) as folder:
            filler = folder / "filler"

            def fill() -> None:
                with open(filler, "wb") as stream:
                    try:
                        while stream.write(b"\0" * 65536):
                            stream.flush()
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise

            code, told, result = train(folder / "run", self.log, {3: fill, 6: filler.unlink})
            kept = [path.name for path in checkpoints(folder / "run")]
        good = code == 0 and result == self.expected and told.count("not saved") == 3 and f"checkpoint-{STEPS}" in kept
        self.add("full for three steps, then freed", good, told)
        (self.root / "small").rmdir()

    def read_only_later(self) -> None:
        """The folder turns read-only while the run goes on; root would not notice, so the child is somebody else."""
        run = self.root / "lost"
        run.mkdir()
        code, told, result = train(
            run, self.log, {4: lambda: run.chmod(0o555), 6: lambda: run.chmod(0o755)}, first=self.owner(run)
        )
        kept = [path.name for path in checkpoints(run)]
        good = code == 0 and result == self.expected and told.count("not saved") == 2 and len(kept) == STEPS - 2
        self.add("folder turns read-only for two steps", good, told)
        shutil.rmtree(run)

    def owner(self, folder: Path) -> Callable[[], None] | None:
        """Gives a folder to somebody without rights, whom root's child has to become."""
        if os.geteuid() != 0:
            return None
        self.log.with_suffix(".json").touch()
        for path in (folder, self.log, self.log.with_suffix(".json")):
            os.chown(path, 65534, 65534)
        self.root.chmod(0o777)
        return lambda: os.setuid(65534)

    def file_size_limit(self) -> None:
        """`RLIMIT_FSIZE` as the disk's edge, for who may not mount."""

        def limit(size: int) -> Callable[[], None]:
            return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        run = self.root / "limited"
        code, told, result = train(run, self.log, {3: limit(4096), 5: limit(resource.RLIM_INFINITY)})
        kept = [path.name for path in checkpoints(run)]
        good = code == 0 and result == self.expected and told.count("not saved") == 2 and len(kept) == STEPS - 2
        self.add("no file may grow beyond 4 KiB for two steps", good, told)
        shutil.rmtree(run)

    def failing_flush(self, number: int, call: int) -> None:
        """The disk says only at the flush that it is full, or broken."""

        def first() -> None:
            real, calls = os.fsync, [0]

            def fsync(descriptor: int) -> None:
                calls[0] += 1
                if calls[0] == call:
                    raise OSError(number, os.strerror(number))
                real(descriptor)

            os.fsync = fsync

        run = self.root / "flush"
        code, told, result = train(run, self.log, first=first)
        whole = len(checkpoints(run))
        good = code == 0 and result == self.expected and told.count("not saved") == 1 and whole == STEPS - 1
        self.add(f"flush {call} fails with {errno.errorcode[number]}", good, told)
        shutil.rmtree(run)

    def damage(self, member: str, how: str) -> None:
        """One file of the newest checkpoint is spoilt; the one before it must be taken."""
        run = self.root / "damaged"
        shutil.copytree(self.root / "unbroken", run)
        for step in range(6, STEPS + 1):
            shutil.rmtree(run / f"checkpoint-{step}")
        path = run / "checkpoint-5" / member
        content = path.read_bytes()
        middle = len(content) // 2
        spoilt = {
            "cut in half": content[:middle],
            "last byte cut": content[:-1],
            "one bit flipped": content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :],
            "emptied": b"",
            "longer": content + b"\0",
        }
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(spoilt[how])
        code, told, result = train(run, self.log)
        named = "skipped" in told and "checkpoint-5" in told and member in told.replace("manifest", member)
        taken = named and "checkpoint-4" in told
        if member == MANIFEST_NAME and how == "missing":
            # Then it is judged like a checkpoint of the plain trainer, by its members, and they are whole.
            taken = "skipped" not in told and f"resuming from {run / 'checkpoint-5'}" in told
        good = code == 0 and result == self.expected and taken
        self.add(f"{member} {how}", good, told)
        shutil.rmtree(run)

    def all_damaged(self) -> None:
        run = self.root / "damaged"
        shutil.copytree(self.root / "unbroken", run)
        for path in run.glob("checkpoint-*"):
            (path / "optimizer.pt").unlink()
        code, told, result = train(run, self.log)
        good = code == 0 and result == self.expected and told.count("skipped") == STEPS and "starting afresh" in told
        self.add("every checkpoint lacks its optimizer", good, told)
        shutil.rmtree(run)

    def unwritable(self) -> None:
        locked = self.root / "locked"
        locked.mkdir()
        becomes = self.owner(locked)
        locked.chmod(0o555)
        code, told, _ = train(locked, self.log, first=becomes)
        self.add("folder without the right to write", code == 2 and "cannot write checkpoints there" in told, told)
        os.chown(self.log, os.geteuid(), -1)

    def signal(self, signum: int, step: int) -> None:
        run = self.root / "signalled"
        code, told, _ = train(run, self.log, {step: lambda: os.kill(os.getpid(), signum)})
        newest = checkpoints(run)[-1].name
        again, _, result = train(run, self.log)
        expected = 130 if signum == signal.SIGINT else 143
        good = code == expected and newest == f"checkpoint-{step}" and again == 0 and result == self.expected
        self.add(f"{signal.Signals(signum).name} in step {step}", good, told)
        shutil.rmtree(run)

    def signal_on_a_full_disk(self) -> None:
        run = self.root / "signalled"

        def fill_and_end() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            os.kill(os.getpid(), signal.SIGTERM)

        code, told, _ = train(run, self.log, {4: fill_and_end})
        newest = checkpoints(run)[-1].name
        again, _, result = train(run, self.log)
        good = code == 143 and "nothing was saved" in told and newest == "checkpoint-3"
        self.add("SIGTERM on a full disk", good and again == 0 and result == self.expected, told)
        shutil.rmtree(run)


def everything(soak: Soak, short: bool) -> None:
    """Runs all rows, or one of each sort."""
    members = sorted(path.name for path in (soak.root / "unbroken" / "checkpoint-5").iterdir())
    ways = ("cut in half", "last byte cut", "one bit flipped", "emptied", "longer", "missing")
    pairs = [(member, way) for member in members for way in ways]
    for member, way in pairs[:: len(pairs) // 5] if short else pairs:
        soak.damage(member, way)
    soak.all_damaged()
    soak.file_size_limit()
    for number, call in [(errno.ENOSPC, 9)] if short else [(errno.ENOSPC, 1), (errno.EIO, 9), (errno.EDQUOT, 27)]:
        soak.failing_flush(number, call)
    signals = (
        [(signal.SIGTERM, 3)]
        if short
        else [(signum, step) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) for step in (1, 4, 7)]
    )
    for signum, step in signals:
        soak.signal(signum, step)
    soak.signal_on_a_full_disk()
    if may_mount(soak.root):
        for share in (0.4,) if short else (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
            soak.full_disk(share)
        soak.freed_disk()
    soak.read_only_later()
    soak.unwritable()


def main(arguments: list[str] | None = None) -> int:
    """Runs the soak and writes its table."""
    parser = table.parser(__doc__)
    parser.add_argument("--short", action="store_true", help="one row of each sort")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as root:
        soak = Soak(Path(root))
        everything(soak, args.short)
    total = {"faults": len(soak.rows), "good": sum(row["good"] for row in soak.rows)}
    table.write(args.out, "storage faults and signals", soak.rows, total)
    return 0 if total["faults"] == total["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
