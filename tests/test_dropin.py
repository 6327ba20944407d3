"""With no methods, `thrifty.Trainer` is bit for bit `transformers.Trainer`."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

import thrifty


def _model(seed: int = 1) -> torch.nn.Module:
    transformers.set_seed(seed)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    return AutoModelForCausalLM.from_config(config)


def _data() -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 101, (12,), generator=generator) for _ in range(30)]
    return [{"input_ids": row, "labels": row} for row in rows]


def _run(cls, folder, **overrides):
    arguments = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "save_steps": 5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "disable_tqdm": True,
        "seed": 3,
    }
    args = TrainingArguments(str(folder), **{**arguments, **overrides})
    trainer = cls(_model(), args, train_dataset=_data(), eval_dataset=_data()[:6])
    trainer.train()
    return trainer


@pytest.mark.parametrize("overrides", [{}, {"max_grad_norm": 0.0, "bf16": True}, {"save_strategy": "epoch"}])
def test_empty_recipe_is_the_parent(tmp_path, overrides):
    theirs = _run(transformers.Trainer, tmp_path / "theirs", **overrides)
    ours = _run(thrifty.Trainer, tmp_path / "ours", **overrides)

    def values(trainer):
        names = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch", "step")
        return [{k: row[k] for k in names if k in row} for row in trainer.state.log_history]

    assert values(ours) == values(theirs)
    assert len([row for row in values(ours) if "loss" in row]) == 16
    for (name, a), (_, b) in zip(theirs.model.named_parameters(), ours.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    for checkpoint in (tmp_path / "theirs").glob("checkpoint-*"):
        written = {path.name for path in checkpoint.iterdir()}
        assert written <= {path.name for path in (tmp_path / "ours" / checkpoint.name).iterdir()}
        theirs_state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        ours_state = torch.load(tmp_path / "ours" / checkpoint.name / "optimizer.pt", weights_only=True)
        torch.testing.assert_close(ours_state, theirs_state, rtol=0, atol=0)
