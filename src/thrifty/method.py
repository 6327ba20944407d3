"""`Method`: the contract that every technique fulfils.

A technique is one module under `thrifty.methods` (or in somebody's own package, through the entry point
`thrifty.methods`): a docstring that is its card, a pure form usable in any PyTorch loop, and a thin `Method` that
plugs it into `thrifty.Trainer`. All hooks are optional; the trainer calls only those that a method overrides.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from thrifty.errors import InputError, NotApplicable
from thrifty.registry import registry

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from thrifty.context import Context

__all__ = ["Method", "MethodSpec", "NotApplicable", "Paper", "Phase", "TrainingData", "register", "registry"]

Batch = dict[str, Any]
SavesAs = Literal["plain", "peft", "remote_code"]


@dataclass(frozen=True)
class Paper:
    """A source: first author(s), year, and where it is found."""

    authors: str
    year: int
    reference: str

    def __str__(self) -> str:
        return f"{self.authors} {self.year}, {self.reference}"


@dataclass(kw_only=True)
class TrainingData:
    """What `prepare_data` may change. The datasets are map-style and every sample carries `sample_id`."""

    train_dataset: Any
    eval_dataset: Any = None
    data_collator: Callable[[list[Batch]], Batch]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of the run in which a step is cheaper than a full one, for the planner.

    Args:
        steps: Optimizer steps that this phase lasts.
        description: For people.
        depth: Share of the blocks that run (their mean where they are drawn).
        length: Share of the sequence that runs.
        batch: Share of the global batch.
    """

    steps: int
    description: str
    depth: float = 1.0
    length: float = 1.0
    batch: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """What a method declares about itself. So neither recipe, planner nor bench names a method."""

    name: str
    title: str
    section: str
    sources: tuple[Paper, ...]
    exact: bool
    """Does it leave the mathematics of a step unchanged, to rounding?"""
    micro_batch_invariant: bool = True
    """Do N micro-batches of 1 give what 1 micro-batch of N gives?"""
    resumable: bool = True
    saves_as: SavesAs = "plain"
    preset: Mapping[str, Any] = field(default_factory=dict)
    """Small settings under which it acts within two steps."""
    requires: tuple[str, ...] = ()
    """Names of methods that must be in the recipe too."""
    conflicts_with: Mapping[str, str] = field(default_factory=dict)
    """Other methods (or `section:NAME`) that cannot be in the same recipe, with the reason."""
    claims: tuple[str, ...] = ()
    """Slots that only one method may hold: optimizer, attention, precision, loss, schedule, ..."""
    runs_before: tuple[str, ...] = ()
    """Methods (or `section:NAME`) whose hooks must run after this one's."""
    processes: bool = True
    """Do two processes give what one gives?"""
    tasks: tuple[str, ...] = ()
    """Tasks it works on; empty means all."""
    library: str | None = None
    extra: str | None = None
    choices: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Settings the planner may try: {"free": [...]} without leave, {"accelerator": [...]} also, where the device has a
    memory of its own, {"allow": [...]} only with the user's leave."""
    bench_order: int | None = None
    """Place in the bench's additive table; None keeps it out."""
    emulated: Mapping[str, str] = field(default_factory=dict)
    """Kinds of devices (`cpu`, ...) on which it only does as if, with what that means for its numbers there."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form, as `thrifty methods --json` prints it."""
        return {
            "name": self.name,
            "section": self.section,
            "title": self.title,
            "sources": [str(source) for source in self.sources],
            "exact": self.exact,
            "resumable": self.resumable,
            "saves_as": self.saves_as,
            "requires": list(self.requires),
            "conflicts_with": dict(self.conflicts_with),
            "claims": list(self.claims),
            "tasks": list(self.tasks),
            "library": self.library,
            "extra": self.extra,
            "emulated": dict(self.emulated),
        }


