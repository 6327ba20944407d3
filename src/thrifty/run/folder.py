"""The folder of a run: choosing it, protecting what lies in it, replacing an earlier run where that is asked for."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from thrifty.errors import InputError

# Everything that a run writes at the top of its folder. Anything else in there is the user's and is never touched.
_FILES = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|(adapter_|generation_|preprocessor_|processor_)?config\.json"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|tokenizer\.model"
    r"|chat_template\.(jinja|json)|training_args\.bin|trainer_state\.json|(modeling|configuration)_\w+\.py"
    r"|run\.yaml|metrics\.jsonl|summary\.json|loss\.png|report\.html|README\.md"
)
_FOLDERS = re.compile(r"checkpoint-\d+|\.(tmp|old|del)-.*")
_LOCK = ".thrifty.lock"
_RUN_SIGNS = ("run.yaml", "trainer_state.json", "summary.json", "metrics.jsonl")
_FINISHED_SIGNS = ("summary.json", "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


def next_free(name: str, parent: str | Path = "runs") -> Path:
    """The first of `runs/NAME-001`, `runs/NAME-002`, ... that is newer than all that exist."""
    parent = Path(parent)
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    taken = [int(m[1]) for p in (parent.iterdir() if parent.is_dir() else ()) if (m := pattern.fullmatch(p.name))]
    return parent / f"{name}-{max(taken, default=0) + 1:03d}"


def contents(folder: str | Path) -> list[str]:
    """The names in `folder` that a run would write or replace."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    patterns = [(p.name, _FOLDERS if p.is_dir() else _FILES) for p in folder.iterdir()]
    return sorted(name for name, pattern in patterns if pattern.fullmatch(name))


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, complete or not."""
    found = [
        (int(name.removeprefix("checkpoint-")), name) for name in contents(folder) if name.startswith("checkpoint-")
    ]
    return [Path(folder) / name for _, name in sorted(found)]


def check(
    folder: str | Path, *, overwrite: bool, resume: Literal[False] | str, sources: tuple[str | None, ...] = ()
) -> None:
    """Refuses a folder that cannot be written or that holds something of value. Writes nothing.

    Args:
        folder: The output folder; it need not exist.
        overwrite: An earlier run in it may be replaced.
        resume: False, `auto`, or the path of a checkpoint.
        sources: Local paths that the run reads and that it must not replace.

    Raises:
        InputError: Naming what is in the way and what may be done.
    """
    folder = Path(folder)
    _check_writable(folder)
    for source in sources:
        if source is not None and Path(source).exists() and folder.resolve() == Path(source).resolve():
            raise InputError(
                "the model to start from lies in it and would be overwritten",
                key="output_dir",
                value=str(folder),
                fix="choose another folder",
            )
    if resume not in (False, "auto"):
        _check_checkpoint(Path(resume))
    held = contents(folder)
    if not held:
        return
    is_run = any(name in held for name in _RUN_SIGNS) or bool(checkpoints(folder))
    shown = ", ".join(held[:4]) + (", ..." if len(held) > 4 else "")
    if resume is not False:
        _check_resumable(folder, held, resume)
    elif not overwrite:
        again = " or resume=auto to go on with it" if is_run else ""
        what = "already holds a run" if is_run else "already holds files that a run would overwrite"
        raise InputError(
            f"{what} ({shown})",
            key="output_dir",
            value=str(folder),
            fix=f"another output_dir, overwrite=true to replace it{again}",
        )
    elif not is_run:
        raise InputError(
            f"holds {shown}, but no run that overwrite could replace",
            key="output_dir",
            value=str(folder),
            fix="another output_dir, or move those files away",
        )


def clear(folder: str | Path) -> None:
    """Removes the run that lies in `folder`, and nothing else."""
    for name in contents(folder):
        path = Path(folder) / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextlib.contextmanager
def left_alone_on_failure(folder: str | Path) -> Iterator[None]:
    """Removes what merely getting ready has made, if this context ends with an error before a run began.

    That is the lock of the checkpoint store and empty folders.
    """
    lock = Path(folder) / _LOCK
    had_lock, missing = lock.exists(), []
    path = Path(folder).absolute()
    while not path.exists():
        missing.append(path)
        path = path.parent
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not there, or not empty any more
            if not had_lock and not contents(folder):
                lock.unlink(missing_ok=True)
            for made in missing:
                made.rmdir()
        raise


def _check_writable(folder: Path) -> None:
    existing = folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise InputError(f"{existing} is not a folder", key="output_dir", value=str(folder), fix="choose another path")
    try:
        # Trying beats asking: permissions, read-only mounts, quotas and special file systems all answer.
        os.rmdir(tempfile.mkdtemp(prefix=".thrifty-probe-", dir=existing))
    except OSError as error:
        raise InputError(
            f"{existing} cannot be written to ({error.strerror})",
            key="output_dir",
            value=str(folder),
            fix="choose a folder that you may write to",
        ) from error


def _check_checkpoint(path: Path) -> None:
    if not (path / "trainer_state.json").is_file():
        what = "there is no such folder" if not path.is_dir() else "holds no checkpoint (no trainer_state.json)"
        raise InputError(what, key="resume", value=str(path), fix="the path of a checkpoint-N folder, or auto")


def _check_resumable(folder: Path, held: list[str], resume: str) -> None:
    if resume == "auto":
        finished = [name for name in held if name in _FINISHED_SIGNS]
        if not checkpoints(folder) and finished:
            raise InputError(
                f"{folder} holds a finished run ({finished[0]}) without checkpoints, so there is nothing to go on from",
                key="resume",
                value=resume,
                fix="overwrite=true to train anew, or another output_dir",
            )
    elif Path(resume).resolve().parent != folder.resolve():
        raise InputError(
            "already holds another run than that of the checkpoint",
            key="output_dir",
            value=str(folder),
            fix=f"output_dir={Path(resume).resolve().parent}, or an empty folder",
        )
