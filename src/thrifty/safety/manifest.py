"""What a complete checkpoint is, and how to tell without loading it.

A checkpoint that thrifty wrote carries `thrifty_manifest.json`, with the size and hash of every file. A checkpoint of
the plain `transformers.Trainer` has none; it is judged by its members: the weights' header and length, and the CRC that
`torch.save` keeps of every record. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

MANIFEST_NAME = "thrifty_manifest.json"
FORMAT = 1
HASH_NAME = "xxh3_128"
"""Faults here are accidents, not attacks: xxh3 reads 12.9 GiB/s where blake2b reads 0.9, and `datasets` brings it
anyway."""
_CHUNK = 1 << 22
_PICKLED_WEIGHTS = ("pytorch_model.bin", "adapter_model.bin", "pytorch_model.bin.index.json")


def file_hash(path: str | os.PathLike[str]) -> str:
    """Returns the hexadecimal xxh3-128 of a file."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def members(folder: str | os.PathLike[str]) -> list[str]:
    """Returns every file under `folder` but the manifest, as sorted posix paths relative to it."""
    root = Path(folder)
    found = (p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() or p.is_symlink())
    return sorted(name for name in found if name != MANIFEST_NAME)


def build_manifest(
    folder: str | os.PathLike[str],
    *,
    step: int,
    world_size: int = 1,
    required: Sequence[str] = (),
    fingerprint: Mapping[str, Any] | None = None,
    resumable: bool = True,
) -> dict[str, Any]:
    """Describes the files of `folder` as they are now.

    Args:
        folder: The finished folder; its files are read once, for their hashes.
        step: Optimizer steps done.
        world_size: Processes that took part.
        required: Relative paths that must be present besides those every resumable checkpoint has.
        fingerprint: What a resumed run is compared with (see `thrifty.safety.fingerprint`).
        resumable: Whether it was saved with all that resuming needs.
    """
    root = Path(folder)
    content: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "world_size": world_size,
        "required": sorted(required),
        "resumable": resumable,
        "hash": HASH_NAME,
        "members": {n: {"size": (root / n).stat().st_size, HASH_NAME: file_hash(root / n)} for n in members(root)},
        "fingerprint": dict(fingerprint or {}),
        "versions": {name: _version(name) for name in ("thrifty", "torch", "transformers")},
    }
    content["self"] = _self_hash(content)
    return content


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns the manifest of a checkpoint, or None where it has none.

    Raises:
        ValueError: It is not JSON, is of a later format, or fails its own hash.
    """
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{MANIFEST_NAME} is not readable JSON") from error
    if not isinstance(content, dict) or content.get("self") != _self_hash(content):
        raise ValueError(f"{MANIFEST_NAME} fails its own hash")
    if content["format"] > FORMAT:
        raise ValueError(f"{MANIFEST_NAME} has format {content['format']}, this version reads up to {FORMAT}")
    return content


def problems(folder: str | os.PathLike[str], *, deep: bool = True, as_saved: bool = False) -> list[str]:
    """Returns why `folder` is not a checkpoint to resume from; empty where it is one.

    Args:
        folder: A checkpoint folder, written by thrifty or by `transformers.Trainer`.
        deep: Whether to read every byte (hashes, CRCs) or only sizes and headers.
        as_saved: Accept a folder that was meant to hold the weights only.
    """
    root = Path(folder)
    if not root.is_dir():
        return ["is not a folder"]
    try:
        manifest = read_manifest(root)
    except ValueError as error:
        return [str(error)]
    world_size = _stated_world_size(root) if manifest is None else int(manifest["world_size"])
    weights_only = as_saved and manifest is not None and not manifest["resumable"]
    found = [] if weights_only else missing_members(root, world_size)
    if manifest is None:
        return found + [text for name in members(root) if (text := _own_problem(root / name, deep))]
    step = re.fullmatch(r"checkpoint-(\d+)", root.name)
    if step and int(step[1]) != manifest["step"]:
        found.append(f"is named {root.name} but holds step {manifest['step']}")
    for name in manifest["required"]:
        if name not in manifest["members"]:
            found.append(f"lacks {name}")
    for name, entry in manifest["members"].items():
        if text := _entry_problem(root / name, name, entry, deep):
            found.append(text)
    return list(dict.fromkeys(found))


def missing_members(folder: str | os.PathLike[str], world_size: int = 1) -> list[str]:
    """Returns a line for each part without which a resumed run would not continue where it stopped."""
    root = Path(folder)
    names = set(os.listdir(root))
    sharded = any(re.fullmatch(r"global_step\d+|pytorch_model_fsdp_\d+", n) for n in names)
    lacking: list[str] = []
    weights = {"model.safetensors", "adapter_model.safetensors", "pytorch_model_fsdp.bin"} & names
    if "model.safetensors.index.json" in names:
        lacking += [f"lacks {n}" for n in _shards(root / "model.safetensors.index.json") if n not in names]
    elif pickled := [n for n in _PICKLED_WEIGHTS if n in names]:
        lacking.append(f"has its weights as pickle ({pickled[0]}), which is never loaded")
    elif not weights and not sharded and not any(root.glob("*/adapter_model.safetensors")):
        lacking.append("lacks weights (model.safetensors or adapter_model.safetensors)")
    if not sharded and not names & {"optimizer.pt", "optimizer.bin", "optimizer_0"}:
        lacking.append("lacks optimizer.pt")
    if "scheduler.pt" not in names and not any(n.startswith("global_step") for n in names):
        lacking.append("lacks scheduler.pt")
    rng = ["rng_state.pth"] if world_size <= 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    lacking += [f"lacks {n}" for n in (*rng, "trainer_state.json") if n not in names]
    return lacking


def _stated_world_size(root: Path) -> int:
    """A plain checkpoint does not say how many processes wrote it, but it has one RNG file for each: 1 + the highest
    rank."""
    ranks = [int(m[1]) for n in os.listdir(root) if (m := re.fullmatch(r"rng_state_(\d+)\.pth", n))]
    return 1 + max(ranks) if ranks else 1


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        return [f"a readable {index.name}"]


def _entry_problem(path: Path, name: str, entry: Mapping[str, Any], deep: bool) -> str | None:
    if not path.is_file():
        return f"lacks {name}"
    if (size := path.stat().st_size) != entry["size"]:
        return f"{name} has {size} of {entry['size']} bytes"
    if deep and file_hash(path) != entry[HASH_NAME]:
        return f"{name} fails its hash (bytes were changed)"
    return None


def _own_problem(path: Path, deep: bool) -> str | None:
    """Judges one file of a checkpoint without manifest by what its own format knows."""
    if path.suffix == ".safetensors":
        return safetensors_problem(path)
    if path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return f"{path.name} is not readable JSON"
    if path.suffix in {".pt", ".pth"}:
        try:
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip() if deep else None
        except (zipfile.BadZipFile, EOFError, OSError):
            return f"{path.name} is truncated or not a torch file"
        if broken is not None:
            return f"{path.name} fails the CRC of {broken}"
    return None


def safetensors_problem(path: str | os.PathLike[str]) -> str | None:
    """Compares a safetensors file's length with what its header promises, reading the header only."""
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as stream:
        head = stream.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size - 8:
            return f"{path.name} is truncated in its header ({size} bytes)"
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{path.name} has an unreadable header"
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"{path.name} has {size} of {expected} bytes"


def _self_hash(content: Mapping[str, Any]) -> str:
    body = {key: value for key, value in content.items() if key != "self"}
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
