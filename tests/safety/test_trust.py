from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from thrifty.errors import InputError
from thrifty.safety.trust import assert_no_pickle, extract, inside


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    for target in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(InputError, match=r"pytorch_model.bin.*never loaded.*Fix: convert once.*save_file"):
            assert_no_pickle(target)


def test_safetensors_and_checkpoints_pass(tmp_path: Path) -> None:
    assert_no_pickle(tmp_path)
    torch.save({}, tmp_path / "optimizer.pt")
    assert_no_pickle(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert_no_pickle(tmp_path)
    assert_no_pickle(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd"])
def test_paths_that_leave_their_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="leaves its folder"):
        inside(tmp_path, name)


def test_links_that_leave_and_paths_that_stay(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    os.symlink(tmp_path, root / "out")
    with pytest.raises(InputError, match="leaves its folder"):
        inside(root, "out/secret")
    assert inside(root, "a/../b") == (root / "b").resolve()
    assert inside(root, ".") == root.resolve()


def make_tar(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize(
    "bad",
    [member("../evil"), member("/evil"), member("link", tarfile.SYMTYPE, "/etc"), member("pipe", tarfile.FIFOTYPE)],
)
def test_bad_tar_archives_write_nothing(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    archive, target = make_tar(tmp_path / "a.tar", member("good"), bad), tmp_path / "target"
    target.mkdir()
    with pytest.raises(InputError):
        extract(archive, target)
    assert list(target.iterdir()) == []
    assert not (tmp_path / "evil").exists()


def test_bad_zip_and_good_archives(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("good", "x")
        archive.writestr("../evil", "x")
    with pytest.raises(InputError, match="leaves its folder"):
        extract(tmp_path / "bad.zip", target)
    assert list(target.iterdir()) == []
    with zipfile.ZipFile(tmp_path / "good.zip", "w") as archive:
        archive.writestr("sub/file", "hello")
    extract(tmp_path / "good.zip", target)
    extract(make_tar(tmp_path / "good.tar", member("other")), target)
    assert (target / "sub/file").read_text() == "hello"
    assert (target / "other").read_bytes() == b"x"
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(InputError, match="not a zip or tar"):
        extract(tmp_path / "text", target)
