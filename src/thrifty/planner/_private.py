"""Every private name of torch and transformers that the planner leans on, and a canary that notices when one moves.

The planner runs the training step on fake tensors. Both libraries treat fake tensors as "being compiled", which is not
what a training run does, so some of their internal choices are put back here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers.masking_utils as masking_utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.autograd.graph import _engine_run_backward
from torch.utils._device import _device_constructors as device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.flop_counter import flop_registry

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "canary",
    "device_constructors",
    "fake_empty",
    "flop_registry",
    "no_modes",
    "partitioned",
    "profiled_allocations",
    "real_masks",
    "real_tensors",
    "run_backward",
    "storage_key",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

no_modes = _disable_current_modes
"""Suspends what watches dispatched operations; fake tensors stay fake."""


def partitioned(function: Callable[..., Any], runner: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` as the compiler's default back end divides it into a forward and a backward graph.

    Args:
        function: Of tensors, in lists and tuples; traced for the shapes of its first call.
        runner: Makes of a graph and its inputs what runs it.
    """
    from functools import partial

    from functorch.compile import aot_function, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_function(
        function, fw_compiler=runner, bw_compiler=runner, inference_compiler=runner,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )  # fmt: skip


def storage_key(storage: torch.UntypedStorage) -> int:
    """Returns the address of the C++ storage: equal for all tensors that share memory, unique among living storages."""
    return storage._cdata


def run_backward(loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """Runs the autograd engine without passing through `Tensor.backward`, which would pop the function modes."""
    with torch.no_grad():
        seed = torch.ones_like(loss) if gradient is None else gradient
    _engine_run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def fake_empty(
    mode: FakeTensorMode, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns a new fake tensor without passing through the mode's dispatch, which takes ten times as long."""
    with in_kernel_invocation_manager(mode):
        element = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, element, device)


@contextlib.contextmanager
def real_masks(*, padded: bool) -> Iterator[None]:
    """Makes transformers choose attention masks for fake tensors as it would for real ones.

    It builds the full mask whenever it sees a fake tensor, since it must not read the values. A real batch without
    padding takes `is_causal=True` and no mask at all, which is another kernel and other memory.

    Args:
        padded: Whether the batch holds padding, that is whether a mask would really be built.
    """
    packed = masking_utils.find_packed_sequence_indices
    causal = masking_utils._ignore_causal_mask_sdpa
    bidirectional = masking_utils._ignore_bidirectional_mask_sdpa
    tracing = masking_utils.is_tracing

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> None:
        # The same small tensors as the real call makes before it concludes that nothing is packed.
        mask = packed(position_ids)
        assert mask is not None  # it is only ever None for tensors with values
        (mask[:, -1] == 0).all()

    def read(mask: torch.Tensor | None, *, by_sum: bool) -> None:
        if mask is not None:
            mask.sum() == mask.numel() if by_sum else mask.all()

    def ignore_causal_mask(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        if padded and padding_mask is not None:
            return causal(padding_mask, *args, **kwargs)
        read(padding_mask, by_sum=True)
        return causal(None, *args, **kwargs)

    def ignore_bidirectional_mask(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        if padded and padding_mask is not None:
            return bidirectional(padding_mask, *args, **kwargs)
        read(padding_mask, by_sum=False)
        return bidirectional(None, *args, **kwargs)

    # Tensors on `meta` have no values either, but transformers does not know them for traced ones.
    masking_utils.is_tracing = lambda tensor=None: tensor is not None
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices  # type: ignore[assignment]
    masking_utils._ignore_causal_mask_sdpa = ignore_causal_mask
    masking_utils._ignore_bidirectional_mask_sdpa = ignore_bidirectional_mask
    try:
        yield
    finally:
        masking_utils.is_tracing = tracing
        masking_utils.find_packed_sequence_indices = packed
        masking_utils._ignore_causal_mask_sdpa = causal
        masking_utils._ignore_bidirectional_mask_sdpa = bidirectional


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Suspends fake tensors and all modes, so that operations inside really run."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def profiled_allocations(profile: torch.profiler.profile) -> list[int]:
    """Returns the signed bytes of every CPU allocation (+) and free (-) that a profiled region made, in order.

    Args:
        profile: A finished `torch.profiler.profile(profile_memory=True)`.
    """
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    cpu = torch.autograd.DeviceType.CPU
    memory = [event for event in events if event.name() == "[memory]" and event.device_type() == cpu]
    return [event.nbytes() for event in memory]  # type: ignore[attr-defined]


def canary() -> list[str]:
    """Returns one sentence for every private name above that this release of torch or transformers has moved."""
    faults = []

    def check(ok: bool, what: str) -> None:
        if not ok:
            faults.append(f"{what} (torch {torch.__version__}, transformers {transformers_version})")

    import transformers

    transformers_version = transformers.__version__
    names = list(inspect.signature(masking_utils.find_packed_sequence_indices).parameters)
    check(names == ["position_ids"], f"masking_utils.find_packed_sequence_indices now takes {names}")
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        first = next(iter(inspect.signature(getattr(masking_utils, name)).parameters))
        check(first == "padding_mask", f"masking_utils.{name} now takes {first!r} first")
    check(hasattr(masking_utils, "is_tracing"), "masking_utils.is_tracing is gone")
    check(len(flop_registry) > 0, "torch.utils.flop_counter.flop_registry is empty")
    try:
        traced = partitioned(lambda x: (x.exp() * 2).sum(), lambda graph, inputs: graph)
        traced(torch.ones(2, requires_grad=True)).backward()
    except (ImportError, TypeError, AttributeError) as moved:
        check(False, f"the partitioner of torch.compile is called otherwise: {moved}")
    with FakeTensorMode():
        weight = torch.ones(2, requires_grad=True)
        check(isinstance(weight, FakeTensor), "FakeTensorMode no longer makes FakeTensor")
        run_backward((weight * 2).sum())
        check(weight.grad is not None, "_engine_run_backward no longer accumulates gradients")
        check(
            storage_key(weight.untyped_storage()) == storage_key(weight.view(1, 2).untyped_storage()),
            "UntypedStorage._cdata no longer identifies a storage",
        )
    return faults
