"""Real forward and backward passes beside what the model of time says of them: what no kernel alone can tell."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from thrifty import _hf
from thrifty.planner._private import TorchDispatchMode
from thrifty.planner.opcost import OpCoster
from thrifty.planner.replay import OP_TYPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

Typical = Callable[[Callable[[], Any]], float]
"""Seconds that a call takes."""

# (batch, length) of the passes that are timed: from few tokens to as many as a CPU trains on at a time.
_BATCHES = ((1, 64), (4, 64), (8, 128))


def framework(typical: Typical, device: str) -> dict[str, float]:
    """What the framework and the trainer take beside the arithmetic, in seconds.

    The probe is a Transformer as people train it, too small for its arithmetic to count.

    Args:
        typical: Times a call.
        device: A torch device.

    Returns:
        `overhead_seconds`: dispatch, autograd and Python, for one operation of a forward and backward pass, with the
        views, modules and autograd's own work between two of them. `overhead_again_seconds`: the same for one that
        is computed again, with what checkpointing does around it. `micro_batch_seconds`: the trainer, for one
        micro-batch.
    """
    from transformers import LlamaConfig

    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 4}
    plain, again = (
        _pass(LlamaConfig(**shape, num_attention_heads=2), 1, 4, device, checkpointing=chosen)
        for chosen in (False, True)
    )
    seconds, longer = typical(plain), typical(again)
    count, more = len(operations_of(plain)), len(operations_of(again))
    one = seconds / count
    return {
        "overhead_seconds": one,
        "overhead_again_seconds": max(one, (longer - seconds) / (more - count)),
        "micro_batch_seconds": max(0.0, _micro_batch(shape, device) - seconds),
    }


def _micro_batch(shape: Mapping[str, int], device: str) -> float:
    """Seconds of the trainer's one more micro-batch, its pass included."""
    from thrifty.planner.measure import measure
    from thrifty.planner.workload import make_workload

    few, many = 1, 9
    config = {"model_type": "llama", **shape, "num_attention_heads": 2}
    workload = make_workload(config, task="causal-lm", methods=["adamw"], seq_len=4)
    took = [
        measure(workload, micro_batch=1, accumulation=n, device=device, steps=8, memory=False).step_seconds or 0.0
        for n in (few, many)
    ]
    return (took[1] - took[0]) / (many - few)


def in_step(typical: Typical, measured: Mapping[str, Any]) -> float:
    """How many times longer operations take inside a pass of a CPU than alone: the median over several passes.

    Alone a kernel is repeated on the same tensors, which stay in the caches, as do its code and its branches. In a
    pass each operation meets data that others left, layouts that are not contiguous, and memory that is new.

    Args:
        typical: Times a call.
        measured: The calibration so far.
    """
    from dataclasses import replace

    from thrifty.hardware.devices import get_device
    from thrifty.planner.time import TimeModel

    alone = {**measured, "in_step": 1.0}
    ratios = []
    for config, causal in _configs():
        model = TimeModel(replace(get_device("cpu"), calibration=alone), causal=causal)
        for batch, length in _BATCHES:
            run = _pass(config, batch, length, "cpu")
            ratios.append(typical(run) / float(model.step(operations_of(run)).seconds[0]))
    return statistics.median(ratios)


def _configs() -> Iterator[tuple[Any, bool]]:
    """Small models of the usual kinds, and whether they are causal."""
    from transformers import BertConfig, GPT2Config, LlamaConfig

    shape: dict[str, Any] = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 2048}
    yield LlamaConfig(**shape, intermediate_size=512), True
    yield BertConfig(**shape, intermediate_size=768), False
    small: dict[str, Any] = {"n_embd": 160, "n_layer": 3, "n_head": 5, "vocab_size": 2048, "n_positions": 128}
    yield GPT2Config(**small, bos_token_id=0, eos_token_id=0), True


def _pass(config: Any, batch: int, length: int, device: str, *, checkpointing: bool = False) -> Callable[[], None]:
    """Forward and backward pass of a model on a batch of one token id."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    auto: Any = AutoModelForMaskedLM if config.model_type == "bert" else AutoModelForCausalLM
    config.use_cache = False
    model: PreTrainedModel = auto.from_config(config)
    model.train()
    if checkpointing:
        _hf.enable_checkpointing(model, {"use_reentrant": False})
    model.to(device)  # type: ignore[arg-type]
    ids = torch.ones(batch, length, dtype=torch.int64, device=device)

    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    run()  # from now on gradients are added to gradients, as under accumulation
    return run


def operations_of(run: Callable[[], Any]) -> np.ndarray:
    """What the planner would count of a call: (operations,) of `OP_TYPE`, each run on its own."""
    coster = OpCoster()
    rows: list[tuple[Any, ...]] = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            out = func(*args, **given)
            record = coster(func, tuple(args), given, out)
            if record is not None:
                name, dtype, numbers, _, _ = record
                rows.append((name, "forward", dtype, 1.0, *numbers))
            return out

    with Recording():
        run()
    return np.array(rows, OP_TYPE)
