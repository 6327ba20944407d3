"""How long a search takes: an 8B model, at least 24 structural classes and 10,000 configurations, cold and cached.

    python benchmarks/search_speed.py        # writes benchmarks/results/search-speed.json

A structural class is what needs a dry run of its own: a way of recomputing, a precision, an adapter, a loss, offload.
The imports of torch and transformers are not counted. "Cold" starts with an empty cache folder, and nothing about the
model is shipped with the package; "cached" is the same search again with nothing but that folder. Memory is that of all
processes together, each page counted once. On a machine that others use too, wall time says more about them:
`cpu_seconds` over the number of processes is what the search would take alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CLASSES, CONFIGURATIONS, PROCESSES = 24, 10_000, 2
BOUNDS = {"cold_seconds": 60.0, "cached_seconds": 2.0, "memory_bytes": 2 * 10**9}
RUN: dict[str, Any] = {
    "model": "llama-3.1-8b", "task": "causal-lm", "seq_len": 4096, "dtype": "bfloat16", "device": "h100-80gb",
    "devices": 8, "global_batch": 8 * 1440, "allow": ["lora", "bf16", "adafactor"],
}  # fmt: skip


class Memory:
    """Watches the proportional set size of this process and its children."""

    def __init__(self) -> None:
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil

        me = psutil.Process()
        while not self._stop.wait(3.0):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue  # It has ended between the list and the look.
            self.peak = max(self.peak, total)


def search() -> dict[str, Any]:
    """One search, with what it took."""
    from thrifty.planner.plan import plan

    options = dict(RUN)
    begun, cpu, children = time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    found = plan(options.pop("model"), processes=PROCESSES, **options)
    seconds, own = time.perf_counter() - begun, time.process_time() - cpu
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = own + after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
    chosen = found.chosen
    assert found.search is not None
    compiled = [one for one in found.search.compiled if not isinstance(one, Exception)]
    return {
        "seconds": seconds, "cpu_seconds": used, "own_cpu_seconds": own, "configurations": found.configurations,
        "classes": len({one.key for one in compiled}), "variants": len(compiled), "rejected": found.rejected,
        "chosen": None if chosen is None else {"methods": chosen.methods, "micro_batch": chosen.micro_batch,
                                               "accumulation": chosen.accumulation, "sharding": chosen.sharding},
    }  # fmt: skip


def main() -> None:
    """Searches twice and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "search-speed.json")
    options = parser.parse_args()
    import peft  # noqa: F401  # imports are not part of the search
    import transformers.models.llama.modeling_llama  # noqa: F401

    from thrifty.bench.result import circumstances
    from thrifty.planner.store import forget_compiled

    with tempfile.TemporaryDirectory() as folder, Memory() as memory:
        os.environ["THRIFTY_CACHE"] = folder
        cold = search()
        forget_compiled()  # what a new process would not have
        cached = search()
    # The parent reads what its workers have written, alone.
    bound = cold["own_cpu_seconds"] + (cold["cpu_seconds"] - cold["own_cpu_seconds"]) / PROCESSES
    result = {
        **circumstances(1), "run": RUN, "processes": PROCESSES, "cold": cold, "cached": cached,
        "cold_seconds_alone": bound, "cached_seconds_alone": cached["cpu_seconds"],
        "peak_memory_bytes": memory.peak, "bounds": BOUNDS,
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(
        f"{cold['classes']} classes, {cold['configurations']:,} configurations, {memory.peak / 2**30:.2f} GiB: "
        f"cold {cold['seconds']:.1f} s ({cold['cpu_seconds']:.1f} s of processor, {bound:.1f} s alone on two cores), "
        f"cached {cached['seconds']:.2f} s ({cached['cpu_seconds']:.2f} s of processor)"
    )
    if cold["classes"] < CLASSES or cold["configurations"] < CONFIGURATIONS:
        raise SystemExit("error: the search was smaller than it should be")


if __name__ == "__main__":
    main()
