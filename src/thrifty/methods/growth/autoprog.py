"""Automated progressive learning (AutoProg).

What it does: trains in stages, each with more blocks and larger images (or longer rows) than the one before. At the
start of a stage it trains the largest candidate for a while, a random smaller one in each step, then rates all of them
by loss against cost and goes on with the best. New blocks are copies of the running mean of the block below.

Helps: training vision Transformers from scratch, whose early stages become several times cheaper.
Does not help: fine-tuning; and Kaddour et al. (2023) saw no gain of growing over a fully decayed baseline at a fixed
budget.
Limits: training from scratch; blocks must be equal; at most twice as many blocks from stage to stage; the last stage is
the full model. Width, drop-path and augmentation are not scheduled.
Source: Li et al., "Automated Progressive Learning for Efficient Training of Vision Transformers", CVPR 2022.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.architecture import copy_layer, main_blocks, set_layers
from thrifty.method import Batch, Method, NotApplicable, Paper, Phase, TrainingData, register
from thrifty.methods.growth._gates import Gate
from thrifty.methods.growth._shapes import resize_images, truncate

Candidate = tuple[int, float]
"""Blocks, and share of the image side or row length."""


def divisible(value: float, multiple: int) -> int:
    """The nearest multiple, and the next one where that would be below 90 % of the value.

    >>> [divisible(224 * share, 32) for share in (1 / 2, 2 / 3, 5 / 6, 1)]
    [128, 160, 192, 224]
    """
    rounded = max(multiple, int(value + multiple / 2) // multiple * multiple)
    return rounded + multiple if rounded < 0.9 * value else rounded


def manual_schedule(stages: int, start: float, layers: int) -> list[Candidate]:
    """Blocks and size of each stage on a line from `start` to the full model.

    >>> [(layers, round(size, 3)) for layers, size in manual_schedule(4, 0.5, 12)]
    [(6, 0.5), (8, 0.667), (10, 0.833), (12, 1.0)]
    """
    shares = [1.0] if stages == 1 else [start + (1 - start) * k / (stages - 1) for k in range(stages)]
    return [(max(1, round(share * layers)), share) for share in shares]


def spread(layers: int, total: int) -> list[int]:
    """From which of `layers` blocks each of `total` comes: every block is followed by its copies.

    >>> spread(3, 5)
    [0, 0, 1, 1, 2]
    """
    return [j * layers // total for j in range(total)]


def sub_path(own: Sequence[int], layers: int) -> list[int]:
    """Which blocks of a super-network make a sub-network: all first copies, and further ones evenly.

    Args:
        own: For each block of the super-network the block that it was copied from, as from `spread`.
        layers: Blocks of the sub-network.

    >>> sub_path([0, 0, 1, 1, 2, 2], 4)
    [0, 1, 2, 4]
    """
    firsts = [i for i, source in enumerate(own) if i == 0 or own[i - 1] != source]
    copies = [i for i in range(len(own)) if i not in firsts]
    extra = layers - len(firsts)
    return sorted([*firsts, *(copies[k * len(copies) // extra] for k in range(extra))])


class BlockMeans:
    """Running means of the blocks' weights, that new blocks are made from.

    Args:
        decay: Share of the old mean that stays in each step.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.means: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def update(self, blocks: Sequence[nn.Module]) -> None:
        """Takes the present weights in."""
        if len(self.means) != len(blocks):
            self.means = [{n: p.detach().float().clone() for n, p in block.named_parameters()} for block in blocks]
            return
        for mean, block in zip(self.means, blocks, strict=True):
            for name, p in block.named_parameters():
                mean[name] = mean[name].to(p.device).lerp_(p.detach().float(), 1 - self.decay)

    @torch.no_grad()
    def copy(self, index: int, block: nn.Module) -> nn.Module:
        """A copy of a block that holds its mean."""
        new = copy_layer(block)
        if self.means:
            for name, p in new.named_parameters():
                p.copy_(self.means[index][name])
        return new


