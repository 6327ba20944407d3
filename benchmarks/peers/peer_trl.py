"""TRL's `SFTTrainer` on the common task: `python peer_trl.py SPEC.json OUT.json`. Knows nothing of thrifty."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

begun = time.perf_counter()

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from peer_trainer import Clock, arguments, report  # noqa: E402


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    data = json.loads(Path(spec["data"]).read_text())
    torch.set_num_threads(spec["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec["model"])
    clock = Clock()
    parts = {name: Dataset.from_dict({"input_ids": data[name]}) for name in ("train", "validation")}
    with tempfile.TemporaryDirectory() as folder:
        # Its own defaults where the task does not decide: SFTConfig turns activation checkpointing on, for one.
        config = trl.SFTConfig(
            **arguments(spec, folder),
            max_length=spec["seq_len"],
            packing=False,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = trl.SFTTrainer(
            model,
            config,
            train_dataset=parts["train"],
            eval_dataset=parts["validation"],
            processing_class=tokenizer,
            callbacks=[clock],
        )
        started = time.perf_counter() - begun
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    report(spec, clock, loss, started, sys.argv[2], versions)


if __name__ == "__main__":
    main()
