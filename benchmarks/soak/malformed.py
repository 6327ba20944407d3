"""Feeds malformed run files, overrides and data files to `thrifty train`, and looks at what comes back.

    python benchmarks/soak/malformed.py --out benchmarks/results/soak-malformed.json

Values come from hypothesis (two or more for every key of a run file: of a wrong type, and of the right type but
absurd) and from the lists in `malformed_data.py`. Each runs in a forked child, through the program's own entry point,
with limits on memory and time. A malformed input must give exit code 2, one line that begins with `error:`, no
traceback, and must leave the folder as it was. An absurd value may also turn out to be harmless, and the run go well.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import table  # sets the environment
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from malformed_data import FILES, OVERRIDES, RECORDS, Case, base_values, config_case, override_case, record_case

SECONDS, BYTES = 120, 6 << 30
WRONG = 20
"""The exit code of a child that broke its limit of time, beside those of the program."""
SKIPPED_KEYS = {"output_dir", "overwrite"}  # they decide where the case itself is written

_ANY: st.SearchStrategy[Any] = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(max_size=12),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
    st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2), max_size=2),
)


def key_cases(each: int, every: int = 1) -> Iterator[Case]:
    """`each` values of a wrong type for every key (or every n-th), and as many of the right type but absurd."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    from thrifty.config.schema import LIMITS, all_keys

    def checker(key: Any) -> Callable[[Any], bool]:
        adapter = TypeAdapter(key.annotation, config=ConfigDict(strict=True))

        def fits(value: Any) -> bool:
            try:
                adapter.validate_python(value)
            except ValidationError:
                return False
            return True

        return fits

    for key in list(all_keys().values())[::every]:
        if key.name in SKIPPED_KEYS:
            continue
        fits = checker(key)
        wrong = drawn(_ANY.filter(lambda value, fits=fits: value is not None and not fits(value)), each)
        for number, value in enumerate(wrong):
            yield config_case(f"{key.name}: wrong type {number}", {key.name: value})
        absurd = st.one_of(
            st.integers(max_value=-2),
            st.floats(max_value=-1e-6),
            st.just(float("nan")),
            st.text(alphabet="~#/?*\x00é", min_size=1, max_size=8),
            st.dictionaries(st.sampled_from(["no-such-key", ""]), st.integers(), min_size=1, max_size=2),
            st.lists(st.sampled_from(["no-such-name", ""]), min_size=1, max_size=2),
        ).filter(fits)
        try:
            values = drawn(absurd, each)
        except Exception:  # hypothesis: nothing of these shapes fits the key (a boolean, a choice)
            continue
        for number, value in enumerate(values):
            sure = key.name in LIMITS and isinstance(value, int | float)
            yield config_case(f"{key.name}: absurd {number}", {key.name: value}, may_pass=not sure)


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """The same `count` different examples every time."""
    found: dict[str, Any] = {}

    @settings(
        max_examples=count * 20,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        if len(found) < count:
            found.setdefault(repr(value), value)

    collect()
    return list(found.values())


def all_cases(each: int = 2, every: int = 1) -> list[Case]:
    """Every case, in order; or every n-th, and cases of every n-th key."""
    by_hand = [record_case(*row) for row in RECORDS] + list(FILES) + [override_case(*row) for row in OVERRIDES]
    return [*by_hand[::every], *key_cases(each, every)]


def tree(folder: Path) -> dict[str, str]:
    """Every path below `folder` with a hash of its content."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else ""
        for path in sorted(folder.rglob("*"))
    }


def run_in_child(argv: list[str], folder: Path, log: Path) -> int:
    """Runs the program on `argv` in a forked child; returns its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(folder)
            os.environ["TMPDIR"] = str(log)
            tempfile.tempdir = str(log)
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(log / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
            from thrifty.cli import main as program

            code = program(argv)
            sys.stderr.flush()
        finally:
            os._exit(code)
    end = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return WRONG
        time.sleep(0.002)


def judge(case: Case, root: Path) -> dict[str, Any]:
    """Runs one case and says what was wrong with the answer; nothing where it was right."""
    folder, log = root / "work", root / "log"
    for made in (folder, log):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
    argv = case.prepare(folder, base_values(folder))
    before = tree(folder)
    code = run_in_child(argv, folder, log)
    told = (log / "err").read_text(errors="replace")
    problems = []
    if code == 0 and case.may_pass:
        return {"case": case.name, "code": code, "said": "", "problems": []}
    if code != 2:
        problems.append(f"exit code {code}")
    if not told.startswith("error: ") or told.count("\n") != 1:
        problems.append("not one message")
    if "Traceback" in told or any(log.glob("*.log")):
        problems.append("traceback")
    if tree(folder) != before:
        problems.append("left something behind")
    return {"case": case.name, "code": code, "said": told.replace(f"{folder}/", "")[:400], "problems": problems}


def main(arguments: list[str] | None = None, only: Callable[[int, Case], bool] = lambda number, case: True) -> int:
    """Runs the soak and writes its table."""
    parser = table.parser(__doc__)
    parser.add_argument("--each", type=int, default=2, help="values of each sort for every key")
    args = parser.parse_args(arguments)
    warm_up()
    rows = []
    with tempfile.TemporaryDirectory() as root:
        os.environ["THRIFTY_CACHE"] = str(Path(root) / "cache")
        for number, case in enumerate(all_cases(args.each)):
            if not only(number, case):
                continue
            row = judge(case, Path(root))
            rows.append(row)
            if row["problems"]:
                print(row, flush=True)
    refused = [row for row in rows if row["code"] == 2 and not row["problems"]]
    total = {
        "inputs": len(rows),
        "refused_with_one_message": len(refused),
        "harmless": sum(row["code"] == 0 and not row["problems"] for row in rows),
        "wrong": sum(bool(row["problems"]) for row in rows),
    }
    table.write(args.out, "malformed run files, overrides and data files", rows, total)
    return 0 if total["wrong"] == 0 else 1


def warm_up() -> None:
    """Imports what the children need, so that a fork costs milliseconds."""
    import datasets  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()  # as the program does before it imports transformers
    import peft  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import transformers.trainer

    import thrifty.run.training  # noqa: F401
    from thrifty.config import load_config

    load_config()


if __name__ == "__main__":
    sys.exit(main())
