"""The cache folder: what may be computed again is kept under `~/.cache/thrifty`, never beside the user's files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

_MANIFEST = "manifest.json"


def cache_dir() -> Path:
    """Returns the cache folder: `$THRIFTY_CACHE`, or `thrifty` under `$XDG_CACHE_HOME` or `~/.cache`. It may not exist
    yet."""
    chosen = os.environ.get("THRIFTY_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "thrifty"


def content_hash(parts: Iterable[str | bytes]) -> str:
    """Returns 32 hexadecimal digits for a sequence of parts. Lengths are hashed too: ("ab", "c") is not ("a", "bc")."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def is_whole(folder: Path) -> bool:
    """Returns whether `folder` is there as `write_folder` left it. A damaged one is removed, to be made again."""
    if not folder.is_dir():
        return False
    try:
        sums = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        whole = all(_file_hash(folder / name) == known for name, known in sums.items())
    except (OSError, ValueError, AttributeError):
        whole = False
    if not whole:
        shutil.rmtree(folder, ignore_errors=True)
    return whole


def _file_hash(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_folder(target: Path, write: Callable[[Path], None]) -> bool:
    """Creates the folder `target` in one step: `write` fills a temporary one beside it, which is then renamed.

    Two processes may do this at once; the first rename wins and the other's copy is dropped.

    Returns:
        Whether the folder is there now. False means that the cache cannot be written (read-only home, full disk),
        which is no reason to fail: what is cached can be computed.
    """
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=target.parent))
        write(temporary)
        sums = {file.name: _file_hash(file) for file in sorted(temporary.iterdir())}
        (temporary / _MANIFEST).write_text(json.dumps(sums), encoding="utf-8")
        try:
            temporary.rename(target)
        except OSError:
            # Renaming onto a folder that is not empty: another process was faster, and wrote the same content.
            return target.is_dir()
    except OSError:
        return False
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return True
