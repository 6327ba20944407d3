"""LitGPT's `pretrain` on the common task: `python peer_litgpt.py SPEC.json OUT.json`. Knows nothing of thrifty.

It compiles the model, as it always does; compilation falls into the first steps, which are reported apart.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

begun = time.perf_counter()

import torch  # noqa: E402
from litgpt import pretrain  # noqa: E402
from litgpt.args import EvalArgs, TrainArgs  # noqa: E402
from litgpt.config import Config  # noqa: E402
from litgpt.data import DataModule  # noqa: E402
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


class Rows(Dataset):
    """Remembers when the first sample of each step was asked for: a step lasts from one to the next."""

    def __init__(self, rows: list[list[int]], batch: int) -> None:
        self.rows, self.batch, self.times = torch.tensor(rows), batch, []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % self.batch == 0:
            self.times.append(time.perf_counter())
        return self.rows[index]


class Data(DataModule):
    def __init__(self, train: Rows, validation: Rows, micro_batch: int) -> None:
        super().__init__()
        self.train, self.validation, self.micro_batch = train, validation, micro_batch

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None) -> None:
        pass

    def setup(self, stage: str = "") -> None:
        pass

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.micro_batch)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=16)


def model_of(folder: str, length: int) -> tuple[Config, dict[str, torch.Tensor]]:
    """Configuration and weights of a Hugging Face Llama in LitGPT's form."""
    hf = json.loads((Path(folder) / "config.json").read_text())
    config = Config(
        name="common",
        block_size=length,
        vocab_size=hf["vocab_size"],
        padded_vocab_size=hf["vocab_size"],
        n_layer=hf["num_hidden_layers"],
        n_head=hf["num_attention_heads"],
        n_query_groups=hf["num_key_value_heads"],
        n_embd=hf["hidden_size"],
        head_size=hf["hidden_size"] // hf["num_attention_heads"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=hf["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
        intermediate_size=hf["intermediate_size"],
    )
    weights: dict[str, torch.Tensor] = {}
    loaded = load_file(str(Path(folder) / "model.safetensors"))
    copy_weights_hf_llama(config, {}, weights, loaded)
    return config, weights


def main() -> None:
    spec, out = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    sys.argv[1:] = ["common"]  # it reads the command line once more, when it saves
    data = json.loads(Path(spec["data"]).read_text())
    torch.set_num_threads(spec["threads"])
    # It predicts each next token of its input, so a sample of n tokens is an input of n - 1.
    config, weights = model_of(spec["model"], spec["seq_len"] - 1)
    batch = spec["micro_batch"] * spec["accumulation"]
    train, validation = Rows(data["train"], batch), Rows(data["validation"], 1)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        start.mkdir()
        torch.save(weights, start / "lit_model.pth")
        started = time.perf_counter() - begun
        pretrain.setup(
            "common",
            model_config=config,
            out_dir=Path(folder) / "out",
            precision="32-true",
            initial_checkpoint_dir=start,
            data=Data(train, validation, spec["micro_batch"]),
            train=TrainArgs(
                save_interval=None, log_interval=1, global_batch_size=batch,
                micro_batch_size=spec["micro_batch"], lr_warmup_steps=0, max_norm=1.0, min_lr=0.0,
                max_tokens=spec["steps"] * batch * (spec["seq_len"] - 1), tie_embeddings=False,
            ),
            eval=EvalArgs(interval=10**9, max_iters=10**6, initial_validation=False, final_validation=True),
            optimizer={
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": spec["learning_rate"], "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8},
            },
            devices=1,
            logger_name="csv",
            seed=spec["seed"],
        )  # fmt: skip
        rows = [row for path in Path(folder).rglob("metrics.csv") for row in csv.DictReader(path.open())]
        loss = next(float(row["val_loss"]) for row in reversed(rows) if row.get("val_loss"))
    seconds = [b - a for a, b in zip(train.times, train.times[1:], strict=False)][: spec["steps"]]
    names = ("torch", "lightning", "litgpt")
    with open(out, "w") as file:
        json.dump(
            {"seconds": seconds, "loss": loss, "start_seconds": started, "versions": {n: version(n) for n in names},
             "tokens_per_step": batch * spec["seq_len"]},
            file,
        )  # fmt: skip


if __name__ == "__main__":
    main()
