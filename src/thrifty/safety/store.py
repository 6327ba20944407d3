"""Checkpoints that a kill, a full disk or a power cut cannot harm.

A checkpoint is written under a temporary name in the run folder, every file is flushed to disk, the manifest is written
and flushed last, and one rename makes it visible. Whatever happens before the rename leaves older checkpoints as they
were.

    store = CheckpointStore("out")
    with store.writing(step=100, fingerprint=...) as folder:   # out/.tmp-checkpoint-100/checkpoint-100
        model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    path, skipped = store.newest_complete()

With several processes each passes its `rank` and `all_ok`, a collective that says whether all of them agree; all write
into the same folder, each flushes, rank 0 commits.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from thrifty.errors import InputError, ThriftyError
from thrifty.safety.manifest import MANIFEST_NAME, build_manifest, missing_members, problems, read_manifest

_TEMPORARY, _ASIDE, _DOOMED = ".tmp-", ".old-", ".del-"


class CheckpointNotSaved(ThriftyError):
    """The storage refused (disk full, quota, read-only). Older checkpoints are intact; training can go on."""


class Newest(NamedTuple):
    """What there is to resume from, and what was passed over."""

    path: Path | None
    skipped: list[tuple[Path, str]]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        run_dir: The run folder; created where it does not exist.
        rank: This process. Rank 0 alone creates, commits, rotates and cleans.
        world_size: Processes that write together.
        all_ok: A collective: takes whether this process is fine, returns whether all are. Needed where `world_size` >
            1.
        read_only: For looking only (reports): nothing is created, locked, cleaned or written.

    Raises:
        InputError: `run_dir` cannot be written to, or a living process writes to it.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        all_ok: Callable[[bool], bool] | None = None,
        read_only: bool = False,
    ) -> None:
        if world_size > 1 and all_ok is None:
            raise ValueError("several processes need `all_ok` to agree on a checkpoint")
        self.run_dir, self.rank, self.world_size = Path(run_dir), rank, world_size
        self._all_ok = all_ok if all_ok is not None else (lambda mine: mine)
        self._writes = rank == 0 and not read_only
        self._lock: IO[bytes] | None = None
        if self._writes:
            self._require_writable()
            self._lock = lock_folder(self.run_dir)
            self.recover()

    def close(self) -> None:
        """Lets another process write to the run folder; what happens anyway when this one ends."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or will be."""
        return self.run_dir / f"checkpoint-{step}"

    def staging(self, step: int) -> Path:
        """The folder the members of `step` are written into; the same on every process."""
        return self.run_dir / f"{_TEMPORARY}checkpoint-{step}" / f"checkpoint-{step}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint folder, complete or not, oldest first."""
        found = (re.fullmatch(r"checkpoint-(\d+)", p.name) for p in self.run_dir.iterdir() if p.is_dir())
        return sorted(int(match[1]) for match in found if match)

    @contextmanager
    def writing(
        self,
        step: int,
        *,
        required: Sequence[str] = (),
        fingerprint: Mapping[str, Any] | None = None,
        resumable: bool = True,
    ) -> Iterator[Path]:
        """Yields the folder to write into and makes it `checkpoint-<step>` on a clean exit.

        Args:
            step: Optimizer steps done.
            required: Members that must be there besides weights, optimizer, scheduler, RNG and trainer state.
            fingerprint: Stored in the manifest.
            resumable: False where only the weights are kept (`save_only_model`): such a folder is never resumed from.

        Raises:
            CheckpointNotSaved: The storage refused, here or on another process. Nothing older was touched.
            RuntimeError: What was written is not a complete checkpoint; a fault of the caller.
        """
        folder = self.staging(step)
        try:
            with self._agreeing(step):
                if self.rank == 0:
                    self.recover()
                    folder.mkdir(parents=True)
            with self._agreeing(step):
                yield folder
            with self._agreeing(step):
                flush_files(folder)
            with self._agreeing(step):
                if self.rank == 0:
                    self._commit(folder, step, required, fingerprint, resumable)
        finally:
            if self.rank == 0:
                shutil.rmtree(folder.parent, ignore_errors=True)  # what cannot be removed now, `recover` removes

    def newest_complete(self) -> Newest:
        """Returns the newest checkpoint that verifies, and the newer ones that do not, each with the reason.

        Every byte is read. With several processes, call it on rank 0 and send the answer to the others.
        """
        skipped: list[tuple[Path, str]] = []
        for step in reversed(self.steps()):
            if not (found := self.verify(self.path(step))):
                return Newest(self.path(step), skipped)
            skipped.append((self.path(step), "; ".join(found)))
        return Newest(None, skipped)

    def verify(self, path: str | os.PathLike[str], *, deep: bool = True) -> list[str]:
        """Returns the problems of one checkpoint; empty where it can be resumed from."""
        return problems(path, deep=deep)

    def fingerprint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Returns the fingerprint stored with a checkpoint; empty for one that thrifty did not write."""
        return (read_manifest(path) or {}).get("fingerprint", {})

    def rotate(self, keep: int | None, best: int | None = None) -> list[Path]:
        """Deletes all but the newest `keep` complete checkpoints and the best one.

        Args:
            keep: How many to keep, at least 1; None keeps all.
            best: The step of the best checkpoint, kept besides.

        Returns:
            The folders deleted. Broken folders newer than the oldest kept one stay, as evidence, and count for nothing.
        """
        if keep is None or not self._writes:
            return []
        if keep < 1:
            raise InputError(
                "at least one checkpoint must stay", key="save_total_limit", value=keep, fix="use 1 or more"
            )
        steps = self.steps()
        complete = [s for s in steps if not problems(self.path(s), deep=False, as_saved=True)]
        if len(complete) <= keep:
            return []
        oldest_kept = complete[-keep]
        doomed = [self.path(s) for s in steps if s < oldest_kept and s != best]
        for path in doomed:
            self._delete(path)
        return doomed

    def recover(self) -> None:
        """Finishes or undoes what a killed process left: temporary folders, half-done replacements, half-done
        deletions."""
        if not self._writes:
            return
        for path in list(self.run_dir.iterdir()):
            if re.fullmatch(rf"{re.escape(_ASIDE)}checkpoint-\d+", path.name):
                final = self.run_dir / path.name.removeprefix(_ASIDE)
                if not final.exists():
                    os.rename(path, final)  # killed between the two renames of a replacement: the old one comes back
                    flush_folder(self.run_dir)
                else:
                    self._delete(path)
            elif re.fullmatch(rf"({re.escape(_TEMPORARY)}|{re.escape(_DOOMED)}).*checkpoint-\d+", path.name):
                shutil.rmtree(path)

    def _commit(
        self, folder: Path, step: int, required: Sequence[str], fingerprint: Mapping[str, Any] | None, resumable: bool
    ) -> None:
        lacking = missing_members(folder, self.world_size) if resumable else []
        lacking += [f"lacks {name}" for name in required if not (folder / name).is_file()]
        if lacking:
            raise RuntimeError(f"checkpoint-{step} was not written in full: {'; '.join(lacking)}")
        manifest = build_manifest(
            folder,
            step=step,
            world_size=self.world_size,
            required=required,
            fingerprint=fingerprint,
            resumable=resumable,
        )
        with open(folder / MANIFEST_NAME, "w", encoding="utf-8") as stream:
            json.dump(manifest, stream, indent=1, sort_keys=True)
            stream.flush()
            os.fsync(stream.fileno())
        flush_folder(folder)
        final, aside = self.path(step), self.run_dir / f"{_ASIDE}checkpoint-{step}"
        replacing = final.exists()
        if replacing:
            os.rename(final, aside)  # a folder cannot be renamed over a full one; `recover` undoes this if we die here
        os.rename(folder, final)
        flush_folder(self.run_dir)
        if replacing:
            self._delete(aside)

    def _delete(self, path: Path) -> None:
        # A deletion that is killed half way must not leave something that looks like a broken checkpoint.
        doomed = path.with_name(_DOOMED + path.name)
        os.rename(path, doomed)
        shutil.rmtree(doomed)

    @contextmanager
    def _agreeing(self, step: int) -> Iterator[None]:
        """Runs a phase, then has all processes agree that it went well: one that fails must not leave the others
        waiting."""
        try:
            yield
        except BaseException as error:
            self._all_ok(False)
            if (reason := storage_reason(error)) is not None:
                raise CheckpointNotSaved(
                    f"checkpoint-{step} was not saved: {reason}. Older checkpoints in {self.run_dir} are intact"
                ) from error
            raise
        if not self._all_ok(True):
            raise CheckpointNotSaved(f"checkpoint-{step} was not saved: another process failed")

    def _require_writable(self) -> None:
        try:
            created = not self.run_dir.exists()
            self.run_dir.mkdir(parents=True, exist_ok=True)
            probe = self.run_dir / f"{_TEMPORARY}probe"
            probe.write_bytes(b"")
            probe.unlink()
            if created:
                flush_folder(self.run_dir.parent)
        except OSError as error:
            raise InputError(
                f"cannot write checkpoints there ({error.strerror or error})",
                key="output_dir",
                value=str(self.run_dir),
                fix="choose a folder you may write to",
            ) from error


def lock_folder(folder: str | os.PathLike[str]) -> IO[bytes] | None:
    """Locks a run folder for as long as the answer lives; the system unlocks it however the process ends.

    Raises:
        InputError: Another living process holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    stream = open(Path(folder) / ".thrifty.lock", "ab")  # noqa: SIM115 - the open file is the lock
    try:
        # A POSIX lock: unlike flock, data loader workers do not inherit it and so cannot outlive a killed run with it.
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stream.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise InputError(
                "another run is writing to this folder",
                key="output_dir",
                value=str(folder),
                fix="wait for it to end, or choose another folder",
            ) from error
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return None  # a network file system without locks
    return stream


def flush_files(folder: str | os.PathLike[str]) -> None:
    """Flushes every file under `folder`, then every folder, to the disk itself."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            descriptor = os.open(os.path.join(root, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        flush_folder(root)


def flush_folder(folder: str | os.PathLike[str]) -> None:
    """Flushes a folder's own entries: without it, a rename can be lost in a power cut."""
    if os.name == "nt":
        return  # Windows cannot open a folder; NTFS journals its entries
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_reason(error: BaseException) -> str | None:
    """Returns what the storage said, or None where `error` is something else.

    The writers do not agree on a type: Python raises OSError, `torch.save` a RuntimeError of its container, safetensors
    and tokenizers exceptions of their own that quote the operating system.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    if quoted := re.search(r"([^:\n]+) \(os error (\d+)\)", text):
        return quoted[1].strip()
    signs = ("inline_container", "PytorchStreamWriter", "iostream error")
    if isinstance(error, RuntimeError) and any(sign in text for sign in signs):
        return "the disk took only a part of the file (full, or over quota)"
    return None
