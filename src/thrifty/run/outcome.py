"""What a run tells a person and what it leaves on record: before it begins, and when it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thrifty import tasks
from thrifty.config import RunConfig
from thrifty.hardware.detect import Hardware
from thrifty.report import text
from thrifty.report.metrics import peak_memory_bytes, read_metrics, rows_of
from thrifty.run.console import say, shorten
from thrifty.run.evaluation import metric_lines
from thrifty.run.generation import continue_text, prompt_of
from thrifty.run.utilisation import model_flops_share

RUN_FILE = "run.yaml"


def introduce(trainer: Any, loaded: tasks.Loaded) -> None:
    """Says what is about to be trained: model, data, one sample with its loss mask, and the recipe with its reasons."""
    model = trainer.model
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = "" if trained == total else f", {text.count(trained)} of them trained ({trained / total:.2%})"
    say("model", f"{type(model).__name__}, {text.count(total)} parameters{share}")
    say("data", [f"{len(loaded.data.train_dataset):,} training samples", *loaded.notes])
    sample = loaded.task.decoded_sample(loaded.data, loaded.processor)
    legend = ["(what stands between ⟦ and ⟧ is trained on)"] if any(trained for _, trained in sample.parts) else []
    say("sample", [*legend, shorten(str(sample), 700)])
    parts = trainer.recipe.describe()
    if not parts:
        say("recipe", "no methods: plain transformers.Trainer")
    for number, part in enumerate(parts, 1):
        settings = f" ({part['settings']})" if part["settings"] else ""
        say(
            "recipe" if number == 1 else "",
            [f"{number}. {part['name']}{settings}: {part['reason']}", f"   {part['source']}"],
        )


def passage_of(config: RunConfig, trainer: Any, loaded: tasks.Loaded) -> tuple[str, str] | None:
    """Prompt and generated passage, for a task that generates."""
    if config.task not in ("causal-lm", "seq2seq-lm") or config.max_new_tokens == 0:
        return None
    held = loaded.data.eval_dataset if loaded.data.eval_dataset is not None else loaded.data.train_dataset
    answers = config.task == "seq2seq-lm"
    prompt = (
        prompt_of(held[0], loaded.processor, whole=answers) if config.sample_prompt is None else config.sample_prompt
    )
    model = trainer.accelerator.unwrap_model(trainer.model)
    made = continue_text(model, loaded.processor, prompt, max_new_tokens=config.max_new_tokens, seed=config.data.seed)
    return prompt, made


def summary_of(
    config: RunConfig,
    trainer: Any,
    loaded: tasks.Loaded,
    hardware: Hardware,
    trained: dict[str, float],
    metrics: dict[str, float],
    passage: tuple[str, str] | None,
) -> dict[str, Any]:
    """What `summary.json` says: results, cost, and what was trained. See `thrifty.report.summary.write_summary`."""
    train_rows = rows_of(read_metrics(trainer.args.output_dir), "train")
    model = trainer.model
    speed = [row for row in train_rows if row.get("tokens_per_second") and row.get("step_seconds")]
    seconds = sum(row["step_seconds"] for row in speed)
    kept = {k: v for k, v in metrics.items() if k.startswith("eval_") and not k.endswith(("_runtime", "_per_second"))}
    data = config.data.train_file or config.data.dataset_name or config.embedded_corpus
    return {
        **kept,
        "perplexity": metrics.get("eval_perplexity"),
        "bits_per_byte": metrics.get("eval_bits_per_byte"),
        "train_loss": trained.get("train_loss"),
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "tokens": trainer.counter.total(),
        "tokens_per_second": sum(r["tokens_per_second"] * r["step_seconds"] for r in speed) / seconds
        if seconds
        else None,
        "mfu": model_flops_share(trainer, hardware, seconds / len(speed)) if speed else None,
        "wall_seconds": train_rows[-1]["wall_seconds"] if train_rows else trained.get("train_runtime"),
        "peak_memory_bytes": peak_memory_bytes(),
        "task": config.task,
        "model": config.model_name_or_path or type(trainer.accelerator.unwrap_model(model)).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "data": str(data),
        "base_model": config.model_name_or_path,
        "dataset": config.data.dataset_name,
        "methods": trainer.recipe.describe(),
        "prompt": passage[0] if passage else None,
        "sample_text": passage[1].removeprefix(passage[0]) if passage else None,
        "hardware": hardware.to_dict(),
    }


def conclude(folder: Path, config: RunConfig, metrics: dict[str, float], passage: tuple[str, str] | None) -> None:
    """Says what came out, and where everything is."""
    say("result", metric_lines(metrics) or "there is no validation data")
    if passage:
        say("passage", shorten(passage[1], 1200))
    say("model", f"{folder} (loads with transformers' from_pretrained)")
    say("report", str(folder / "report.html"))
    say("repeat", f"thrifty train {folder / RUN_FILE} output_dir=...")
