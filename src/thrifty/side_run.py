"""A checkpointed side training whose result is cached: holdout models, learned growth operators."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_model, save_model
from torch import nn

if TYPE_CHECKING:
    from thrifty.context import Context


def side_run(
    ctx: Context,
    name: str,
    build: Callable[[], nn.Module],
    dataset: Any,
    *,
    max_steps: int,
    arguments: Mapping[str, Any],
) -> nn.Module:
    """See `Context.aux_run`. An interrupted side run goes on from its own last checkpoint."""
    import transformers

    from thrifty.trainer import Trainer

    assert ctx.data is not None
    decisive: dict[str, Any] = {
        "per_device_train_batch_size": ctx.args.per_device_train_batch_size,
        "gradient_accumulation_steps": ctx.args.gradient_accumulation_steps,
        "learning_rate": ctx.args.learning_rate,
        # The run's own precision: accelerate has one state a process, and would refuse another one afterwards.
        "bf16": ctx.args.bf16,
        "fp16": ctx.args.fp16,
        "seed": ctx.args.seed,
        **arguments,
    }
    folder = ctx.cache_path("side-run", name, max_steps, decisive, dataset_fingerprint(dataset))
    transformers.set_seed(ctx.args.seed)
    model = build()
    weights = folder / "model.safetensors"
    if weights.exists():
        load_model(model, weights, device="cpu")
        return model.to(ctx.device).eval()
    defaults: dict[str, Any] = {
        "use_cpu": ctx.args.use_cpu,
        "save_steps": max(1, max_steps // 4),
        "save_total_limit": 1,
        "report_to": [],
        "disable_tqdm": True,
    }
    args = transformers.TrainingArguments(
        output_dir=str(folder / "run"), max_steps=max_steps, **{**defaults, **decisive}
    )
    trainer = Trainer(model, args, train_dataset=dataset, data_collator=ctx.data.data_collator)
    unfinished = any((folder / "run").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if unfinished else None)
    model = trainer.model
    if ctx.rank == 0:
        temporary = weights.with_suffix(".tmp")
        save_model(model, str(temporary))
        temporary.rename(weights)
    return model.to(ctx.device).eval()


def dataset_fingerprint(dataset: Any) -> str:
    """Hash of a map-style dataset: its own fingerprint where it has one, else of its length and some samples."""
    own = getattr(dataset, "_fingerprint", None)
    if own is not None:
        return own
    digest = hashlib.blake2b(digest_size=16)
    count = len(dataset)
    for index in range(0, count, max(1, count // 64)):
        digest.update(repr(sorted(dataset[index].items())).encode())
    return f"{count}-{digest.hexdigest()}"
