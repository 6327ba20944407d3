"""How long a checkpoint keeps training waiting: written in the foreground, and by a thread.

    python benchmarks/saving.py            # writes benchmarks/results/saving.json
    python benchmarks/saving.py --quick    # one round; the exit code says whether the thread keeps training less

The same small Llama is trained in turn with the foreground's checkpoints (`background_save: off`) and with the thread's
(`on`). Counted is how long the loop stands still: in the save itself, waiting for the one before, and at the end of
training for the last one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import thrifty
from thrifty.safety.options import Guards

WAYS: dict[str, Any] = {"foreground": "off", "background": "on"}
LIMIT = 0.75
"""What the loop may be blocked at most with the thread, as a share of the foreground's."""


class Timed(thrifty.Trainer):
    """Notes how long it is blocked by saves."""

    blocked = 0.0
    inside = False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.standing_still():
            super()._save_checkpoint(model, trial)

    def finish_saving(self) -> None:
        with self.standing_still():
            super().finish_saving()

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        outermost, self.inside, begin = not self.inside, True, time.perf_counter()
        try:
            yield
        finally:
            if outermost:
                self.inside = False
                self.blocked += time.perf_counter() - begin


def run(way: str, size: dict[str, int]) -> dict[str, float]:
    """One run: the seconds in which it stood still, and the size of a checkpoint."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=3 * size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    rows = torch.randint(0, size["vocab"], (size["steps"] * size["batch"], size["length"]))
    with tempfile.TemporaryDirectory(dir=os.environ.get("THRIFTY_BENCH_DIR")) as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=size["batch"],
            max_steps=size["steps"],
            save_strategy="steps",
            save_steps=size["every"],
            save_total_limit=1,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
            use_cpu=not torch.accelerator.is_available(),
        )
        guards = Guards(background_save=WAYS[way])
        data: Any = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Timed(model, args, train_dataset=data, guards=guards)
        trainer.say = lambda line: None
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        trainer.train()
        saved = next(Path(folder).glob("checkpoint-*"))
        size_of = sum(path.stat().st_size for path in saved.rglob("*"))
    return {"blocked": trainer.blocked, "bytes": size_of}


def measure(size: dict[str, int], rounds: int) -> dict[str, Any]:
    """All ways in turn."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            found[way].append(run(way, size))
    saves = -(-size["steps"] // size["every"])
    blocked = {way: statistics.median(one["blocked"] for one in runs) / saves for way, runs in found.items()}
    pairs = zip(found["background"], found["foreground"], strict=True)
    return {
        "rounds": rounds,
        "saves_a_run": saves,
        "checkpoint_bytes": int(found["foreground"][0]["bytes"]),
        "blocked_seconds": blocked,
        "blocked_share": statistics.median(a["blocked"] / b["blocked"] for a, b in pairs),
        "all": found,
    }


def main() -> int:
    """Measures, and writes the table unless `--quick`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=None, help="3")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "saving.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    size = {"hidden": args.hidden, "layers": 8, "vocab": 8192, "batch": 1, "length": 32, "steps": 24, "every": 8}
    found = measure(size, args.rounds or (1 if args.quick else 3))
    for way, seconds in found["blocked_seconds"].items():
        print(f"{way}: {seconds:.3f} s a checkpoint")
    print(f"background over foreground: x{found['blocked_share']:.2f}")
    good = found["blocked_share"] <= LIMIT
    if not args.quick:
        from thrifty.bench.result import circumstances

        what = "what a checkpoint keeps training waiting, written in the foreground and by a thread"
        result = {"what": what, **circumstances(args.threads), "size": size, "limit": LIMIT, **found, "good": good}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
