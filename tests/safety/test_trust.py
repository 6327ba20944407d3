from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from thrifty.cli import main
from thrifty.errors import InputError
from thrifty.safety.trust import assert_no_pickle, check_model_folder, extract, inside


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


def test_an_index_must_stay_in_its_folder(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    save_file({"w": torch.ones(2)}, tmp_path / "model-00001.safetensors")
    index.write_text(json.dumps({"weight_map": {"w": "model-00001.safetensors"}}))
    check_model_folder(str(tmp_path))
    check_model_folder("some/hub-id")
    for outside in ("../other/model.safetensors", "/etc/model.safetensors"):
        index.write_text(json.dumps({"weight_map": {"w": outside}}))
        with pytest.raises(InputError, match="names a file outside the folder"):
            check_model_folder(str(tmp_path))
    index.write_text("[]")
    with pytest.raises(InputError, match="is no index"):
        check_model_folder(str(tmp_path))


class Bomb:
    """What a hostile pickle does: it writes a file as it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a checkpoint."""
    folder = tmp_path_factory.mktemp("trust")
    text = folder / "text.txt"
    text.write_text("\n\n".join("the quick brown fox jumps over the lazy dog" for _ in range(60)))
    sizes = ["hidden_size=16", "intermediate_size=32", "num_hidden_layers=1", "num_attention_heads=2"]
    keys = ["model_type=llama", *sizes, "max_position_embeddings=64"]
    words = [f"train_file={text}", "embedded_corpus=null", "max_length=16", "vocab_size=280", "max_steps=2"]
    more = ["save_steps=1", "use_cpu=true", "max_new_tokens=0", f"output_dir={folder / 'run'}", "warmup_steps=0"]
    code = main(["train", *words, *more, "model_config=null", *[f"model_config.{key}" for key in keys]])
    assert code == 0
    return folder / "run"


def spoil(folder: Path, mark: Path) -> None:
    for name in ("model", "adapter_model"):
        if (folder / f"{name}.safetensors").exists():
            (folder / f"{name}.safetensors").unlink()
            torch.save(Bomb(mark), folder / ("pytorch_model.bin" if name == "model" else f"{name}.bin"))


@pytest.mark.parametrize("verb", ["train", "evaluate", "generate"])
def test_every_verb_refuses_a_pickled_model(good_run, tmp_path, verb, capfd) -> None:
    folder, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(good_run, folder)
    spoil(folder, mark)
    text = good_run.parent / "text.txt"
    words = {
        "train": [
            f"model_name_or_path={folder}",
            f"train_file={text}",
            f"output_dir={tmp_path / 'out'}",
            "max_length=16",
        ],
        "evaluate": [str(folder), f"validation_file={text}"],
        "generate": [str(folder), "--prompt", "the"],
    }
    capfd.readouterr()
    assert main([verb, *words[verb]]) == 2
    told = capfd.readouterr().err
    assert "pytorch_model.bin" in told
    assert "never loaded" in told
    assert "save_file" in told
    assert told.count("\n") == 1
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


def test_a_pickled_adapter_is_refused(good_run, tmp_path, capfd) -> None:
    folder, mark = tmp_path / "adapter", tmp_path / "mark"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(good_run), "peft_type": "LORA", "task_type": "CAUSAL_LM"})
    )
    torch.save(Bomb(mark), folder / "adapter_model.bin")
    assert main(["generate", str(folder), "--prompt", "the"]) == 2
    assert "adapter_model.bin" in capfd.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize("member", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_with_a_hostile_member_is_not_resumed(good_run, tmp_path, member, capfd) -> None:
    """Without thrifty's manifest, as a stranger would make it, so that no hash gives it away."""
    run, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(good_run, run)
    checkpoint = run / "checkpoint-1"
    shutil.rmtree(run / "checkpoint-2")
    (checkpoint / "thrifty_manifest.json").unlink()
    if member == "model.safetensors":
        spoil(checkpoint, mark)
    else:
        torch.save(Bomb(mark), checkpoint / member)
    code = main(["train", str(run / "run.yaml"), f"output_dir={run}", f"resume={checkpoint}"])
    told = capfd.readouterr().err
    assert code == 2, told
    assert "checkpoint-1" in told
    assert ("pytorch_model.bin" if member == "model.safetensors" else member) in told
    assert not mark.exists()
