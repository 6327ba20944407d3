"""Plain `transformers.Trainer` on the common task: `python peer_trainer.py SPEC.json OUT.json`. No thrifty in it."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

begun = time.perf_counter()

import torch  # noqa: E402
import transformers  # noqa: E402


class Clock(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, **kw):
        self.seconds, self.mark = [], time.perf_counter()

    def on_step_end(self, args, state, control, **kw):
        now = time.perf_counter()
        self.seconds.append(now - self.mark)
        self.mark = now


def arguments(spec: dict, folder: str) -> dict:
    """The same for every tool that is built on `TrainingArguments`."""
    return {
        "output_dir": folder,
        "max_steps": spec["steps"],
        "per_device_train_batch_size": spec["micro_batch"],
        "gradient_accumulation_steps": spec["accumulation"],
        "per_device_eval_batch_size": 16,
        "learning_rate": spec["learning_rate"],
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "train_sampling_strategy": "sequential",
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": spec["seed"],
    }


def samples(rows: list[list[int]]) -> list[dict]:
    return [{"input_ids": row, "labels": row} for row in rows]


def collate(batch: list[dict]) -> dict:
    return {key: torch.tensor([sample[key] for sample in batch]) for key in ("input_ids", "labels")}


def report(spec: dict, clock: Clock, loss: float, started: float, out: str, versions: dict) -> None:
    with open(out, "w") as file:
        json.dump(
            {"seconds": clock.seconds, "loss": loss, "start_seconds": started, "versions": versions,
             "tokens_per_step": spec["micro_batch"] * spec["accumulation"] * spec["seq_len"]},
            file,
        )  # fmt: skip


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    data = json.loads(Path(spec["data"]).read_text())
    torch.set_num_threads(spec["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(**arguments(spec, folder)),
            train_dataset=samples(data["train"]),
            eval_dataset=samples(data["validation"]),
            data_collator=collate,
            callbacks=[clock],
        )
        started = time.perf_counter() - begun
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    report(spec, clock, loss, started, sys.argv[2], versions)


if __name__ == "__main__":
    main()
