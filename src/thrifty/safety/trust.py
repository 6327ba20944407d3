"""What a run may load: no pickle, nothing outside its folder."""

from __future__ import annotations

import json
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

from thrifty.errors import InputError

_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".msgpack", ".h5"}
_CONVERT = (
    "convert once, where you trust the file: "
    "`from safetensors.torch import save_file; save_file(torch.load(path, weights_only=True), 'model.safetensors')`, "
    "or save the model again with `save_pretrained`"
)


def check_model_folder(name: str, key: str = "model_name_or_path") -> None:
    """Looks at a local model or adapter folder before anything is loaded from it; a hub id passes.

    Raises:
        InputError: Its weights are pickle files, or its index names files outside the folder.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    assert_no_pickle(folder, key)
    for index in folder.glob("*.safetensors.index.json"):
        try:
            named = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError("is no index of weights", key=key, value=str(index), fix="save the model again") from error
        for file in sorted(map(str, named)):
            # By its text: the files of the hub's cache are links that point out of their folder.
            if os.path.isabs(file) or os.path.normpath(file).startswith(".."):
                raise InputError(
                    f"{index.name} names a file outside the folder ({file})",
                    key=key,
                    value=str(index),
                    fix="save the model again with `save_pretrained`",
                )


def assert_no_pickle(path: str | os.PathLike[str], key: str = "model_name_or_path") -> None:
    """Refuses weights that only pickle could read.

    Args:
        path: A weights file, or a model folder. A folder passes where it holds safetensors weights, whatever lies
            beside them (checkpoints keep `optimizer.pt`, which is read with `weights_only=True`), or no weights at all.
        key: The configuration key that names it, for the message.

    Raises:
        InputError: Loading it would mean unpickling.
    """
    path = Path(path)
    if path.is_dir():
        if any(path.glob("*.safetensors")):
            return
        found = sorted(p for p in path.iterdir() if p.suffix in _PICKLES and _is_weights(p.name))
        if not found:
            return
        path = found[0]
    elif path.suffix not in _PICKLES:
        return
    raise InputError(
        "pickle files can run any code when they are loaded, so they are never loaded",
        key=key,
        value=str(path),
        fix=_CONVERT,
    )


def check_checkpoint(folder: str | os.PathLike[str]) -> None:
    """Looks at what `torch.load` would read of a checkpoint, without reading it.

    Optimizer, schedule, random and method state hold tensors, numbers and containers; whatever else a file names would
    have to be run. `torch.load(weights_only=True)` refuses that too, but later, and in terms of its own.

    Raises:
        InputError: A member names something that only pickle could load.
    """
    from torch.serialization import get_unsafe_globals_in_checkpoint

    from thrifty import _hf

    for member in sorted(Path(folder).glob("*.pt")) + sorted(Path(folder).glob("*.pth")):
        try:
            with _hf.random_state_globals():
                foreign = get_unsafe_globals_in_checkpoint(str(member))
        except (pickle.UnpicklingError, EOFError, ValueError, RuntimeError) as error:
            foreign = [str(error).partition("\n")[0]]
        if foreign:
            raise InputError(
                f"holds {', '.join(sorted(foreign)[:3])}, which only pickle could load, and that may run any code",
                key="resume_from_checkpoint",
                value=str(member),
                fix="use another checkpoint, or start a new run from its weights (model_name_or_path)",
            )


def _is_weights(name: str) -> bool:
    return name.startswith(("pytorch_model", "adapter_model", "model", "consolidated", "tf_model", "flax_model"))


def inside(root: str | os.PathLike[str], name: str) -> Path:
    """Returns `root/name`, resolved, where that stays below `root`.

    Raises:
        InputError: It leaves the folder: an absolute path, `..`, or a link that points out.
    """
    base = Path(root).resolve()
    target = (base / name).resolve()
    if target != base and base not in target.parents:
        raise InputError("the path leaves its folder", key="path", value=name, fix=f"name something below {base}")
    return target


def extract(archive: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Unpacks a zip or tar archive; everything is checked before anything is written.

    Raises:
        InputError: It is neither, or a member would land outside `folder`, or is a link or a device.
    """
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as content:
            for member in content.infolist():
                inside(folder, member.filename)
                if (member.external_attr >> 16) & 0o170000 not in (0, 0o100000, 0o040000):
                    _refuse(archive, member.filename)
            content.extractall(folder)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as content:
            for member in content.getmembers():
                inside(folder, member.name)
                if not (member.isfile() or member.isdir()):
                    _refuse(archive, member.name)
            content.extractall(folder, filter="data")
    else:
        raise InputError("not a zip or tar archive", key="path", value=os.fspath(archive), fix="unpack it yourself")


def _refuse(archive: str | os.PathLike[str], member: str) -> None:
    raise InputError(
        f"{os.fspath(archive)} holds a link or device",
        key="path",
        value=member,
        fix="pack plain files and folders only",
    )
