"""Trains a few real steps of a configuration on this machine, and says what they took."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PrinterCallback, TrainerCallback

from thrifty.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from thrifty.planner.workload import Workload

WARM_UP = 1
STEPS = 3
_MOST_ACCUMULATED = 16


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What real steps took."""

    peak_allocated_bytes: int | None
    """None where the steps ran out of memory."""
    peak_reserved_bytes: int | None
    """Of the caching allocator; None on a CPU, which has none."""
    step_seconds: float | None
    """Median."""
    step_seconds_all: tuple[float, ...]
    out_of_memory: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


def measure(
    workload: Workload,
    *,
    micro_batch: int,
    accumulation: int | None = None,
    device: str = "cpu",
    steps: int = STEPS,
    memory: bool = True,
) -> Measured:
    """Trains `steps` steps on random full-length samples with random weights, after one to warm up.

    Args:
        workload: Model, task, sequence length and methods.
        micro_batch: Samples at a time.
        accumulation: Micro-batches a step; None where a method says how many, else 1.
        device: `cpu` or `cuda`.
        steps: How many steps are timed.
        memory: Whether to record the peak too; on a CPU this takes two steps more, under the profiler.

    Raises:
        InputError: The device is not here, or a method does not apply.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA device is present", key="device", value=device, fix="measure on the machine itself")
    total = WARM_UP + steps + (2 if memory and device == "cpu" else 0)
    # One step's samples more than are trained: the loader reads ahead.
    samples = _RandomSamples(workload, micro_batch * (accumulation or _MOST_ACCUMULATED) * (total + 1))
    with tempfile.TemporaryDirectory() as folder:
        probe = _Probe(device, steps, memory, before=living_storages())
        try:
            trainer = _trainer(workload, folder, micro_batch, accumulation, device, probe, samples, total)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        except Exception as error:
            from thrifty.safety.oom import is_oom

            if not is_oom(error):
                raise
            return Measured(
                peak_allocated_bytes=None, peak_reserved_bytes=None, step_seconds=None,
                step_seconds_all=(), out_of_memory=True,
            )  # fmt: skip
        finally:
            trainer = None  # Its model would count as somebody else's in the next measurement.
            gc.collect()
    return probe.result()


class _RandomSamples(Dataset):
    """Full-length samples of what the task's model takes, made from the planner's own batch."""

    def __init__(self, workload: Workload, count: int) -> None:
        from thrifty.planner.step import batch_builder

        sample = batch_builder(workload.config, workload.task)(1, workload.seq_len)
        generator = torch.Generator().manual_seed(0)
        limit = int(getattr(workload.config.get_text_config(), "vocab_size", 2) or 2)
        ids = torch.randint(min(5, limit - 1), limit, (count, workload.seq_len), generator=generator)
        self.count = count
        self.fixed = {key: value[0] for key, value in sample.items()}
        self.ids = {key: ids for key in ("input_ids", "labels") if key in sample and sample[key].dim() == 2}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.fixed, **{key: ids[index] for key, ids in self.ids.items()}, "sample_id": index}


def _collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    stacked = {k: torch.stack([s[k] for s in samples]) for k in samples[0] if k != "sample_id"}
    if "sample_id" not in samples[0]:  # a method looks at what the model itself takes
        return stacked
    return {**stacked, "sample_id": torch.tensor([s["sample_id"] for s in samples])}


def _trainer(
    workload: Workload, folder: str, micro: int, accumulation: int | None, device: str, probe: _Probe,
    samples: _RandomSamples, total: int,
) -> Any:  # fmt: skip
    import thrifty
    from thrifty.safety.options import Guards

    arguments = _arguments(
        {
            **workload.arguments,
            "output_dir": folder,
            "max_steps": total,
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": accumulation or 1,
            "use_cpu": device == "cpu",
            "save_strategy": "no",
            "eval_strategy": "no",
            "load_best_model_at_end": False,
            "logging_steps": 10**6,
            "report_to": [],
            "disable_tqdm": True,
        }
    )
    return thrifty.Trainer(
        real_model(workload),
        arguments,
        train_dataset=samples,
        data_collator=_collate,
        methods=list(workload.methods),
        callbacks=[probe],
        # The guards would split a micro-batch that does not fit, and hide what is to be measured.
        guards=Guards(on_oom="raise", trial_step=False, handle_signals=False, check_start=False),
    )


def _arguments(values: Mapping[str, Any]) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(**values)


def real_model(workload: Workload) -> nn.Module:
    """The model of a workload with random weights."""
    from thrifty.planner.step import model_factory

    config = workload.config
    torch.manual_seed(0)
    config.use_cache = False
    return model_factory(workload.task).from_config(
        config, dtype=getattr(torch, workload.dtype), attn_implementation=workload.attn_implementation
    )


class _Probe(TrainerCallback):
    """Times steps, and on a CPU records the last one's allocations."""

    def __init__(self, device: str, steps: int, memory: bool, before: dict[int, int]) -> None:
        self.device, self.timed, self.memory = device, steps, memory
        self.log = AllocationLog(before) if memory and device == "cpu" else None
        self.seconds: list[float] = []
        self.peak: int | None = None
        self.reserved: int | None = None
        self._begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            if state.global_step == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
        if self.log is not None and state.global_step == WARM_UP + self.timed:
            self.log.open()
        elif self.log is not None and state.global_step == WARM_UP + self.timed + 1:
            self.log.begin_step()
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        done = state.global_step
        if WARM_UP < done <= WARM_UP + self.timed:
            self.seconds.append(time.perf_counter() - self._begun)
        if self.log is not None and done == WARM_UP + self.timed + 2:
            self.log.end_step()
            self.peak = self.log.close()[0]
        if self.device == "cuda" and self.memory and done == WARM_UP + self.timed:
            self.peak = torch.cuda.max_memory_allocated()
            self.reserved = torch.cuda.max_memory_reserved()

    def result(self) -> Measured:
        return Measured(
            peak_allocated_bytes=self.peak,
            peak_reserved_bytes=self.reserved,
            step_seconds=statistics.median(self.seconds) if self.seconds else None,
            step_seconds_all=tuple(self.seconds),
        )


