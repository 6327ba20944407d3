"""What torch.compile makes of a block, for a dry run: its passes over memory, without compiling anything.

A compiled block keeps other activations than the written one: the partitioner decides by a minimum cut what is kept and
what is computed again, and chains of element-wise operations run as one kernel, so that nothing between them exists.
The same partitioner is asked here, and what it would fuse takes no memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from thrifty.planner._private import no_modes, partitioned, tree_flatten, tree_unflatten
from thrifty.planner.periods import block_signature
from thrifty.planner.time import POINTWISE, short_name
from thrifty.planner.trace import unmaterialised

# Read by kernels that fuse what makes their input, but not what follows.
_REDUCTIONS = {"sum", "mean", "amax", "amin", "var_mean", "var", "prod", "any", "all", "argmax", "max", "min"}
_VIEWS = {"view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "select", "alias", "detach",
          "as_strided", "split", "split_with_sizes", "reshape", "unbind", "diagonal"}  # fmt: skip
_MADE = {"scalar_tensor", "full", "full_like", "arange", "iota", "convert_element_type"}
_FUSED = (POINTWISE - _REDUCTIONS - {"native_dropout", "copy_"}) | _MADE
_MOST_KEPT = 512


def compile_regions(modules: Iterable[nn.Module], known: dict[Any, Callable[..., Any]] | None = None) -> None:
    """Makes each module run as the compiler would run it, in place; equal ones are looked at once.

    Args:
        modules: The blocks.
        known: Graphs found for other models of the same configuration, data type, device and attention, to use and add
            to.
    """
    known = {} if known is None else known
    if len(known) > _MOST_KEPT:
        known.clear()
    for module in modules:
        module.forward = _Region(module, known)


class _Region:
    """The forward pass of a module, by the compiler's graphs."""

    def __init__(self, module: nn.Module, known: dict[Any, Callable[..., Any]]) -> None:
        self.module, self.known = module, known
        written = type(module).forward
        # Some releases of transformers checkpoint inside of a block's `forward`: the compiled code is inside of that.
        self.checkpoints = "checkpoint" in written.__code__.co_name and "forward" not in vars(module)
        plain = getattr(written, "__wrapped__", written)
        self.inner: Callable[..., Any] = MethodType(plain, module) if self.checkpoints else module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        if self.checkpoints and module.gradient_checkpointing and module.training and torch.is_grad_enabled():
            return module._gradient_checkpointing_func(partial(self.run, **kwargs), *args)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled code."""
        leaves, structure = tree_flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        inputs = [leaves[i] for i in at]
        rest = [None if i in at else leaf for i, leaf in enumerate(leaves)]
        key = (
            self._same, str(structure), repr(rest), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
            tuple((*t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in (*tensors.values(), *inputs)),
        )  # fmt: skip
        if key not in self.known:
            self.known[key] = self._traced(list(tensors), rest, at, structure, [*tensors.values()], inputs)
        return self.known[key]([*tensors.values()], inputs)

    @property
    def _same(self) -> Any:
        """Equal for modules with equal graphs."""
        attention = getattr(self.module, "self_attn", None)
        # What wraps this block's `forward` may know which block it is; it lives as long as the graph.
        wrapped = None if getattr(self.inner, "__self__", None) is self.module else id(self.inner)
        return (*block_signature(self.module), wrapped, getattr(self.module, "attention_type", None),
                getattr(attention, "sliding_window", None))  # fmt: skip

    def _traced(
        self, names: list[str], rest: list[Any], at: list[int], structure: Any, tensors: list[Tensor],
        inputs: list[Tensor],
    ) -> Callable[..., Any]:  # fmt: skip
        bare = _Bare(self.module, self.inner)

        def plain(values: list[Tensor], given: list[Tensor]) -> Any:
            leaves = list(rest)
            for i, value in zip(at, given, strict=True):
                leaves[i] = value
            args, kwargs = tree_unflatten(leaves, structure)
            named = {f"module.{name}": value for name, value in zip(names, values, strict=True)}
            return torch.func.functional_call(bare, named, args, kwargs)

        compiled = partitioned(plain, _runner)
        # The first call traces, which neither a record nor a checkpoint around the block may see.
        with no_modes(), saved_tensors_hooks(_as_is, _as_is), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # it looks at every input's
            compiled(_stand_ins(tensors), _stand_ins(inputs))
        return compiled


def _stand_ins(tensors: list[Tensor]) -> list[Tensor]:
    """Equal in all but memory, since a trace holds on to its inputs."""
    return [t.new_empty_strided(t.shape, t.stride()).requires_grad_(t.requires_grad) for t in tensors]


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


class _Bare(nn.Module):
    """A module without its hooks, which run outside of the compiled code."""

    def __init__(self, module: nn.Module, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.inner = module, inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _runner(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Runs a graph operation by operation, and frees everything after its last use, as compiled code does."""
    runner = _Fused(graph)

    def run(args: list[Any]) -> Any:
        try:
            return runner.boxed_run(args)
        finally:
            runner.env = {}

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Fused(fx.Interpreter):
    """Runs a graph; what a fused kernel keeps in registers takes no memory."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.inside = {node for node in graph.graph.nodes if _is_fused(node) and _stays_inside(node)}

    def run_node(self, n: fx.Node) -> Any:
        if n not in self.inside:
            return super().run_node(n)
        with unmaterialised():
            return super().run_node(n)


def _name(node: fx.Node) -> str:
    return short_name(str(node.target).rsplit(".", 1)[0]) if node.op == "call_function" else ""


def _is_fused(node: fx.Node) -> bool:
    return _name(node) in _FUSED or (_name(node) in _VIEWS and all(map(_is_fused, node.all_input_nodes)))


def _stays_inside(node: fx.Node) -> bool:
    """Whether only fused kernels read a value."""
    return all(
        _name(user) in _FUSED or _name(user) in _REDUCTIONS or (_name(user) in _VIEWS and _stays_inside(user))
        for user in node.users
    )
