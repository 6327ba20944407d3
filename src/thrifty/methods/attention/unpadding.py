"""Batches without padding.

What it does: lays the samples of a micro-batch end to end before the model sees them, so that no layer computes
padding, and lets attention run within each sample. The samples, the loss and its gradients stay those of the padded
batch. Of a classifier's last layer nothing is computed behind attention but the first token of each sample, which is
all that its head reads.

Helps: samples of unequal length, in any batch: time and memory grow with the tokens, not with the longest sample.
Does not help: samples of equal length. Each sample is an attention kernel of its own, so that on an accelerator many
very short samples may be faster padded.
Limits: models that take `position_ids` and attend through transformers' interface (Llama, Qwen, Mistral, GPT-2, BERT
and many more); classifiers with the layers of BERT. Checked on real samples before training: the logits must be those
of the padded batch, else the method refuses. Padding on the right. Dropout draws other numbers, and on a processor
16 bits for each.
Source: Zeng et al., "ByteTransformer: A High-Performance Transformer Boosted for Variable-Length Inputs", 2022; Krell
et al., "Efficient Sequence Packing without Cross-contamination", 2021.
Library: torch's scaled_dot_product_attention, through transformers' attention interface.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from thrifty.method import Batch, Method, NotApplicable, Paper, register
from thrifty.methods._dropout import use_lean_dropout
from thrifty.methods.attention._by_sample import Layout, attention_by_sample, no_mask
from thrifty.remote_code import auto_class_name

IGNORED = -100
NAME = "thrifty_samples"
"""Under which the attention is known to transformers."""
_BY_TOKEN = ("input_ids", "token_type_ids", "labels")
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}


def join(batch: Mapping[str, Any], *, causal: bool) -> Batch | None:
    """Lays the rows of a padded batch end to end.

    Args:
        batch: `input_ids` (rows, tokens), `attention_mask` of the same shape where something is padded, on the right,
            and optionally `token_type_ids` and `labels`.
        causal: Whether position i predicts label i + 1: then the first label of each row is ignored.

    Returns:
        `input_ids`, `position_ids` and others of shape (1, tokens of all rows), `lengths` of the rows, and class labels
        as they are; None for a batch that is padded elsewhere or has rows already joined.
    """
    ids = batch["input_ids"]
    if ids.dim() != 2 or "position_ids" in batch or "inputs_embeds" in batch:
        return None
    rows, width = ids.shape
    mask = batch.get("attention_mask")
    if mask is None:
        lengths = [width] * rows
        index = torch.arange(rows * width, device=ids.device)
    else:
        kept = mask.sum(dim=1)
        places = torch.arange(width, device=ids.device)[None]
        right = (mask == (places < kept[:, None])).all() & (kept > 0).all()
        *lengths, fits = torch.cat([kept, right[None].to(kept.dtype)]).tolist()  # one copy to the host
        if not fits:
            return None
        index = mask.flatten().nonzero()[:, 0]
    found: Batch = {"position_ids": (index % width)[None], "lengths": lengths}
    for key, value in batch.items():
        if key in ("attention_mask", "sample_id"):
            continue
        if torch.is_tensor(value) and value.shape[:2] == ids.shape:
            value = value.flatten(0, 1)[index]
            if key == "labels" and causal:
                value = torch.where(index % width == 0, IGNORED, value)
            value = value[None]
        found[key] = value
    return found


class Unpadded:
    """A model that is given joined batches: its attention within samples, and the first tokens for its head.

    Args:
        model: A causal or masked language model, or a classifier with the layers of BERT.

    Raises:
        NotApplicable: The model is of another kind.
    """

    def __init__(self, model: nn.Module) -> None:
        bare = _bare(model)
        name, kind = type(bare).__name__, auto_class_name(bare)
        self.causal = kind == "AutoModelForCausalLM"
        takes = inspect.signature(bare.forward).parameters
        if "position_ids" not in takes or not hasattr(bare, "set_attn_implementation"):
            raise _refusal(f"{name} takes no position_ids, so that samples could not be kept apart")
        if not self.causal and kind not in ("AutoModelForMaskedLM", "AutoModelForSequenceClassification"):
            raise _refusal(f"{name} is neither a language model nor a classifier")
        place = last_projection(bare) if kind == "AutoModelForSequenceClassification" else None
        if place is None and kind == "AutoModelForSequenceClassification":
            raise _refusal(f"the layers of {name} are not built like BERT's")
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention_by_sample)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)
        self.model, self.place = bare, place
        self.before: str | None = None
        self.wanted: Callable[[bool], bool] = lambda training: training
        """Says, given the model's mode, whether nobody looks at the logits by row of the coming forward pass."""
        self.padded = self.computed = 0
        if bare.config._attn_implementation != NAME:
            self.before = bare.config._attn_implementation
            bare.set_attn_implementation(NAME)
        remove_hooks(bare)
        if place is not None:
            place.register_forward_pre_hook(_first_tokens)
        self.listen(model)

    def listen(self, model: nn.Module) -> None:
        """Joins the batches that this module is called with: the outermost one, where others were put around.

        First of all hooks, so that what else is done to labels sees those of the joined batch.
        """
        remove_hooks(model, _join_batch)
        model.register_forward_pre_hook(functools.partial(_join_batch, self), prepend=True, with_kwargs=True)

    def restore(self) -> None:
        """Gives the model its own attention and its whole last layer back."""
        remove_hooks(self.model)
        self.model.set_attn_implementation(self.before or "sdpa")

    def inputs(self, batch: Mapping[str, Any]) -> Batch:
        """What the model is to be given instead of a padded batch; the same where it cannot be joined. See `join`."""
        if self.model.config._attn_implementation != NAME:
            raise RuntimeError("unpadding: the model's attention was changed, and samples would see each other")
        joined = join(batch, causal=self.causal)
        if joined is None:
            Layout.clear()
            return dict(batch)
        Layout.lengths = lengths = joined.pop("lengths")
        Layout.starts = torch.tensor([0, *lengths[:-1]], device=joined["input_ids"].device).cumsum(0)
        if self.causal:
            joined["use_cache"] = False
        return joined


