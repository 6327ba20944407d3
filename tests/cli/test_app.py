"""The program itself: how fast it answers, what it imports, and what an exit code means."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import thrifty
from thrifty.cli import app, main

HEAVY = ("torch", "transformers", "pydantic", "numpy", "yaml", "rich", "datasets", "matplotlib")
COMMAND = [sys.executable, "-m", "thrifty.cli"]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom thrifty.cli import main\nassert main(['--help']) == 0\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    for verb in app.VERBS:
        assert verb in done.stdout


def test_help_of_a_verb_imports_no_torch() -> None:
    code = "import sys; from thrifty.cli import main; main(['train', '--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "KEY=VALUE" in done.stdout


def test_help_answers_at_once() -> None:
    """In less than half of the time that importing torch alone would take."""

    def seconds(command: list[str]) -> float:
        # Processor time: other work on the machine must not fail this test.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    pairs = [(seconds([*COMMAND, "--help"]), seconds([sys.executable, "-c", "import torch"])) for _ in range(3)]
    assert min(ours / torch for ours, torch in pairs) < 0.5, pairs


def test_without_arguments_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: thrifty" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"thrifty {thrifty.__version__}\n"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["trian"], ["trian", "train"]),
        (["train", "--learning_rate=1e-4"], ["--learning_rate", "learning_rate=value"]),
        (["evaluate"], ["thrifty evaluate --help"]),
        (["generate", "somewhere", "--temperature", "hot"], ["--temperature"]),
        (["train", "a.yaml", "b.yaml"], ["a.yaml", "b.yaml"]),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_a_fault_of_ours_exits_with_1_and_keeps_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("of our own making")

    monkeypatch.setattr("thrifty.cli.env.env", broken)
    assert main(["env"]) == 1
    message, where = capsys.readouterr().err.splitlines()
    assert message == "error: ZeroDivisionError: of our own making"
    log = Path(where.removeprefix("The traceback is in ").split(";")[0])
    assert "Traceback" in log.read_text()
    log.unlink()
    assert main(["env", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_exits_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("thrifty.cli.env.env", interrupted)
    assert main(["env"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_fault(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m thrifty.cli config-schema | head -c 10",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("{")
    assert "Traceback" not in done.stderr


def test_methods_lists_what_is_registered(capsys: pytest.CaptureFixture[str]) -> None:
    from thrifty.method import registry

    assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == registry.names()
    fields = {
        "name",
        "section",
        "title",
        "sources",
        "exact",
        "resumable",
        "requires",
        "conflicts_with",
        "library",
        "extra",
    }
    assert all(fields <= set(entry) for entry in listed)
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    for entry in listed:
        assert f"{entry['name']} " in text
        assert entry["title"] in text


def test_one_method_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "lawa"]) == 0
    text = capsys.readouterr().out
    for part in ("Does not help:", "window (a whole number; default 10)", "arXiv:2209.14981", "saves as: plain"):
        assert part in text
    assert main(["methods", "lawwa"]) == 2
    assert "did you mean 'lawa'" in capsys.readouterr().err


def test_env_names_versions_and_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["thrifty"] == thrifty.__version__
    assert facts["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["hardware"]["memory_bytes"] > 0
    assert 1 <= facts["hardware"]["cores"] <= (os.cpu_count() or 1)
    assert main(["env"]) == 0
    assert "transformers" in capsys.readouterr().out


def test_config_schema_prints_json_and_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    from thrifty.config import parse_config, yaml_text

    assert main(["config-schema"]) == 0
    assert "learning_rate" in json.loads(capsys.readouterr().out)["properties"]
    assert main(["config-schema", "--default"]) == 0
    assert parse_config(yaml_text.parse(capsys.readouterr().out)).embedded_corpus == "kjv"