def grow_blocks(model: nn.Module, total: int, means: BlockMeans | None = None) -> dict[str, str | None]:
    """Gives the model `total` blocks in place: each old one, followed by copies (of its mean), for one's own loop.

    Returns:
        {new parameter name: old parameter name}.
    """
    blocks = main_blocks(model, "autoprog")
    old, own = list(blocks), spread(len(blocks), total)
    means = means or BlockMeans(0.0)
    first = {source: own.index(source) for source in own}
    layers = [old[s] if first[s] == i else means.copy(s, old[s]) for i, s in enumerate(own)]
    if means.means:
        means.means = [{k: v.clone() for k, v in means.means[s].items()} for s in own]
    return _rename(model, layers, own)


def keep_blocks(model: nn.Module, kept: Sequence[int], means: BlockMeans | None = None) -> dict[str, str | None]:
    """Leaves only these blocks, in place. Returns {new parameter name: old parameter name}."""
    old = list(main_blocks(model, "autoprog"))
    if means is not None and means.means:
        means.means = [means.means[i] for i in kept]
    return _rename(model, [old[i] for i in kept], kept)


def _rename(model: nn.Module, layers: Sequence[nn.Module], own: Sequence[int]) -> dict[str, str | None]:
    blocks = main_blocks(model, "autoprog")
    set_layers(model, blocks, layers)
    return {
        f"{blocks.prefix}.{i}.{name}": f"{blocks.prefix}.{own[i]}.{name}"
        for i, layer in enumerate(layers)
        for name, _ in layer.named_parameters()
    }


