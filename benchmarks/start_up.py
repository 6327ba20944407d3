"""How long `thrifty train` takes to its first step, beside what importing torch and transformers' Trainer takes anyway.

    python benchmarks/start_up.py            # writes benchmarks/results/start-up.json
    python benchmarks/start_up.py --quick    # one round; the exit code says whether the bound holds

Fresh processes, in turn: `import torch; from transformers import Trainer`, the embedded default until its first step is
in `metrics.jsonl`, and `import thrifty`. One run before them warms the caches of the data and of the byte code. Beside
the wall clock's, each process's own processor time is given: on a busy machine that is what can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

LIMIT_SECONDS = 3.0
IMPORT_LIMIT_SECONDS = 0.3
LIBRARIES = "import torch; from transformers import Trainer"
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
TRAIN = ("-m", "thrifty.cli", "train", "logging_first_step=true", "max_new_tokens=0", "num_threads=1")
Cost = tuple[float, float]


def to_the_end(code: str) -> Cost:
    """Seconds and processor seconds of `python -c code`."""
    # What the interpreter itself takes to start and to end is not counted.
    script = f"import time; a = time.perf_counter(), time.process_time(); {code}; "
    script += "print(time.perf_counter() - a[0], time.process_time() - a[1])"
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, text=True
    )
    wall, processor = map(float, done.stdout.split()[-2:])
    return wall, processor


def to_the_first_step(folder: Path) -> Cost:
    """Seconds and processor seconds from the start of `thrifty train` until its first step is on record."""
    log = folder / "metrics.jsonl"
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *TRAIN, f"output_dir={folder}"],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        watched = psutil.Process(process.pid)
        while not (log.exists() and '"kind": "train"' in log.read_text().replace('":"', '": "')):
            if process.poll() is not None:
                raise SystemExit(f"the run ended before its first step:\n{process.stderr and process.stderr.read()}")
            time.sleep(0.005)
        wall, times = time.perf_counter() - begin, watched.cpu_times()
        process.kill()
    return wall, times.user + times.system


def measure(rounds: int) -> dict[str, Any]:
    """The table."""
    found: dict[str, list[Cost]] = {"libraries": [], "first_step": [], "import_thrifty": []}
    with tempfile.TemporaryDirectory() as root:
        to_the_first_step(Path(root) / "warm-up")
        for number in range(rounds):
            found["libraries"].append(to_the_end(LIBRARIES))
            found["first_step"].append(to_the_first_step(Path(root) / str(number)))
            found["import_thrifty"].append(to_the_end("import thrifty"))
    result: dict[str, Any] = {"rounds": rounds, "all": found}
    for place, clock in enumerate(("wall", "processor")):
        medians = {name: statistics.median(cost[place] for cost in costs) for name, costs in found.items()}
        beyond = [a[place] - b[place] for a, b in zip(found["first_step"], found["libraries"], strict=True)]
        result[clock] = {**medians, "beyond_the_libraries": statistics.median(beyond)}
    return result


def main() -> int:
    """Measures, and writes the table unless `--quick`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=None, help="5")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "start-up.json")
    args = parser.parse_args()
    found = measure(args.rounds or (1 if args.quick else 5))
    for clock in ("wall", "processor"):
        row = found[clock]
        print(
            f"{clock}: libraries {row['libraries']:.2f} s, first step {row['first_step']:.2f} s "
            f"({row['beyond_the_libraries']:+.2f}), import thrifty {row['import_thrifty']:.3f} s"
        )
    processor = found["processor"]
    good = processor["beyond_the_libraries"] <= LIMIT_SECONDS and processor["import_thrifty"] <= IMPORT_LIMIT_SECONDS
    if not args.quick:
        from thrifty.bench.result import circumstances

        result = {
            "what": "from the start of `thrifty train` on the embedded default to its first step, caches warm",
            **circumstances(1),
            "limit_seconds": LIMIT_SECONDS,
            "import_limit_seconds": IMPORT_LIMIT_SECONDS,
            **found,
            "good": good,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
