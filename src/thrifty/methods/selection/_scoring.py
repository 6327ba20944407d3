"""What the methods share that give every sample a score: looking at all of them, keeping the result, and choosing."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from thrifty import scores as score_files
from thrifty.errors import InputError
from thrifty.method import Batch, Method, NotApplicable, TrainingData
from thrifty.safety.oom import rng_snapshot
from thrifty.scores import Scores
from thrifty.side_run import dataset_fingerprint

# Tasks whose models have logits and labels, one class a sample or a token.
LABELLED = ("causal-lm", "masked-lm", "text-classification", "image-classification", "seq2seq-lm")


def sizes_of(task: Any, batch: Batch) -> Tensor:
    """Targets of each sample, float32 of shape (batch,): labelled tokens, or 1 for a class."""
    labels = batch["labels"]
    if labels.dim() < 2:
        return torch.ones(len(labels), device=labels.device)
    shifted = labels[:, 1:] if getattr(task, "shift", False) else labels
    return (shifted != -100).sum(1).float()


def logit_gradients(task: Any, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Gradient of each sample's summed loss by the model's logits: softmax minus one-hot at each target.

    It needs a forward pass only, without graph.

    Returns:
        The gradient, float32 of the logits' shape (batch, ..., classes), and the targets of each sample (batch,).
    """
    # An encoder-decoder makes its decoder's input of the labels.
    unused = ("sample_id",) if task.name == "seq2seq-lm" else ("sample_id", "labels")
    with torch.no_grad():
        outputs: Any = model(**{key: value for key, value in batch.items() if key not in unused})
    logits = outputs.logits[0] if isinstance(outputs.logits, tuple | list) else outputs.logits
    leaf = logits.detach().float().requires_grad_()
    sizes = sizes_of(task, batch).to(leaf.device)
    with torch.enable_grad():
        losses = task.per_sample_loss(lambda **inputs: SimpleNamespace(logits=leaf), batch)
        (gradient,) = torch.autograd.grad((losses * sizes).sum(), leaf)
    return gradient, sizes


def sample_ids(dataset: Any) -> list[int]:
    """The ids of a data set's samples, in order. Raises `NotApplicable` where they have none."""
    if hasattr(dataset, "column_names") and "sample_id" in dataset.column_names:
        return [int(i) for i in dataset["sample_id"]]
    if len(dataset) and "sample_id" in dataset[0]:
        return [int(dataset[index]["sample_id"]) for index in range(len(dataset))]
    raise NotApplicable(
        "samples are chosen by their id, and the training data has no column sample_id",
        key="train_dataset",
        fix="number the samples: dataset.add_column('sample_id', range(len(dataset)))",
    )


def take(dataset: Any, places: Sequence[int]) -> Any:
    """The samples at these places, with their own ids."""
    if hasattr(dataset, "select"):
        return dataset.select(list(places))
    return torch.utils.data.Subset(dataset, list(places))


def batches_of(ctx: Any, model: nn.Module, dataset: Any, size: int) -> Iterator[Batch]:
    """All samples in order, collated, on the device, without `sample_id`."""
    collator: Any = ctx.data.data_collator
    for start in range(0, len(dataset), size):
        rows = [ctx.only_inputs(dataset[i], model) for i in range(start, min(start + size, len(dataset)))]
        yield ctx.to_device(collator(rows))


def task_of(ctx: Any, model: nn.Module) -> Any:
    """The run's task, inferred where the caller did not say."""
    from thrifty import tasks

    if ctx.task is None:
        ctx.task = tasks.infer(model)
    return ctx.task