class AllocationLog:
    """The peak memory of steps on a CPU, by the allocator's own events.

    The profiler does not see the end of what began before it, so it is opened a step before the first that counts:
    what that one replaces (the codes of a quantised state) was then allocated under its eyes.

    Args:
        before: What `living_storages` found before the run began: constants of libraries are not the run's.
    """

    def __init__(self, before: Mapping[int, int]) -> None:
        self._before = before
        self._bases: list[int] = []
        self._inside = False
        self._profile: torch.profiler.profile | None = None

    @property
    def is_open(self) -> bool:
        """Whether it records."""
        return self._profile is not None

    def open(self) -> None:
        """Starts to record."""
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()

    def begin_step(self) -> None:
        """A step begins with what lives now: weights, optimizer state, the methods' own tensors, the batch."""
        self.end_step()
        gc.collect()
        self._bases.append(sum(size for key, size in living_storages().items() if key not in self._before))
        torch.empty(_BEGINS, dtype=torch.uint8)
        self._inside = True

    def end_step(self) -> None:
        """The step is over, if one began."""
        if self._inside:
            torch.empty(_ENDS, dtype=torch.uint8)
        self._inside = False

    def close(self) -> list[int]:
        """Stops to record; returns the highest bytes of each step."""
        from thrifty.planner._private import profiled_allocations

        assert self._profile is not None
        self.end_step()
        self._profile.__exit__(None, None, None)
        changes = np.array(profiled_allocations(self._profile), np.int64)
        bases, self._bases, self._profile = self._bases, [], None
        at_once = changes[1:] == -changes[:-1]  # a mark is freed as soon as it is made
        begins, ends = (np.flatnonzero((changes[:-1] == size) & at_once) for size in (_BEGINS, _ENDS))
        return [
            base + max(0, int(np.cumsum(changes[begin + 2 : end]).max(initial=0)))
            for base, begin, end in zip(bases, begins.tolist(), ends.tolist(), strict=True)
        ]


# Bytes of tensors that nothing else has the size of: they mark places among the events.
_BEGINS, _ENDS = 48_611, 48_619


def living_storages() -> dict[int, int]:
    """Bytes of every living tensor storage of this process by address: weights, states, batches, masks, averages."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        # Some lazy modules answer any isinstance question by importing something.
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu" and thing.layout == torch.strided:
            try:
                storage = thing.untyped_storage()
            except (RuntimeError, NotImplementedError):
                continue  # A fake or wrapper tensor holds no memory of its own.
            if storage.device.type == "cpu":
                found[storage.data_ptr()] = storage.nbytes()
    return found
