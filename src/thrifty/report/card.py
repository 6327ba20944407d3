"""`README.md` of a run folder: a model card in the form that the Hugging Face hub reads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from thrifty.config import yaml_text
from thrifty.report import text
from thrifty.report.describe import environment_entries, loading_code, recipe_parts
from thrifty.report.files import write_atomic
from thrifty.report.links import pieces
from thrifty.report.plots import LOSS_FILE
from thrifty.report.summary import read_summary

CARD_FILE = "README.md"

_MARK = "<!-- written by thrifty; remove this line to keep your own text when the run is repeated -->"
_PLACEHOLDER = "[More Information Needed]"  # peft leaves a card of such lines beside an adapter
_PIPELINES = {
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "text-classification": "text-classification",
    "image-classification": "image-classification",
    "seq2seq-lm": "text2text-generation",
    "masked-image-modeling": "image-feature-extraction",
    "image-text": "zero-shot-image-classification",
}
_HYPERPARAMETERS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "optim",
    "optimizer",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "max_grad_norm",
    "precision",
    "bf16",
    "fp16",
    "seed",
)
_RESULTS = {
    "eval_loss": ("validation loss", text.measured),
    "perplexity": ("perplexity", text.measured),
    "bits_per_byte": ("bits per byte", text.measured),
    "train_loss": ("train loss", text.measured),
    "tokens": ("tokens trained on, without padding", text.measured),
    "tokens_per_second": ("tokens per second", text.measured),
    "mfu": ("share of the device's peak rate (MFU)", lambda value: f"{value:.1%}"),
    "peak_memory_bytes": ("peak memory", text.size),
    "steps": ("steps", text.measured),
    "wall_seconds": ("wall time", text.duration),
}
_HUB_ID = re.compile(r"[\w\-]+(?:\.[\w\-]+)*(?:/[\w\-]+(?:\.[\w\-]+)*)?")


def write_card(run_dir: str | os.PathLike[str]) -> Path:
    """Writes the model card from `summary.json` and `run.yaml`.

    A card that somebody has taken over is left alone: one without the comment line that marks it as generated, unless
    it is the blank form that peft writes beside an adapter.

    Args:
        run_dir: The run folder.

    Returns:
        The path of the card.

    Raises:
        InputError: `summary.json` is missing, or a file is damaged.
    """
    run_dir = Path(run_dir)
    path = run_dir / CARD_FILE
    if path.exists():
        present = path.read_text(encoding="utf-8")
        if _MARK not in present and _PLACEHOLDER not in present:
            return path
    return write_atomic(path, render_card(run_dir))


def render_card(run_dir: str | os.PathLike[str]) -> str:
    """Returns the text that `write_card` writes."""
    run_dir = Path(run_dir)
    summary = read_summary(run_dir)
    config = yaml_text.read_mapping(run_dir / "run.yaml") if (run_dir / "run.yaml").exists() else {}
    name = run_dir.resolve().name
    sections = [
        f"---\n{yaml_text.dump(_front_matter(summary, config))}---\n\n{_MARK}",
        f"# {_escape(name)}\n\n{_introduction(summary, config)}",
        _section("Results", _results(summary), f"![loss over steps]({LOSS_FILE})" if _has_plot(run_dir) else ""),
        _section("How to load it", f"```python\n{loading_code(summary, name)}\n```"),
        _section("Methods", _methods(summary)),
        _section("Hyper-parameters", _hyperparameters(config)),
        _section("Sample", _sample(summary)),
        _section("Environment", _environment(summary)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(summary: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    base = summary.get("base_model") or _hub_id(config.get("model_name_or_path"))
    dataset = summary.get("dataset") or _hub_id(config.get("dataset_name"))
    task = str(summary.get("task") or config.get("task") or "")
    front: dict[str, Any] = {"library_name": "peft" if summary.get("saves_as") == "peft" else "transformers"}
    if task in _PIPELINES:
        front["pipeline_tag"] = _PIPELINES[task]
    if base:
        front["base_model"] = base
    if dataset:
        front["datasets"] = [dataset]
    front["tags"] = ["thrifty", *([task] if task else []), *(part.name for part in recipe_parts(summary))]
    return front


def _introduction(summary: dict[str, Any], config: dict[str, Any]) -> str:
    base = summary.get("base_model") or config.get("model_name_or_path")
    what = _escape(str(summary.get("model") or base or "A Transformer"))
    parameters = f" with {text.count(summary['parameters'])} parameters" if summary.get("parameters") else ""
    how = f"fine-tuned from {_escape(str(base))}" if base else "trained from scratch"
    data = f" on {_escape(str(summary['data']))}" if summary.get("data") else ""
    return f"{what}{parameters}, {how}{data} with thrifty and the Hugging Face Trainer."


def _results(summary: dict[str, Any]) -> str:
    known = {key: entry for key, entry in _RESULTS.items() if isinstance(summary.get(key), int | float)}
    rows = [(label, show(summary[key])) for key, (label, show) in known.items()]
    more = [key for key in summary if key.startswith("eval_") and key not in _RESULTS]
    rows[1:1] = [(key.removeprefix("eval_").replace("_", " "), text.measured(summary[key])) for key in more]
    return _table(("what", "value"), rows)


def _methods(summary: dict[str, Any]) -> str:
    lines = []
    for index, part in enumerate(recipe_parts(summary), 1):
        settings = f" ({_code(part.settings)})" if part.settings else ""
        line = f"{index}. **{_escape(part.title)}**{settings}"
        if part.reason:
            line += f": {_escape(part.reason)}"
        if part.source:
            line += f"\n   Source: {''.join(_link(label, address) for label, address in pieces(part.source))}"
        lines.append(line)
    return "\n".join(lines)


def _hyperparameters(config: dict[str, Any]) -> str:
    rows = [(_code(key), _code(config[key])) for key in _HYPERPARAMETERS if config.get(key) is not None]
    table = _table(("key", "value"), rows)
    return f"{table}\n\nAll settings are in `run.yaml`; `thrifty train run.yaml` repeats the run." if config else table


def _sample(summary: dict[str, Any]) -> str:
    prompt, sample = str(summary.get("prompt") or ""), str(summary.get("sample_text") or "")
    if not sample:
        return ""
    fence = "`" * max(3, _longest_fence(prompt + sample) + 1)
    return f"{fence}text\n{prompt}{sample}\n{fence}"


def _environment(summary: dict[str, Any]) -> str:
    rows = environment_entries(summary)
    if summary.get("date"):
        rows.append(("date", str(summary["date"])))
    return _table(("what", "value"), [(_escape(str(key)), _escape(str(value))) for key, value in rows])


def _section(title: str, *content: str) -> str:
    body = "\n\n".join(part for part in content if part)
    return f"## {title}\n\n{body}" if body else ""


def _table(header: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {header[0]} | {header[1]} |", "|---|---|"]
    return "\n".join(lines + [f"| {key} | {value} |" for key, value in rows])


def _link(label: str, address: str | None) -> str:
    return _escape(label) if address is None else f"[{_escape(label)}]({address})"


def _escape(content: str) -> str:
    """Takes the meaning from Markdown's and HTML's signs, and joins lines."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", re.sub(r"\s+", " ", content))


def _code(value: object) -> str:
    """Puts a value into a code span of one line; a bar would end the cell of a table even there."""
    content = " ".join(str(value).split()).replace("|", "\\|")
    inside = _longest_fence(content)
    return f"`{content}`" if not inside else f"{'`' * (inside + 1)} {content} {'`' * (inside + 1)}"


def _longest_fence(content: str) -> int:
    # A fence longer than any in the text cannot be closed by it.
    return max((len(run) for run in re.findall(r"`+", content)), default=0)


def _hub_id(value: Any) -> str | None:
    # A local folder is no hub id, though it may look like one.
    if isinstance(value, str) and _HUB_ID.fullmatch(value) and not Path(value).exists():
        return value
    return None


def _has_plot(run_dir: Path) -> bool:
    return (run_dir / LOSS_FILE).exists()
