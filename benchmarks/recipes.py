"""Every recipe at a small size on this machine: what its methods buy over the same run without them.

    python benchmarks/recipes.py            # writes benchmarks/results/recipes.json

The model is small and the data is of the recipe's kind: the embedded text, instructions of unequal lengths, the digits.
Both rows share model, data, batch size and steps. `plain` has neither the recipe's methods nor its precision: what
transformers' defaults do. They take turns for the speed, and each is run once more, alone, for its peak memory: packed
rows are full where padded ones are as long as their longest sample, so that packing shows there as more. What a recipe
promises at its own size (a 7B model on 24 GB) is what `thrifty plan` says of it, not this table. The row of
pretrain-small that counts is that of `time_to_loss.py`; those of sft-full and bert-classification are those of
`fine_tuning.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from thrifty import recipes
from thrifty.bench.measure import MEMORY_STEPS, WARM_UP_STEPS, Job
from thrifty.bench.processes import FreshProcesses
from thrifty.bench.result import circumstances
from thrifty.config import parse_config, yaml_text

HERE = Path(__file__).parent
WIDE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = {
    "llama": {"model_type": "llama", "intermediate_size": 344, "num_key_value_heads": 4, "vocab_size": 2048, **WIDE,
              "max_position_embeddings": 1024},
    "bert": {"model_type": "bert", "intermediate_size": 512, "vocab_size": 2048, **WIDE,
             "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}  # fmt: skip
IMAGES = {"image_size": 8, "patch_size": 2, "num_channels": 1, "intermediate_size": 512, **WIDE}
DECODER = {"decoder_hidden_size": 64, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4,
           "decoder_intermediate_size": 256}  # fmt: skip
# What makes any recipe small, the same for both rows.
SMALL: dict[str, Any] = {
    "max_length": 128, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "warmup_steps": 1,
    "save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False,
}  # fmt: skip
LONG = {"max_length": 1024, "per_device_train_batch_size": 1}
KEPT = ("task", "optim", "adam_beta2", "weight_decay", "max_grad_norm", "mlm_probability", "long_samples",
        "learning_rate", "attention")  # fmt: skip


def bases(folder: Path) -> dict[str, str]:
    """A Llama and a BERT with their tokenizers, to fine-tune."""
    from thrifty.run import train

    made = {}
    for kind, config in TEXT.items():
        task = "causal-lm" if kind == "llama" else "masked-lm"
        output = folder / kind
        values = {"task": task, "model_config": config, "embedded_corpus": "kjv", "vocab_size": 2048, "max_steps": 1,
                  "max_new_tokens": 0, **SMALL, "output_dir": str(output)}  # fmt: skip
        train(parse_config(values, name=kind))
        made[kind] = str(output)
    return made


def run_of(name: str, folder: Path, base: dict[str, str]) -> tuple[dict[str, Any], list[Any]]:
    """The recipe at its small size, without methods; and its methods."""
    recipe = dict(yaml_text.parse(recipes.read(name)))
    run = {key: recipe[key] for key in KEPT if key in recipe} | SMALL
    task = recipe["task"]
    if task in ("image-classification", "masked-image-modeling"):
        kind = {"model_type": "vit_mae", "norm_pix_loss": True, **DECODER} if "masked" in task else {
            "model_type": "vit"}  # fmt: skip
        run |= {"model_config": {**kind, **IMAGES}, "train_file": str(folder / "digits"), "validation_fraction": 0.1}
        run["per_device_train_batch_size"] = 32
    elif task == "text-classification":
        run |= {
            "model_name_or_path": base["bert"],
            "train_file": str(folder / "verses.jsonl"),
            "long_samples": "truncate",
        }
    elif recipe.get("train_file", "").endswith("instructions.jsonl"):
        run |= {"model_name_or_path": base["llama"], "train_file": str(folder / "instructions.jsonl"),
                "long_samples": "truncate", "max_length": 512}  # fmt: skip
    else:
        run |= {"model_name_or_path": base["llama" if task == "causal-lm" else "bert"], "embedded_corpus": "kjv"}
    if name == "long-context":
        run |= LONG
    methods = [{"budget": {"tokens": 10**8}} if isinstance(m, dict) and "budget" in m else m
               for m in recipe.get("methods", [])]  # fmt: skip
    if recipe.get("precision") == "auto":
        run["precision"] = "auto"
    return run, methods


def verses() -> list[dict[str, Any]]:
    """Verses of the Old and the New Testament, to tell apart; their lengths differ as they do."""
    from thrifty.data.corpus import kjv_books

    books = list(kjv_books().items())
    return [
        {"text": verse, "label": "new" if number >= 39 else "old"}
        for number, (_, chapters) in enumerate(books)
        for chapter in chapters[:4]
        for verse in chapter.splitlines()
    ]


def measured(name: str, folder: Path, base: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Both rows of one recipe."""
    run, methods = run_of(name, folder, base)
    plain = {key: value for key, value in run.items() if key not in ("precision", "attention")}
    processes = FreshProcesses()
    arms = {"plain": (plain, ()), "recipe": (run, tuple(methods))}
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(options.rounds):
        order = list(arms) if number % 2 == 0 else list(arms)[::-1]
        jobs = [
            Job(kind="speed", arm=arm, run=arms[arm][0], methods=arms[arm][1], seed=number,
                steps=WARM_UP_STEPS + options.steps, threads=options.threads)
            for arm in order
        ]  # fmt: skip
        for arm, found in zip(order, processes.run_together(jobs, options.steps), strict=True):
            if found.reason is not None:
                return {"reason": f"{arm}: {found.reason}", "methods": methods}
            assert found.tokens_per_second is not None
            rates[arm].append(found.tokens_per_second)
    peaks = {}
    for arm, (content, chosen) in arms.items():
        job = Job(kind="memory", arm=arm, run=content, methods=chosen, steps=MEMORY_STEPS, threads=options.threads)
        peaks[arm] = processes.run(job).peak_bytes
    ratios = [b / a for a, b in zip(rates["plain"], rates["recipe"], strict=True)]
    return {
        "reason": None, "task": run["task"], "methods": methods, "precision": run.get("precision"),
        "tokens_per_second": {arm: statistics.median(found) for arm, found in rates.items()},
        "speed": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
        "peak_bytes": peaks,
    }  # fmt: skip


def main() -> int:
    """Measures all recipes and writes the result."""
    sys.path.insert(0, str(HERE / "runs"))
    import prepare

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=recipes.names(), default=recipes.names())
    parser.add_argument("--out", type=Path, default=HERE / "results" / "recipes.json")
    options = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory(prefix="thrifty-recipes-") as name:
        folder = Path(name)
        prepare.instructions(folder)
        prepare.digits(folder)
        prepare.write_lines(folder / "verses.jsonl", verses())
        base = bases(folder)
        for recipe in options.only:
            rows[recipe] = row = measured(recipe, folder, base, options)
            said = row["reason"] or f"x{row['speed']['median']:.2f} tokens/s, peak {row['peak_bytes']}"
            print(f"{recipe}: {said}", flush=True)
    result = {"format": "thrifty-recipes/1", "label": "measured", "name": "recipes", **circumstances(options.threads),
              "rounds": options.rounds, "steps": options.steps, "rows": rows}  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
