"""How long a search takes: an 8B model, at least 24 structural classes, 10,000 configurations, cold and from the cache.

    python benchmarks/search_speed.py        # writes benchmarks/results/search-speed.json

The imports of torch and transformers are not counted. "Cold" starts with an empty cache folder; nothing about the model
is shipped with the package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CLASSES, CONFIGURATIONS = 24, 10_000


def search(allow: list[str], global_batch: int, devices: int) -> dict[str, Any]:
    """One search, with what it took."""
    from thrifty.planner.plan import plan

    begun, cpu = time.perf_counter(), time.process_time()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = plan(
        "llama-3.1-8b", task="causal-lm", seq_len=4096, dtype="bfloat16", device="h100-80gb", devices=devices,
        global_batch=global_batch, allow=allow,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = time.process_time() - cpu + after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
    return {
        "seconds": time.perf_counter() - begun, "cpu_seconds": used, "configurations": found.configurations,
        "chosen": None if found.chosen is None else {"methods": found.chosen.methods,
                                                     "micro_batch": found.chosen.micro_batch,
                                                     "sharding": found.chosen.sharding},
        "rejected": found.rejected,
    }  # fmt: skip


def main() -> None:
    """Searches twice and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "search-speed.json")
    options = parser.parse_args()
    import transformers.models.llama.modeling_llama  # noqa: F401  # imports are not part of the search

    import thrifty.planner.structure as structure_module

    with tempfile.TemporaryDirectory() as folder:
        os.environ["THRIFTY_CACHE"] = folder
        allow, batch, devices = ["lora", "bf16", "adafactor"], 8 * 3_603_600, 8
        cold = search(allow, batch, devices)
        classes = len(list((Path(folder) / "planner").glob("*.step.npz")))
        structure_module._PASSES.clear()  # what a new process would not have
        warm = search(allow, batch, devices)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
    result = {
        "date": datetime.now(UTC).date().isoformat(), "machine": platform.platform(), "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "model": "llama-3.1-8b", "traced_classes": classes, "cold": cold, "warm": warm, "peak_rss_bytes": peak,
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(
        f"{classes} classes, {cold['configurations']:,} configurations: cold {cold['seconds']:.1f} s "
        f"({cold['cpu_seconds']:.1f} s of processor), from the cache {warm['seconds']:.2f} s, {peak / 2**30:.2f} GiB"
    )
    if classes < CLASSES or cold["configurations"] < CONFIGURATIONS:
        raise SystemExit("error: the search was smaller than it should be")


if __name__ == "__main__":
    main()