@dataclass(kw_only=True)
class Method:
    """Base of all methods. Subclasses are keyword-only dataclasses: their fields are their settings."""

    spec: ClassVar[MethodSpec]

    # --- what the method says about itself ---

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def saves_as(self) -> SavesAs:
        """How the result loads. A property, since it may depend on the settings."""
        return self.spec.saves_as

    @property
    def no_decay(self) -> tuple[str, ...]:
        """Substrings of parameter names that weight decay must leave alone."""
        return ()

    def reason(self) -> str:
        """Why somebody would have it in a recipe: the first sentence of the card."""
        return card_of(type(self)).summary

    def settings(self) -> dict[str, Any]:
        """The settings that differ from the defaults, ready for YAML."""
        changed = {}
        for f in fields(self):
            if not f.init:
                continue
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            value = getattr(self, f.name)
            if value != default:
                changed[f.name] = list(value) if isinstance(value, tuple) else value
        return changed

    def facts(self) -> Mapping[str, Any]:
        """What it measured or found out during the run, for the log and the report: short names and values."""
        return {}

    def phases(self, model_config: Any, total_steps: int) -> list[Phase] | None:
        """The phases of the run where what a step costs changes in mid-run; None where it does not.

        A dry run is of the full model: `prepare_model` of a method with phases is not called in it.
        """
        return None

    @property
    def warms_up(self) -> bool:
        """Whether the first micro-batch differs from all later ones (it is measured): a dry run leaves it out."""
        return False

    def held_bytes(self, trainable: int, itemsize: float, device: str) -> int:
        """Bytes that the method itself keeps on the device during training, which a dry run of a step does not show.

        Args:
            trainable: Trainable parameters of the model.
            itemsize: Bytes of each.
            device: Kind of device (`cpu`, `cuda`, ...): what is held on the host counts on a CPU only.
        """
        return 0

    # --- before training ---

    def configure(self, args: TrainingArguments, ctx: Context) -> Mapping[str, Any]:
        """Returns the `TrainingArguments` fields to set. Raises `NotApplicable` where the method cannot work."""
        return {}

    def prepare_data(self, data: TrainingData, ctx: Context) -> TrainingData:
        """Changes datasets and collator. Must be deterministic."""
        return data

    def prepare_model(self, model: nn.Module, ctx: Context) -> nn.Module:
        """Surgery before the optimizer exists. The global RNG is seeded for this call."""
        return model

    def attach(self, accelerator: Accelerator, ctx: Context) -> None:
        """Once, when the accelerator exists and nothing was prepared yet."""

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Context) -> torch.optim.Optimizer:
        """Builds the optimizer from groups of `params`, `names`, `weight_decay`. Needs the claim `optimizer`."""
        raise NotImplementedError

    def adjust_groups(self, groups: list[dict[str, Any]], ctx: Context) -> list[dict[str, Any]]:
        """Splits or changes parameter groups (`params`, `names`, `weight_decay`, optionally `lr`)."""
        return groups

    def adjust_optimizer(self, optimizer: torch.optim.Optimizer, ctx: Context) -> None:
        """Hangs hooks on an optimizer that was just built, whoever built it; in a dry run too."""

    def build_schedule(self, optimizer: torch.optim.Optimizer, total_steps: int, ctx: Context) -> Any:
        """Builds the learning-rate schedule. Needs the claim `schedule`."""
        raise NotImplementedError

    # --- during training ---

    def draw(self, next_batch: Callable[[], Batch], count: int, ctx: Context) -> list[Batch]:
        """Chooses which samples make this step: `count` micro-batches, from as many draws as it likes."""
        raise NotImplementedError

    def shape_batch(self, batch: Batch, ctx: Context) -> Batch:
        """Changes a micro-batch of the coming step before its targets are counted: its length, its resolution."""
        return batch

    def wrap_training_step(self, step: Callable[..., torch.Tensor], ctx: Context) -> Callable[..., torch.Tensor]:
        """Middleware around forward and backward of a micro-batch: `step(model, inputs, num_items_in_batch)`."""
        return step

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Context) -> Callable[..., Any]:
        """Middleware around the loss in training: `compute_loss(model, inputs, num_items_in_batch)`."""
        return compute_loss

    def wrap_update(self, update: Callable[[], None], ctx: Context) -> Callable[[], None]:
        """Middleware around the optimizer step."""
        return update

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """As in `transformers.TrainerCallback`; so are the other events."""

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """At the beginning of an optimizer step."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """After an optimizer step: `state.global_step` counts it already. The model may be replaced here."""

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """After the last step."""

    def on_replace(self, model: nn.Module, parameter_map: Mapping[str, str | None], ctx: Context) -> None:
        """The model was replaced (by another method): {new name: old name, or None}. Re-attach what was attached."""

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluation sees other weights inside this context."""
        yield

    # --- afterwards ---

    def finish(self, model: nn.Module, ctx: Context) -> nn.Module:
        """Merge, fold, average, unmask: the model as it is saved."""
        return model

    def save_files(self, model: nn.Module, folder: str, ctx: Context) -> None:
        """Writes what must stand beside the saved model (a modelling file, an adapter). After `save_pretrained`."""

    def state_dict(self) -> dict[str, Any]:
        """All that must survive a kill: tensors, numbers, strings, lists, dicts. Loading replaces."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the state with what `state_dict` returned."""

    @property
    def state_per_rank(self) -> bool:
        """Does the state differ between processes?"""
        return False

    def restore_model(self, model: nn.Module, ctx: Context) -> nn.Module:
        """Brings the model into the shape that the just loaded state implies, before the weights are loaded."""
        return model


@dataclass(frozen=True)
class Card:
    """A method card, parsed from the module docstring."""

    summary: str
    parts: Mapping[str, str]
    text: str


CARD_PARTS = ("What it does", "Helps", "Does not help", "Limits", "Source")


def card_of(cls: type[Method]) -> Card:
    """Parses the docstring of the method's module into its card. Raises `InputError` where a part is missing."""
    text = (sys.modules[cls.__module__].__doc__ or "").strip()
    parts: dict[str, str] = {}
    current = None
    for line in text.splitlines():
        head, colon, rest = line.partition(":")
        if colon and head.strip() in (*CARD_PARTS, "Costs", "Library"):
            current = head.strip()
            parts[current] = rest.strip()
        elif current is not None:
            parts[current] = f"{parts[current]} {line.strip()}".strip()
    missing = [part for part in CARD_PARTS if not parts.get(part)]
    if missing:
        raise InputError(
            "the module docstring lacks parts of the method card",
            key=cls.__module__,
            value=missing,
            fix="start a paragraph with each of " + ", ".join(f"'{part}:'" for part in CARD_PARTS),
        )
    summary = parts["What it does"].split(". ")[0].rstrip(".") + "."
    return Card(summary=summary[:1].upper() + summary[1:], parts=parts, text=text)


M = TypeVar("M", bound=type[Method])


def register(name: str, **declarations: Any) -> Callable[[M], M]:
    """Registers a method under `name` with the declarations of `MethodSpec`."""
    declarations["sources"] = tuple(declarations.get("sources", ()))
    spec = MethodSpec(name=name, **declarations)

    def decorate(cls: M) -> M:
        cls.spec = spec
        registry.add(name, cls)
        return cls

    return decorate


def overrides(method: Method, hook: str) -> bool:
    """Does the method override this hook?"""
    return getattr(type(method), hook) is not getattr(Method, hook)
