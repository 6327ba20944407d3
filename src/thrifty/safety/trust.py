"""What a run may load: no pickle, nothing outside its folder."""

from __future__ import annotations

import os
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


def assert_no_pickle(path: str | os.PathLike[str]) -> None:
    """Refuses weights that only pickle could read.

    Args:
        path: A weights file, or a model folder. A folder passes where it holds safetensors weights, whatever lies
            beside them (checkpoints keep `optimizer.pt`, which is read with `weights_only=True`), or no weights at all.

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
        key="model_name_or_path",
        value=str(path),
        fix=_CONVERT,
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