def early_steps(ctx: Any, steps: int | None) -> int:
    """Optimizer steps of an early model: as set, or a tenth of the run."""
    return max(1, ctx.total_steps // 10) if steps is None else steps


def early_model(ctx: Any, name: str, run: int, steps: int, dataset: Any, model: nn.Module) -> nn.Module:
    """A copy of the model after some steps on `dataset` in an order of its own, in eval mode, from the cache if it can.

    Args:
        ctx: The run.
        name: Of the method.
        run: Number of the copy; seeds the order.
        steps: Optimizer steps; 0 gives the model as it is.
        dataset: What it is trained on.
        model: What it starts from, which stays as it is.
    """
    if steps == 0:
        return copy.deepcopy(model).to(ctx.device).eval()
    key = f"{name}/{run}/{model_fingerprint(model)}"
    return ctx.aux_run(
        key, lambda: copy.deepcopy(model), dataset, max_steps=steps, seed=ctx.args.seed + 1000 * run, data_seed=run
    )


def model_fingerprint(model: nn.Module) -> str:
    """Hash of a model's configuration and weights (each tensor's sum and a part of its values)."""
    config: Any = getattr(model, "config", None)
    digest = hashlib.blake2b(str(config.to_dict() if config is not None else "").encode(), digest_size=12)
    for name, p in model.named_parameters():
        flat = p.detach().flatten()
        parts = [float(flat.double().sum()), *flat[:: max(1, len(flat) // 16)][:16].tolist()]
        digest.update(f"{name}{tuple(p.shape)}{parts}".encode())
    return digest.hexdigest()


def stored_scores(
    ctx: Any, name: str, settings: dict[str, Any], dataset: Any, compute: Callable[[], np.ndarray[Any, Any]]
) -> Scores:
    """Scores by the hash of method, settings, model and data: from the cache, or computed and kept there.

    The random state is left as it was, whether they were computed or not.
    """
    model = ctx.model
    args = ctx.args
    training = [args.seed, args.learning_rate, args.train_batch_size * args.gradient_accumulation_steps, args.bf16]
    content = [name, settings, model_fingerprint(model), dataset_fingerprint(dataset), training]
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    path = score_files.folder() / f"{name}-{digest}.parquet"
    if not path.exists():
        restore = rng_snapshot()
        try:
            values = compute()
        finally:
            restore()
        if ctx.rank == 0:
            about = {"method": name, "settings": settings, "model": type(model).__name__, "hash": digest}
            ids = np.asarray(sample_ids(dataset), dtype=np.int64)
            Scores(ids, values.astype(np.float64), _texts(ctx, dataset), about).save(path)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
    return score_files.load(path)


def _texts(ctx: Any, dataset: Any) -> list[str] | None:
    tokenizer = getattr(ctx.processing_class, "tokenizer", ctx.processing_class)
    if len(dataset) == 0 or "input_ids" not in dataset[0]:
        return None
    if not hasattr(tokenizer, "decode"):
        return [score_files.shorten(str(list(dataset[i]["input_ids"]))) for i in range(len(dataset))]
    return [score_files.shorten(str(tokenizer.decode(dataset[i]["input_ids"]))) for i in range(len(dataset))]


@dataclass(kw_only=True)
class ScorePruning(Method):
    """Base of the methods that leave samples out before training, by a score."""

    keep_ratio: float = 0.5
    """Share of the samples that is trained on."""
    scores: str | None = None
    """A file of scores (`thrifty scores list`, or columns sample_id and score) to use instead of computing them."""

    found: Scores | None = field(default=None, init=False, repr=False)
    kept: list[int] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.keep_ratio <= 1:
            raise ValueError(f"keep_ratio must be above 0 and at most 1, got {self.keep_ratio}")

    def compute(self, dataset: Any, ctx: Any) -> np.ndarray[Any, Any]:
        """The score of each sample, float64 of shape (samples,)."""
        raise NotImplementedError

    def choose(self, values: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
        """Places of the `count` samples to keep."""
        return np.argsort(-values, kind="stable")[:count]

    def scoring(self, ctx: Any) -> dict[str, Any]:
        """The settings that decide the scores (not what is done with them)."""
        return {}

    def prepare_data(self, data: TrainingData, ctx: Any) -> TrainingData:
        dataset = data.train_dataset
        ids = sample_ids(dataset)
        if self.scores is not None:
            self.found = score_files.load(self.scores, key=f"methods.{self.name}.scores")
        else:
            self.found = stored_scores(ctx, self.name, self.scoring(ctx), dataset, lambda: self.compute(dataset, ctx))
        values = self.found.of(ids, key=f"methods.{self.name}.scores", value=self.scores)
        count = max(1, round(self.keep_ratio * len(ids)))
        places = np.sort(self.choose(values, count))
        self.kept = [ids[place] for place in places.tolist()]
        return TrainingData(
            train_dataset=take(dataset, places.tolist()),
            eval_dataset=data.eval_dataset,
            data_collator=data.data_collator,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"kept": list(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if list(state["kept"]) != self.kept:
            raise InputError(
                f"the checkpoint was trained on {len(state['kept'])} samples that are not those chosen now",
                key=f"methods.{self.name}",
                fix="resume with the same data and settings, or give the scores of the first run as `scores: FILE`",
            )
