"""TRL's `SFTTrainer` with packing, for `benchmarks/fine_tuning.py`: `python fine_tuning_trl.py SPEC.json OUT.json`.

A packed row holds as many tokens as a global batch of samples on average, so that a step sees as many.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
import trl
from datasets import Dataset
from fine_tuning import Clock, arguments, evaluate, load_model


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    data = json.loads((Path(spec["folder"]) / "data.json").read_text())
    rows = {
        "input_ids": [row["input_ids"] for row in data["train"]],
        "completion_mask": [[int(label != -100) for label in row["labels"]] for row in data["train"]],
    }
    clock, model = Clock(), load_model(spec)
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec["folder"] + "/model")
    capacity = max(round(spec["batch"] * spec["mean_length"]), spec["longest"])
    with tempfile.TemporaryDirectory() as folder:
        config = trl.SFTConfig(
            **arguments({**spec, "batch": 1}, folder),
            max_length=capacity,
            packing=True,
            gradient_checkpointing=False,
            completion_only_loss=True,
        )
        trainer = clock.counting(trl.SFTTrainer)(
            model,
            config,
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer,
            callbacks=[clock.callback()],
        )
        trainer.train()
    Path(sys.argv[2]).write_text(json.dumps(clock.result(evaluate(trainer.model, data))))


if __name__ == "__main__":
    main()