def _join_batch(unpadded: Unpadded, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    if args or "labels" not in kwargs or not unpadded.wanted(module.training):
        positions = kwargs.get("position_ids")
        total = None if Layout.lengths is None else (1, sum(Layout.lengths))
        if positions is None or tuple(positions.shape) != total:
            Layout.clear()  # an ordinary batch, which may come at any time
        return None
    given = unpadded.inputs(kwargs)
    unpadded.padded += kwargs["input_ids"].numel()
    unpadded.computed += given["input_ids"].numel()
    return args, given


def last_projection(model: nn.Module) -> nn.Module | None:
    """The module behind attention in the last layer of an encoder built like BERT; None where there is no such."""
    for module in model.modules():
        layers = getattr(module, "layer", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
            continue
        last: Any = layers[-1]
        if all(hasattr(last, part) for part in ("attention", "intermediate", "output")):
            found = getattr(last.attention, "output", None)
            return None if hasattr(last, "crossattention") or not isinstance(found, nn.Module) else found
    return None


def _first_tokens(module: nn.Module, args: tuple[Tensor, ...]) -> Any:
    """Of (1, tokens, width) only the first token of each sample goes on, as (samples, 1, width)."""
    starts = Layout.starts
    return None if starts is None else tuple(arg[0, starts][:, None] for arg in args)


def remove_hooks(model: nn.Module, *kinds: Any) -> None:
    """Takes the hooks of an `Unpadded` off (or those of a kind), also what a copied model brought along."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "func", hook) in (kinds or (_first_tokens, _join_batch)):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _refusal(reason: str) -> NotApplicable:
    return NotApplicable(
        f"unpadding: {reason}", fix="use length-grouping, which needs nothing of the model, or remove unpadding"
    )


def check(model: nn.Module, unpadded: Unpadded, batch: Mapping[str, Any]) -> None:
    """Raises `NotApplicable` where a joined batch does not give the logits of the padded one.

    Args:
        model: Its modes and the random state are left as they were.
        unpadded: Of the same model.
        batch: A collated batch on the model's device.
    """
    modes = [(module, module.training) for module in model.modules()]
    given = {key: value for key, value in batch.items() if key not in ("labels", "sample_id")}
    model.eval()
    try:
        with torch.no_grad():
            padded = model(**given).logits.float()
            if padded.dim() == 3:
                mask = given.get("attention_mask")
                padded = padded.flatten(0, 1) if mask is None else padded[mask.bool()]
            joined = model(**unpadded.inputs(given)).logits.float()
    except (ValueError, RuntimeError, TypeError) as error:
        raise _refusal(f"{type(model).__name__} cannot be given joined samples ({error})") from error
    finally:
        Layout.clear()
        for module, mode in modes:
            module.training = mode
    joined = joined[0] if joined.dim() == 3 else joined
    dtype = next(model.parameters()).dtype
    off = float("inf") if joined.shape != padded.shape else float((joined - padded).abs().max())
    if not off <= _TOLERANCE.get(dtype, 0.1) * float(padded.abs().max()):
        raise _refusal(f"{type(model).__name__} gives other logits for joined samples (off by {off:.3g})")


@register(
    "unpadding",
    title="Batches without padding",
    section="attention",
    sources=[Paper("Zeng et al.", 2022, "arXiv:2210.03052"), Paper("Krell et al.", 2021, "arXiv:2107.02027")],
    exact=True,
    tasks=("causal-lm", "masked-lm", "text-classification"),
    claims=("attention",),
    preset={},
    library="transformers",
    conflicts_with={
        "packing": "packed rows have no padding left",
        "length-grouping": "there is no padding left to group away",
        "compile": "every batch would have a shape of its own to compile",
        "token-dropping": "it chooses tokens of each row, and there is one row",
        "mass": "it leaves tokens out of each row, and there is one row",
        "stochastic-depth": "it leaves layers out sample by sample",
        "layer-drop": "a classifier's last layer could not be left out",
        "ligo": "it runs blocks of two models on padded batches",
        "prompt-tuning": "it puts tokens before each row, and there is one row",
        "prefix-tuning": "it puts keys before each row, and there is one row",
    },
    # It compares the model as the user gave it, before surgery makes its logits trivial.
    runs_before=("section:growth", "section:initialization", "section:sparsity", "section:peft"),
    bench_order=2,
)
@dataclass(kw_only=True)
class Unpadding(Method):
    """Lays samples end to end."""

    unpadded: Unpadded | None = field(default=None, init=False, repr=False)
    _computes_loss: bool = field(default=False, init=False, repr=False)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if ctx.device_kind == "cpu":
            use_lean_dropout(model)
        if ctx.planning or ctx.data is None or ctx.data.train_dataset is None:
            return model
        self._hang(model.to(ctx.device), ctx)
        batches: Sequence[Batch] = ctx.batches(1, model)
        if batches and "input_ids" in batches[0]:
            assert self.unpadded is not None
            check(model, self.unpadded, _few(batches[0]))
        return model

    def attach(self, accelerator: Any, ctx: Any) -> None:
        if self.unpadded is None:
            return
        if _bare(ctx.model) is self.unpadded.model:
            self.unpadded.listen(ctx.model)  # others may have put adapters around it
        else:
            self._hang(ctx.model, ctx)  # or another model in its place
            if ctx.device_kind == "cpu":
                use_lean_dropout(ctx.model)

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        def joined(*args: Any, **kwargs: Any) -> Any:
            self._computes_loss = True
            try:
                return compute_loss(*args, **kwargs)
            finally:
                self._computes_loss = False

        return joined

    def wrap_training_step(self, step: Callable[..., Tensor], ctx: Any) -> Callable[..., Tensor]:
        def ended(*args: Any, **kwargs: Any) -> Tensor:
            try:
                return step(*args, **kwargs)
            finally:
                Layout.clear()  # after the backward pass, which may compute layers again

        return ended

    def on_replace(self, model: nn.Module, parameter_map: Mapping[str, str | None], ctx: Any) -> None:
        if self.unpadded is not None:
            self._hang(model, ctx)

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        if self.unpadded is not None:
            self.unpadded.restore()
            remove_hooks(model)
        return model

    def facts(self) -> dict[str, Any]:
        if self.unpadded is None or not self.unpadded.padded:
            return {}
        return {"padding left out": f"{1 - self.unpadded.computed / self.unpadded.padded:.0%}"}

    def _hang(self, model: nn.Module, ctx: Any) -> None:
        before = self.unpadded
        self.unpadded = unpadded = Unpadded(model)
        if before is not None:
            unpadded.before = before.before
            unpadded.padded, unpadded.computed = before.padded, before.computed

        def wanted(training: bool) -> bool:
            # A classifier's logits are those of the samples, joined or not.
            return self._computes_loss if training else ctx.loss_only or unpadded.place is not None

        unpadded.wanted = wanted


def _few(batch: Batch) -> Batch:
    """Four rows of different lengths are enough for a comparison."""
    rows = len(batch["input_ids"])
    mask = batch.get("attention_mask")
    order = torch.arange(rows) if mask is None else mask.sum(dim=1).argsort()
    chosen = order[torch.linspace(0, rows - 1, min(rows, 4)).long()]
    return {
        key: value[chosen.to(value.device)] if torch.is_tensor(value) and value.dim() and len(value) == rows else value
        for key, value in batch.items()
    }
