"""One measurement of one row: a training run in this process, which should be a fresh one."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from thrifty.errors import InputError, ThriftyError

WARM_UP_STEPS = 3
"""Steps that are left out of all timings: the first ones allocate, compile and fill caches. They are reported."""
MEMORY_STEPS = 4

Kind = Literal["memory", "speed", "loss"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure. All of it is plain data, so that it can go to another process and into a hash.

    Attributes:
        kind: `memory` and `speed` are short runs with a whole schedule; `loss` is one with evaluations.
        arm: The arm's id.
        run: A run file's content, without methods.
        methods: As under `methods` of a run file.
        seed: Of the weights that are drawn and of the order of the samples.
        steps: Optimizer steps.
        evaluations: `loss`: how many evaluations, the last one at the end.
        eval_samples: How many validation samples are evaluated, evenly spaced.
        threads: Processor threads; None leaves torch's choice.
        predict: `memory`: say beside the peak what the planner predicts for it.
    """

    kind: Kind
    arm: str
    run: Mapping[str, Any]
    methods: tuple[Any, ...] = ()
    seed: int = 0
    steps: int = 24
    evaluations: int = 0
    eval_samples: int = 64
    threads: int | None = None
    predict: bool = False


@dataclass
class Outcome:
    """What a measurement found. `reason` says why there is nothing to find, in the words of who refused."""

    reason: str | None = None
    crashed: bool = False
    """The reason is a fault, not a refusal."""
    device: str = "cpu"
    start_seconds: float = 0.0
    """Data, model and trainer, before the first step."""
    prepare_seconds: float = 0.0
    """Of these the trainer: what the methods do with model and data before training."""
    warm_up_seconds: float | None = None
    """The first steps, with everything that is compiled in them."""
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    tokens: int = 0
    """Trained on in the whole run, padding not counted."""
    steps: int = 0
    train_seconds: float = 0.0
    """The whole training, its warm-up counted at the later pace and the evaluations left out."""
    evaluation_seconds: float = 0.0
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    """What the planner predicts for the peak."""
    not_predicted: str | None = None
    """Why it predicts nothing."""
    curve: list[tuple[int, int, float, float]] = field(default_factory=list)
    """(step, tokens, seconds, validation loss) of every evaluation."""
    metrics: dict[str, float] = field(default_factory=dict)
    whole_schedule: bool = True
    """False where the method needs a longer run than this, of which only the first steps were taken."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the state file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """The opposite of `to_dict`."""
        values = {**data, "curve": [tuple(point) for point in data["curve"]]}
        return cls(**values)


def measure(job: Job) -> Outcome:
    """Runs the job. Refusals become the outcome's reason; other errors are raised."""
    try:
        return _train(job, total=job.steps)
    except InputError as error:
        refusal = error
    except ThriftyError as error:  # a guard stopped the run: a loss that is not finite, ...
        return Outcome(reason=str(error))
    nominal = int(job.run.get("max_steps", -1))
    if job.kind != "loss" and nominal > job.steps:
        # Perhaps the method needs a longer run than this short one: then the first steps of such a run.
        try:
            return dataclasses.replace(_train(job, total=nominal), whole_schedule=False)
        except ThriftyError as error:
            return Outcome(reason=str(error))
    return Outcome(reason=str(refusal))


def _train(job: Job, *, total: int) -> Outcome:
    import torch

    from thrifty import tasks
    from thrifty.config import parse_config
    from thrifty.planner.measure import living_storages

    gc.collect()  # what dies later leaves its addresses to this run's tensors
    before = living_storages() if job.kind == "memory" else {}
    begin = time.perf_counter()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    config = parse_config({**job.run, "methods": list(job.methods)}, name="bench")
    with tempfile.TemporaryDirectory(prefix="thrifty-bench-") as scratch:
        args = config.training_arguments(scratch, **_overrides(job, total))
        args.seed = job.seed
        loaded = tasks.load(
            config.task,
            config.data,
            model_name_or_path=config.model_name_or_path,
            model_config=config.model_config,
            tokenizer_name_or_path=config.tokenizer_name_or_path,
            vocab_size=config.vocab_size,
            seed=job.seed,
            trust_remote_code=config.trust_remote_code,
            attn_implementation=config.attn_implementation,
            dtype=config.dtype,
        )
        with _cache_of_its_own(scratch):
            found = _timed(job, total, config, args, loaded, begin, before)
    if job.predict and found.peak_bytes is not None:
        _predict(config, args, found)
    return found


def _predict(config: Any, args: Any, found: Outcome) -> None:
    """Notes what the planner says of the same run."""
    import torch

    from thrifty.hardware.devices import detect_id
    from thrifty.planner.plan import estimate
    from thrifty.planner.workload import workload_from_run

    if found.device not in ("cpu", "cuda"):
        found.not_predicted = f"there is no profile of {found.device} devices"
        return
    try:
        predicted = estimate(
            workload_from_run(config),
            device="cpu" if found.device == "cpu" else detect_id(torch.cuda.get_device_name(args.device)),
            micro_batch=args.per_device_train_batch_size,
            accumulation=config.arguments.get("gradient_accumulation_steps"),
        )
    except InputError as error:
        found.not_predicted = str(error)
    except Exception as fault:  # what was measured stands all the same, and the table names the fault
        found.not_predicted = f"{type(fault).__name__}: {fault}"
    else:
        found.predicted_bytes = predicted.peak_allocated_bytes


