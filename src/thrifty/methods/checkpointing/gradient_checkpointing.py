"""Gradient (activation) checkpointing.

What it does: keeps only a part of the activations in the forward pass and computes the others again in the backward
pass. The random state is restored for it, so gradients are the same with dropout.

Helps: when activations are the peak of memory: long sequences, large batches, deep models.
Does not help: when weights, optimizer states or the logits are the peak; `full` costs about one more forward pass.
Limits: models without Hugging Face's checkpointing support are refused. `sqrt`, `optimal` and `milp` do not work with
sharded parameters or compiled models. `milp` is for up to 12 blocks, and its solver may take a minute; `optimal` is as
good among schedules that keep what they hold, and takes a second. `selective` keeps attention with dropout as little
as torch can: it is computed again.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Griewank and Walther, 2000; Beaumont et al.,
"Optimal checkpointing for heterogeneous chains", 2019; Jain et al., "Checkmate", MLSys 2020.
Library: torch.utils.checkpoint through transformers; HiGHS through scipy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from thrifty._hf import checkpointing_arguments, enable_checkpointing
from thrifty.architecture import Blocks, find_blocks
from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods.checkpointing._chain import Chain, Schedule, root_size, segmented

Policy = Literal["full", "every-n", "sqrt", "k-of-l", "selective", "optimal", "milp", "memory-budget"]
SCHEDULED = ("sqrt", "optimal", "milp")
MOST_BLOCKS = 12


def checkpoint_blocks(model: nn.Module, *, every: int = 1) -> int:
    """Switches checkpointing on for every `every`-th block of a Hugging Face model, for one's own loop.

    Returns:
        The number of checkpointed blocks.
    """
    enable_checkpointing(model, {"use_reentrant": False})
    return keep_every(model, every)


def keep_every(model: nn.Module, every: int) -> int:
    """Of the checkpointed blocks keeps the first of each group of `every` checkpointed. Returns how many there are."""
    return _choose(model, lambda index, length: index % every == 0)


def checkpoint_some(model: nn.Module, k: int, *, side: Literal["first", "last"] = "first") -> int:
    """Of the checkpointed blocks keeps the first or last `k` of each stack checkpointed. Returns how many there are."""
    return _choose(model, lambda index, length: index < k if side == "first" else index >= length - k)


def _choose(model: nn.Module, chosen: Any) -> int:
    kept = 0
    for blocks in find_blocks(model):
        block: Any
        for index, block in enumerate(blocks):
            if getattr(block, "gradient_checkpointing", None) is not None:
                block.gradient_checkpointing = chosen(index, len(blocks))
                kept += block.gradient_checkpointing
    return kept


def schedule_blocks(
    model: nn.Module,
    policy: Literal["sqrt", "optimal", "milp"],
    *,
    blocks: Sequence[nn.Module] | None = None,
    budget: float = 0.5,
    budget_bytes: int | None = None,
    costs: Literal["planned", "measured"] = "planned",
    meter: Any = None,
    size: int | None = None,
    replan: bool = True,
) -> Any:
    """Lets a schedule decide what each block keeps, for one's own loop.

    Args:
        model: A Hugging Face model with checkpointing support, or any module.
        policy: `sqrt`, `optimal` or `milp`.
        blocks: Its blocks in the order in which they run, each from a tensor to a tensor; default its stacks of equal
            blocks.
        budget: For the last two: the part of the blocks' activations that there is memory for.
        budget_bytes: The same in bytes.
        costs: Weigh blocks by floating-point operations (`planned`) or by the time that they take (`measured`).
        meter: Counts the bytes that are really kept (`Meter`).
        size: For `sqrt`: blocks in a segment; default about the square root of their number.
        replan: Whether a batch larger than any before is measured again.

    Returns:
        The `ScheduledBlocks`; its `remove()` ends it, its `chain` and `schedule` tell what was measured and planned.
    """
    from thrifty.methods.checkpointing._executor import ScheduledBlocks

    if getattr(model, "supports_gradient_checkpointing", False):
        enable_checkpointing(model, {"use_reentrant": False})
    stacks: list[Any] = in_order(model) if blocks is None else [blocks]

    def plan(chain: Chain) -> Schedule:
        return _plan(chain, policy, budget, budget_bytes)

    return ScheduledBlocks(
        model,
        [block for stack in stacks for block in stack],
        root_schedule([len(stack) for stack in stacks], size) if policy == "sqrt" else plan,
        costs=costs,
        meter=meter,
        replan=replan,
    )


def in_order(model: nn.Module) -> list[Blocks]:
    """The stacks of blocks in the order in which they run: an encoder before its decoder."""
    names = [name for name, _ in model.named_modules()]
    return sorted(find_blocks(model), key=lambda stack: names.index(stack.prefix))


def root_schedule(lengths: list[int], size: int | None = None) -> Schedule:
    """Segments of about sqrt(L) blocks in each stack, or of `size` blocks."""
    starts, offset = [], 0
    for length in lengths:
        starts += range(offset, offset + length, size or root_size(length))
        offset += length
    return segmented(offset, starts)


def memory_for(chain: Chain, budget: float, budget_bytes: int | None) -> int:
    """Bytes that a schedule may use: a part that no schedule is content with is raised to the least possible."""
    if budget_bytes is not None:
        return budget_bytes
    from thrifty.methods.checkpointing._optimal import ChainProgram

    program = ChainProgram(chain)
    return max(int(budget * program.full), min(program.minimum, program.full))


def _plan(chain: Chain, policy: str, budget: float, budget_bytes: int | None) -> Schedule:
    memory = memory_for(chain, budget, budget_bytes)
    if policy == "milp":
        from thrifty.methods.checkpointing._checkmate import chain_schedule

        if len(chain) > MOST_BLOCKS:
            raise NotApplicable(
                f"gradient-checkpointing: milp is for up to {MOST_BLOCKS} blocks, and there are {len(chain)}",
                fix="use the policy optimal",
            )
        return chain_schedule(chain, memory)
    from thrifty.methods.checkpointing._optimal import optimal

    return optimal(chain, memory)


@register(
    "gradient-checkpointing",
    title="Gradient checkpointing",
    section="checkpointing",
    sources=[
        Paper("Chen et al.", 2016, "arXiv:1604.06174"),
        Paper("Griewank and Walther", 2000, "Algorithm 799"),
        Paper("Beaumont et al.", 2019, "hal-02352969"),
        Paper("Jain et al.", 2020, "arXiv:1910.02653"),
    ],
    exact=True,
    library="torch.utils.checkpoint",
    choices={"free": [{}, {"every": 2}]},
    bench_order=40,
)
@dataclass(kw_only=True)
class GradientCheckpointing(Method):
    """Recomputes activations in the backward pass."""

    policy: Policy = "full"
    """What is recomputed: all blocks, every n-th, segments of about sqrt(L) blocks, k of L blocks, all operations but
    products and attention, what is optimal for a budget (by dynamic or integer programming), or what the compiler
    chooses for a budget."""
    every: int = 1
    """With `full` and `every-n`: checkpoint every n-th block only: less recomputation, more memory."""
    k: int = 1
    """With `k-of-l`: how many blocks."""
    side: Literal["first", "last"] = "first"
    """With `k-of-l`: which blocks. What the first ones keep lives longest."""
    budget: float = 0.5
    """With `optimal`, `milp` and `memory-budget`: the part of the activations that there is memory for; if less than
    the least that is possible, that least."""
    budget_bytes: int | None = None
    """With `optimal` and `milp`: the bytes that the blocks' activations may take, in place of `budget`."""
    costs: Literal["planned", "measured"] = "planned"
    """With `optimal` and `milp`: weigh blocks by floating-point operations, or by the time that they took in the first
    batch."""

    checkpointed: int = field(default=0, init=False, repr=False)
    scheduled: Any = field(default=None, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)
    _before: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        if self.every > 1 and self.policy not in ("full", "every-n"):
            raise ValueError(f"every={self.every} does not go with the policy {self.policy}")
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must be above 0 and at most 1, got {self.budget}")
        if self.budget_bytes is not None and (self.budget_bytes < 1 or self.policy not in ("optimal", "milp")):
            raise ValueError(f"budget_bytes={self.budget_bytes} must be positive and goes with optimal and milp only")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        if self.policy in SCHEDULED and (getattr(args, "fsdp", None) or getattr(args, "deepspeed", None)):
            raise NotApplicable(
                f"gradient-checkpointing: the policy {self.policy} runs blocks again whose parameters FSDP or "
                "DeepSpeed have put away",
                fix="use the policies full or every-n there",
            )
        return {} if self.policy == "memory-budget" else checkpointing_arguments(True, {"use_reentrant": False})

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.ctx = ctx
        compiled = bool(getattr(ctx.args, "torch_compile", False))
        if self.policy == "memory-budget":
            if not compiled and not ctx.planning:
                raise NotApplicable(
                    "gradient-checkpointing: memory-budget is a setting of the compiler, and the model is not compiled",
                    fix="add the method compile, or use the policy optimal",
                )
            return model
        if compiled and self.policy in (*SCHEDULED, "selective"):
            raise NotApplicable(
                f"gradient-checkpointing: the compiler does not see what the policy {self.policy} drops",
                fix="use the policy memory-budget with compiled models",
            )
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise NotApplicable(
                f"gradient-checkpointing: {type(model).__name__} does not support checkpointing",
                fix="remove gradient-checkpointing from the methods",
            )
        return model

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self._apply(kw["model"])

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        self._apply(model)

    def _apply(self, model: nn.Module) -> None:
        if self.policy == "memory-budget":
            import torch._functorch.config as compiler

            if self._before is None:
                self._before = compiler.activation_memory_budget
            compiler.activation_memory_budget = self.budget
        elif self.policy in SCHEDULED:
            if self.scheduled is not None and self.scheduled.model is model:
                self.scheduled.remove()
            policy: Any = self.policy
            planning = self.ctx is not None and self.ctx.planning
            size = self._full_size() if planning else None
            self.scheduled = schedule_blocks(
                model, policy, budget=self.budget, budget_bytes=self.budget_bytes,
                costs="planned" if planning else self.costs, size=size, replan=not planning,
            )  # fmt: skip
            self.checkpointed = len(self.scheduled.blocks)
            if planning:
                self._mark(model, size if policy == "sqrt" else None)
        elif self.policy == "k-of-l":
            self.checkpointed = checkpoint_some(model, self.k, side=self.side)
        else:
            if self.policy == "selective":
                from thrifty.methods.checkpointing._selective import keep_products_context

                enable_checkpointing(model, {"use_reentrant": False, "context_fn": keep_products_context})
            self.checkpointed = keep_every(model, self.every)

    def _mark(self, model: Any, size: int | None) -> None:
        """Tells a dry run how the blocks differ: by their place in a segment, or by what all of them need."""
        model.traced_whole = size is None
        if size is None:
            return
        block: Any
        for stack in in_order(model):
            for index, block in enumerate(stack):
                block.checkpoint_position = index % size

    def _full_size(self) -> int | None:
        """Blocks in a segment of the full model, where a dry run sees a shallower one."""
        layers = getattr(self.ctx.model_config, "num_hidden_layers", None)
        return root_size(layers) if isinstance(layers, int) else None

    @property
    def warms_up(self) -> bool:
        return self.policy in ("optimal", "milp")

    def on_train_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if self._before is not None:
            import torch._functorch.config as compiler

            compiler.activation_memory_budget, self._before = self._before, None

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        if self.scheduled is not None:
            self.scheduled.remove()
        return model
