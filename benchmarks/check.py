"""The regression check: does every ratio that we promise still hold on this machine? Writes nothing into results/.

    python benchmarks/check.py                       # what `make bench` begins with: about ten minutes on two cores
    python benchmarks/check.py overhead start_up     # some of them

Each script runs shortened, in a process of its own, and its exit code says whether its ratios are within their bounds.
All of them run, whatever the others say; the exit code is 1 where one is out of bounds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUICK = ("--quick",)
OUT = ("--out", "{folder}/{name}.json")
"""For scripts that are short as they are: their file goes where nobody keeps it."""

CHECKS: dict[str, tuple[str, ...]] = {
    "guard_overhead": OUT,
    "overhead": QUICK,
    "start_up": OUT,
    "saving": QUICK,
    "utilisation": ("--rounds", "5", *OUT),
    "fine_tuning": QUICK,
    "time_to_loss": QUICK,
    "bench_can_tell": ("--repeats", "2", *OUT),
}


def check(name: str, arguments: Sequence[str]) -> tuple[int, float]:
    """Runs one script; its output is shown as it comes.

    Returns:
        Its exit code and how many seconds it took.
    """
    begun = time.monotonic()
    done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), *arguments], check=False)
    return done.returncode, time.monotonic() - begun


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks and says which hold; 0 where all of them do."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(CHECKS)}; all without")
    names = parser.parse_args(arguments).names or list(CHECKS)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        parser.error(f"no check is called {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    found = {}
    with tempfile.TemporaryDirectory(prefix="thrifty-check-") as folder:
        for name in names:
            print(f"--- {name}", flush=True)
            found[name] = check(name, [word.format(folder=folder, name=name) for word in CHECKS[name]])
    print("---")
    for name, (code, seconds) in found.items():
        print(f"{name:16} {'holds' if code == 0 else f'FAILS (exit code {code})':26} {seconds:6.0f} s")
    return int(any(code for code, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