def _timed(
    job: Job, total: int, config: Any, args: Any, loaded: Any, begin: float, before: Mapping[int, int]
) -> Outcome:
    from thrifty.bench.clock import StepClock, StopAfter
    from thrifty.bench.memory import PeakMemory
    from thrifty.recipe import Recipe
    from thrifty.report.throughput import TokenCounter
    from thrifty.run.evaluation import silence
    from thrifty.run.training import RunTrainer

    data = loaded.data
    args.warmup_steps = _warm_up_share(config, args, len(data.train_dataset))
    held = None if data.eval_dataset is None else some(data.eval_dataset, job.eval_samples)
    prepare_begin = time.perf_counter()
    trainer: Any = RunTrainer(
        model=loaded.model,
        args=args,
        data_collator=data.data_collator,
        train_dataset=data.train_dataset,
        eval_dataset=held,
        processing_class=loaded.processor,
        compute_metrics=data.compute_metrics,
        preprocess_logits_for_metrics=data.preprocess_logits_for_metrics,
        methods=Recipe.parse(config.methods),
        task=loaded.task,
        # What would change or interrupt a measurement is off: a batch must not be split, a signal ends the bench.
        guards=dataclasses.replace(config.guards, on_oom="raise", trial_step=False, handle_signals=False),
    )
    prepare_seconds = time.perf_counter() - prepare_begin
    trainer.counter = TokenCounter()
    silence(trainer)
    clock = StepClock(trainer.counter, args.device, prepare_seconds)
    memory = PeakMemory(args.device, before) if job.kind == "memory" or args.device.type == "cuda" else None
    for callback in (memory, clock, StopAfter(job.steps) if total > job.steps else None):
        if callback is not None:
            trainer.add_callback(callback)
    start_seconds = time.perf_counter() - begin
    trainer.train()
    found = Outcome(
        device=args.device.type,
        start_seconds=start_seconds,
        prepare_seconds=prepare_seconds,
        tokens=clock.tokens[-1] if clock.tokens else 0,
        steps=len(clock.seconds),
        peak_bytes=memory.peak if memory is not None else None,
    )
    if job.kind != "memory":
        clock.fill(found)
    if job.kind == "loss":
        _final(trainer, clock, found)
    return found


@contextlib.contextmanager
def _cache_of_its_own(folder: str) -> Iterator[None]:
    """Scores and side models that an earlier measurement left in the cache would cost nothing in this one."""
    kept = os.environ.get("THRIFTY_CACHE")
    os.environ["THRIFTY_CACHE"] = folder
    try:
        yield
    finally:
        del os.environ["THRIFTY_CACHE"]
        if kept is not None:
            os.environ["THRIFTY_CACHE"] = kept


def _final(trainer: Any, clock: Any, found: Outcome) -> None:
    """The evaluation of the finished model stands for that of the last step: methods merge and average at the end."""
    if trainer.eval_dataset is None:
        raise InputError(
            "there is no validation data to measure the loss on", key="validation_file",
            fix="name a file, or validation_fraction: 0.1",
        )  # fmt: skip
    begin = time.perf_counter()
    metrics = trainer.evaluate()
    found.evaluation_seconds = time.perf_counter() - begin
    found.metrics = {
        name: float(value)
        for name, value in metrics.items()
        if name.startswith("eval_") and not name.endswith(("_runtime", "_per_second", "_preparation_time"))
    }
    last = (found.steps, found.tokens, found.train_seconds, float(metrics["eval_loss"]))
    found.curve = [*(point for point in clock.curve() if point[0] < found.steps), last]


def _overrides(job: Job, total: int) -> dict[str, Any]:
    every = math.ceil(total / job.evaluations) if job.evaluations else 0
    return {
        "max_steps": total,
        "eval_strategy": "steps" if every and every < total else "no",
        "eval_steps": every or None,
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "logging_strategy": "no",
        "logging_steps": 10**9,
        "report_to": [],
        "disable_tqdm": True,
        "push_to_hub": False,
    }


def _warm_up_share(config: Any, args: Any, samples: int) -> float:
    """The learning rate's warm-up as a share of the run: a shorter run has a shorter one."""
    if args.warmup_steps < 1:
        return args.warmup_steps
    steps = int(config.arguments.get("max_steps", -1))
    if steps < 1:
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        steps = math.ceil(samples / batch * float(config.arguments.get("num_train_epochs", 3.0)))
    return min(0.5, args.warmup_steps / max(1, steps))


def some(dataset: Any, count: int) -> Any:
    """At most `count` samples, evenly spaced."""
    if len(dataset) <= count:
        return dataset
    return dataset.select([i * len(dataset) // count for i in range(count)])