@register(
    "autoprog",
    title="Automated progressive learning",
    section="growth",
    sources=[Paper("Li et al.", 2022, "arXiv:2203.14509")],
    exact=False,
    claims=("growth", "layer-schedule", "length-schedule"),
    conflicts_with={"section:peft": "adapters and prompts are of single blocks, and the search gives blocks away"},
    preset={"stages": 3, "search_steps": 1, "multiple_of": 2},
    runs_before=("section:initialization", "section:sparsity"),
)
@dataclass(kw_only=True)
class AutoProg(Method):
    """Stages of growing depth and resolution, chosen by loss against cost."""

    stages: int = 4
    """Stages of equal length; the last one is the full model."""
    start: float = 0.5
    """Share of blocks and of the image side (or row length) in the first stage."""
    search_steps: int | None = None
    """Steps of each stage in which all candidates are trained; None is a tenth of the stage, 0 takes the line from
    start to full without a search."""
    resize: bool = True
    """Grow the images (or rows of tokens) too, not the depth alone."""
    multiple_of: int | None = None
    """Sides or lengths are multiples of this; None is the patch size, or 8 tokens."""
    cost_weight: float = 0.1
    """Candidates are rated by loss x cost ** cost_weight; 0 looks at the loss only."""
    decay: float = 0.998
    """Of the running mean of the blocks' weights, that new blocks are made from."""

    depth: int = field(default=0, init=False, repr=False)
    length: int = field(default=0, init=False, repr=False)
    stage: int = field(default=0, init=False, repr=False)
    now: Candidate = field(default=(0, 1.0), init=False, repr=False)
    own: list[int] = field(default_factory=list, init=False, repr=False)
    candidates: list[Candidate] = field(default_factory=list, init=False, repr=False)
    ratings: list[float] = field(default_factory=list, init=False, repr=False)
    means: BlockMeans = field(init=False, repr=False)
    gates: list[Gate] = field(default_factory=list, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")
        if not 0 < self.start <= 1:
            raise ValueError(f"start must be above 0 and at most 1, got {self.start}")
        if self.search_steps is not None and self.search_steps < 0:
            raise ValueError(f"search_steps must not be negative, got {self.search_steps}")
        if self.multiple_of is not None and self.multiple_of < 1:
            raise ValueError(f"multiple_of must be at least 1, got {self.multiple_of}")
        if self.cost_weight < 0:
            raise ValueError(f"cost_weight must not be negative, got {self.cost_weight}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {self.decay}")
        self.means = BlockMeans(self.decay)

    def held_bytes(self, trainable: int, itemsize: float, device: str) -> int:
        return 4 * trainable  # the blocks' running means, in float32

    # --- before training ---

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        # A block that the sub-network of a step leaves out gets no gradient, which DDP has to be told.
        return {"ddp_find_unused_parameters": True} if ctx.world_size > 1 else {}

    def prepare_data(self, data: TrainingData, ctx: Any) -> TrainingData:
        count = len(data.train_dataset)
        looked_at = [data.train_dataset[i] for i in range(0, count, max(1, count // 1000))]
        self.length = max((len(sample["input_ids"]) for sample in looked_at if "input_ids" in sample), default=0)
        return data

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.ctx, self.depth = ctx, len(main_blocks(model, "autoprog"))
        plan = manual_schedule(self.stages, self.start, self.depth)
        if ctx.total_steps < self.stages * max(2, (self.search_steps or 0) + 1):
            raise NotApplicable(
                f"autoprog: the run has {ctx.total_steps} steps, too few for its stages and their search",
                key="methods.autoprog.stages",
                value=self.stages,
                fix="train longer, or with fewer stages or search_steps",
            )
        if plan[0][0] * 2 ** (self.stages - 1) < self.depth:
            raise NotApplicable(
                f"autoprog: from {plan[0][0]} blocks, doubled at each stage, {self.stages} stages do not reach "
                f"{self.depth}",
                key="methods.autoprog.start",
                value=self.start,
                fix="start larger, or take more stages",
            )
        self.now = plan[0]
        keep_blocks(model, range(plan[0][0]))
        return model

    def phases(self, model_config: Any, total_steps: int) -> list[Phase]:
        depth = model_config.num_hidden_layers
        power = 2 if hasattr(model_config, "image_size") else 1  # tokens of an image are its side squared
        firsts = [self._first(k, total_steps) for k in range(self.stages)]
        return [
            Phase(steps=after - first, description=f"{layers} layers at {size:.0%}", depth=layers / depth,
                  length=size**power if self.resize else 1.0)
            for (layers, size), (first, after) in zip(
                manual_schedule(self.stages, self.start, depth), itertools.pairwise([*firsts, total_steps]), strict=True
            )
        ]  # fmt: skip

    def _first(self, stage: int, total_steps: int) -> int:
        return round(stage * total_steps / self.stages)

    # --- during training ---

    def shape_batch(self, batch: Batch, ctx: Any) -> Batch:
        return self._shaped(batch, self._of_step()[1])

    def _shaped(self, batch: Batch, size: float) -> Batch:
        if size >= 1 or not self.resize or not all(len(v) for v in batch.values() if torch.is_tensor(v) and v.dim()):
            return batch
        if "pixel_values" in batch:
            full = batch["pixel_values"].shape[-1]
            side = min(full, divisible(size * full, self.multiple_of or self.ctx.model.config.patch_size))
            pixels = resize_images(batch["pixel_values"], side)
            return batch if side == full else {**batch, "pixel_values": pixels, "interpolate_pos_encoding": True}
        length = divisible(size * self.length, self.multiple_of or 8)
        return batch if length >= batch["input_ids"].shape[1] else truncate(batch, length)

    def _of_step(self) -> Candidate:
        """What is trained in the coming step: the stage's choice, or in a search one of the candidates."""
        if not self.candidates:
            return self.now
        pick = torch.randint(len(self.candidates), (1,), generator=self.ctx.rng("autoprog", step=self.ctx.step))
        return self.candidates[int(pick)]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self._open(self._of_step()[0])

    def _open(self, layers: int) -> None:
        if self.gates:
            kept = set(sub_path(self.own, layers))
            for index, gate in enumerate(self.gates):
                gate.keep = index in kept

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        model, step = kw["model"], state.global_step
        self.means.update(list(main_blocks(model, "autoprog")))
        if step >= state.max_steps:
            return
        if self.candidates and step == self._first(self.stage, self.ctx.total_steps) + self._search_steps():
            self._choose(model)
        elif self.stage + 1 < self.stages and step == self._first(self.stage + 1, self.ctx.total_steps):
            self.stage += 1
            self._enter(model)

    def _search_steps(self) -> int:
        if self.search_steps is not None:
            return self.search_steps
        return max(1, self.ctx.total_steps // self.stages // 10)

    def _enter(self, model: nn.Module) -> None:
        """Grows to the full model, to the next one of the schedule, or to the largest candidate of a search."""
        last = self.stage == self.stages - 1
        planned = manual_schedule(self.stages, self.start, self.depth)[self.stage]
        if last or not self._search_steps():
            self.now = (max(self.now[0], planned[0]), max(self.now[1], planned[1]))
            self._grow(model, self.now[0])
            return
        # What is left must still reach the full depth by doubling.
        least = max(self.now[0], -(-self.depth // 2 ** (self.stages - 1 - self.stage)))
        most = min(2 * self.now[0], self.depth)
        layers = sorted({least, max(least, min(planned[0], most)), most})
        sizes = sorted({self.now[1], max(planned[1], self.now[1]), 1.0}) if self.resize else [self.now[1]]
        self.candidates = [(count, size) for count in layers for size in sizes]
        self.own = spread(self.now[0], most)
        self._grow(model, most)
        self._gate(model)

    def _grow(self, model: nn.Module, layers: int) -> None:
        if layers > len(main_blocks(model, "autoprog")):
            self.ctx.replace_model(model, grow_blocks(model, layers, self.means))

    def _gate(self, model: nn.Module) -> None:
        self.gates = [Gate(block, []) for block in main_blocks(model, "autoprog")]

    def _choose(self, model: Any) -> None:
        """Rates the candidates on real batches, and keeps the blocks of the best."""
        batches = self.ctx.batches(4, model)
        was_training = model.training
        model.eval()
        for gate in self.gates:
            gate.block.training = True  # lets the gate skip; what is inside the block stays in eval mode
        self.ratings = []
        for layers, size in self.candidates:
            self._open(layers)
            with torch.no_grad(), self.ctx.trainer.accelerator.autocast():
                losses = [float(model(**self._shaped(batch, size)).loss) for batch in batches]
            power = 2 if "pixel_values" in batches[0] else 1
            cost = layers / self.depth * size**power
            self.ratings.append(sum(losses) / len(losses) * cost**self.cost_weight)
        model.train(was_training)
        self.now = self.candidates[self.ratings.index(min(self.ratings))]
        for gate in self.gates:
            gate.remove()
        kept = sub_path(self.own, self.now[0])
        self.candidates, self.gates = [], []
        if len(kept) < len(self.own):
            self.ctx.replace_model(model, keep_blocks(model, kept, self.means))

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "now": list(self.now),
            "own": list(self.own),
            "candidates": [list(candidate) for candidate in self.candidates],
            "means": [{name: value.cpu() for name, value in mean.items()} for mean in self.means.means],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stage, self.own = state["stage"], list(state["own"])
        self.now = (state["now"][0], state["now"][1])
        self.candidates = [(layers, size) for layers, size in state["candidates"]]
        self.means.means = [dict(mean) for mean in state["means"]]

    def restore_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        for gate in self.gates:
            gate.remove()
        self.gates = []
        layers = len(self.own) if self.candidates else self.now[0]
        present = len(main_blocks(model, "autoprog"))
        if layers > present:
            grow_blocks(model, layers)
        elif layers < present:
            keep_blocks(model, range(layers))
        if self.candidates:
            self._gate(model)
        return model
