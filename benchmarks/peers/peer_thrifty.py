"""`thrifty.Trainer`, without and with methods, on the common task: `python peer_thrifty.py SPEC.json OUT.json`."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

begun = time.perf_counter()

import torch  # noqa: E402
import transformers  # noqa: E402
from peer_trainer import Clock, arguments, collate, report, samples  # noqa: E402

import thrifty  # noqa: E402


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    data = json.loads(Path(spec["data"]).read_text())
    torch.set_num_threads(spec["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = thrifty.Trainer(
            model,
            transformers.TrainingArguments(**arguments(spec, folder)),
            train_dataset=samples(data["train"]),
            eval_dataset=samples(data["validation"]),
            data_collator=collate,
            callbacks=[clock],
            methods=spec.get("methods", []),
        )
        started = time.perf_counter() - begun
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    versions = {name: sys.modules[name].__version__ for name in ("torch", "transformers", "thrifty")}
    report(spec, clock, loss, started, sys.argv[2], versions)


if __name__ == "__main__":
    main()
