"""Cross-entropy without the logits.

What it does: multiplies the hidden states with the head in chunks of tokens, and takes loss and gradients of a chunk
before the next one is begun. The logits of the whole batch, tokens times vocabulary, never exist; those of tokens whose
label is ignored (prompts, padding, what is not masked) are not computed at all.

Helps: large vocabularies: logits and their gradients are often the peak of memory, with checkpointing nearly always.
Speed, by the share of the tokens that are not trained on: answers to long prompts, masked language models.
Does not help: small vocabularies, or where attention or the optimizer states are the peak. Where every token is trained
on it is no faster, since the gradient of the head is added up chunk by chunk.
Limits: language models with one linear head; in training, and in evaluation where only the loss is asked for, the
outputs hold no logits. With weights in half precision the gradient of the head is summed over the chunks in that
precision. On an accelerator the host waits once a micro-batch for the number of trained tokens.
Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024; the z-loss is that of Chowdhery et
al., "PaLM: Scaling Language Modeling with Pathways", 2022.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.remote_code import auto_class_name
from thrifty.safety.normalise import ignores_num_items

IGNORED = -100


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    chunks: int = 8,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` with `targets`. Gradients are computed in the forward pass.

    Args:
        hidden: (..., hidden size).
        weight: (vocabulary, hidden size).
        targets: (...) token ids; -100 is ignored.
        bias: (vocabulary,).
        chunks: Parts into which the tokens are divided.
        label_smoothing: Share of the probability that the target spreads evenly over the vocabulary.
        z_loss: Weight of the mean square of the logarithm of the softmax's normaliser.
        softcap: The logits are `softcap * tanh(logits / softcap)`.
        num_items: What the summed loss is divided by; None takes the number of targets that are not ignored.

    Returns:
        The loss, a float32 scalar. It can be differentiated once.
    """
    graph = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    options = _Options(chunks, label_smoothing, z_loss, softcap, graph)
    loss: Any = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, num_items, options)
    return loss


@dataclass(frozen=True)
class _Options:
    chunks: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    gradients: bool


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Keeps the gradients of the *summed* loss: what it is divided by, and the scale of a gradient scaler, come in the
    backward pass. So small gradients do not vanish in float16."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        num_items: Tensor | int | None,
        options: _Options,
    ) -> Tensor:
        # A dry run on `meta` traces what runs under the processor's autocast.
        device = "cpu" if hidden.is_meta else hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        wanted = [options.gradients and needed for needed in ctx.needs_input_grad[:3]]
        with torch.autocast(device, enabled=False):
            rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
            head = weight.to(dtype)
            grads: list[Any] = [
                torch.empty_like(rows) if wanted[0] else None,
                torch.zeros_like(weight) if wanted[1] else None,
                torch.zeros_like(bias) if wanted[2] and bias is not None else None,
            ]
            kind = torch.float64 if dtype == torch.float64 else torch.float32
            total = torch.zeros((), dtype=kind, device=hidden.device)
            start = 0
            for part in range(options.chunks):
                stop = len(rows) * (part + 1) // options.chunks
                if stop > start:
                    piece = rows[start:stop].to(dtype)
                    total += _one_chunk(piece, head, bias, labels[start:stop], options, grads, slice(start, stop))
                start = stop
            count: Any = labels.ne(IGNORED).sum() if num_items is None else num_items
        ctx.grads, ctx.count, ctx.shape = grads, count, hidden.shape
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("chunked_cross_entropy: the gradients of the first backward pass were not kept")
        scale = gradients[0] / ctx.count
        hidden, weight, bias = (None if grad is None else grad.mul_(scale.to(grad.dtype)) for grad in ctx.grads)
        ctx.grads = None
        return None if hidden is None else hidden.view(ctx.shape), weight, bias, None, None, None


def _one_chunk(
    piece: Tensor,
    head: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    options: _Options,
    grads: list[Any],
    place: slice,
) -> Tensor:
    """The summed loss of some rows; their gradients go into `grads`. Works in one float32 buffer of rows times
    vocabulary."""
    logits = piece @ head.t()
    if bias is not None:
        logits += bias.to(logits.dtype)
    logits = logits.float() if logits.dtype != torch.float64 else logits
    slope = None
    if options.softcap is not None:
        logits.div_(options.softcap).tanh_()
        slope = 1 - logits.square() if options.gradients else None
        logits.mul_(options.softcap)
    counts = labels.ne(IGNORED)
    ids = labels.clamp(min=0)[:, None]
    picked = logits.gather(1, ids)[:, 0]
    smoothing = options.label_smoothing
    mean = logits.mean(dim=1) if smoothing else None
    largest = logits.amax(dim=1, keepdim=True)
    soft = logits.sub_(largest).exp_()
    normaliser = soft.sum(dim=1, keepdim=True)
    log_z = (normaliser.log() + largest)[:, 0]
    losses = log_z - (1 - smoothing) * picked
    if mean is not None:
        losses -= smoothing * mean
    if options.z_loss:
        losses += options.z_loss * log_z.square()
    total = losses.masked_fill_(~counts, 0.0).sum()
    if not options.gradients:
        return total
    soft.div_(normaliser)
    if options.z_loss:
        soft.mul_(1 + 2 * options.z_loss * log_z[:, None])
    soft.scatter_add_(1, ids, torch.full_like(picked, smoothing - 1)[:, None])
    if smoothing:
        soft.sub_(smoothing / soft.shape[1])
    if slope is not None:
        soft.mul_(slope)
    soft.mul_(counts[:, None])
    if grads[2] is not None:
        grads[2] += soft.sum(dim=0)
    slopes = soft.to(head.dtype)
    if grads[0] is not None:
        grads[0][place] = slopes @ head
    if grads[1] is not None:
        if grads[1].dtype == slopes.dtype:
            grads[1].addmm_(slopes.t(), piece)
        else:
            grads[1] += slopes.t() @ piece
    return total


class ChunkedHead:
    """Hooks on a Hugging Face language model: in training, labels are taken out of its inputs, the loss is computed
    where the head would be, and put into the outputs.

    Args:
        model: The model, peft's wrapper included.
        chunks: See `chunked_cross_entropy`, also for the next two.
        label_smoothing: The same.
        z_loss: The same.
        divides: Whether the loss is divided by the argument `num_items_in_batch`, where it is given.
        chosen_only: Whether tokens whose label is ignored are left out of the product. Their number depends on the
            data, which a dry run does not have.

    Raises:
        NotApplicable: The model is no language model with one linear head.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunks: int = 8,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        divides: bool = True,
        chosen_only: bool = False,
    ) -> None:
        bare = _bare(model)
        kind = auto_class_name(bare)
        head = bare.get_output_embeddings() if hasattr(bare, "get_output_embeddings") else None
        if kind not in ("AutoModelForCausalLM", "AutoModelForMaskedLM") or head is None:
            raise NotApplicable(
                f"chunked-cross-entropy: {type(bare).__name__} is no causal or masked language model",
                fix="remove chunked-cross-entropy from the methods",
            )
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise NotApplicable(
                f"chunked-cross-entropy: the head is a {type(head).__name__}, not a plain linear layer",
                fix="leave the head out of adapters and quantization, or remove chunked-cross-entropy",
            )
        text = bare.config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.balance: float = getattr(text, "router_aux_loss_coef", 0.0) or 0.0
        self.shifts = kind == "AutoModelForCausalLM"
        self.chunks, self.label_smoothing, self.z_loss, self.divides = chunks, label_smoothing, z_loss, divides
        self.chosen_only = chosen_only
        self.always = False  # also outside of training: for the comparison with the model's own loss
        self.loss_only: Callable[[], bool] = lambda: False
        """Says outside of training whether nothing but the loss is wanted of the coming forward pass."""
        self._targets: Tensor | None = None
        self._items: Any = None
        self._loss: Tensor | None = None
        unhook(model)
        model.register_forward_pre_hook(self._take_labels, with_kwargs=True)
        head.register_forward_pre_hook(self._replace_head)
        model.register_forward_hook(self._give_loss)

    def _take_labels(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self._targets = self._loss = None
        labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
        if (labels is None and shifted is None) or not (module.training or self.always or self.loss_only()):
            return None
        if shifted is None and self.shifts:
            assert labels is not None
            shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        self._targets = labels if shifted is None else shifted
        self._items = kwargs.get("num_items_in_batch") if self.divides else None
        return args, {key: value for key, value in kwargs.items() if key not in ("labels", "shift_labels")}

    def _replace_head(self, head: nn.Module, args: tuple[Tensor, ...]) -> Any:
        if self._targets is None or self._loss is not None:
            return None
        hidden, targets = args[0], self._targets
        if hidden.shape[:-1] != targets.shape:
            raise NotApplicable(
                f"chunked-cross-entropy: the head sees {tuple(hidden.shape[:-1])} positions, and there are labels for "
                f"{tuple(targets.shape)}",
                fix="remove chunked-cross-entropy from the methods",
            )
        linear: Any = head
        targets = targets.to(hidden.device)
        if self.chosen_only:
            index = targets.flatten().ne(IGNORED).nonzero()[:, 0]
            hidden, targets = hidden.flatten(0, -2).index_select(0, index), targets.flatten()[index]
        self._loss = chunked_cross_entropy(
            hidden,
            linear.weight,
            targets,
            linear.bias,
            chunks=self.chunks,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            num_items=self._items,
        )
        # The model goes on with the logits of no position at all.
        return (args[0].detach()[..., :0, :],)

    def _give_loss(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._targets is None:
            return None
        loss, self._targets, self._loss = self._loss, None, None
        if loss is None or not isinstance(output, Mapping):
            raise NotApplicable(
                f"chunked-cross-entropy: {type(module).__name__} does not call its head, or returns no mapping",
                fix="use return_dict=True, or remove chunked-cross-entropy from the methods",
            )
        if self.balance and output.get("aux_loss") is not None:
            loss = loss + self.balance * output["aux_loss"].to(loss.device)
        kind: Any = type(output)
        return kind(loss=loss, **{key: value for key, value in output.items() if key not in ("loss", "logits")})


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def unhook(model: nn.Module) -> None:
    """Takes the hooks of every `ChunkedHead` off, also those that a copied model brought along."""
    for module in (model, _bare(model).get_output_embeddings()):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), ChunkedHead):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


@torch.no_grad()
def compare(model: nn.Module, head: ChunkedHead) -> None:
    """Raises `NotApplicable` where the chunked loss of a few made-up tokens is not the model's own."""
    device = next(model.parameters()).device
    ids = (torch.arange(16, device=device) + 3).remainder(_bare(model).config.get_text_config().vocab_size).view(2, 8)
    was_training = model.training
    plain = {"label_smoothing": 0.0, "z_loss": 0.0}
    own = {key: getattr(head, key) for key in plain}
    model.eval()
    losses = []
    try:
        vars(head).update(plain)
        for head.always in (False, True):
            losses.append(float(model(input_ids=ids, labels=ids).loss))
    finally:
        head.always = False
        vars(head).update(own)
        model.train(was_training)
    exact = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters() if p.is_floating_point())
    if not abs(losses[0] - losses[1]) <= (1e-4 if exact else 3e-2) * abs(losses[0]):
        raise NotApplicable(
            f"chunked-cross-entropy: {type(_bare(model)).__name__} computes a loss of {losses[0]:.5f} where the "
            f"cross-entropy of its head is {losses[1]:.5f}: it does more to the logits than is known here",
            fix="remove chunked-cross-entropy from the methods",
        )


@register(
    "chunked-cross-entropy",
    title="Chunked cross-entropy",
    section="loss",
    sources=[Paper("Hsu et al.", 2024, "arXiv:2410.10989"), Paper("Chowdhery et al.", 2022, "arXiv:2204.02311")],
    exact=True,
    tasks=("causal-lm", "masked-lm"),
    claims=("loss",),
    preset={"chunks": 3, "z_loss": 0.01},
    choices={"free": [{}]},
    bench_order=30,
)
@dataclass(kw_only=True)
class ChunkedCrossEntropy(Method):
    """The loss chunk by chunk."""

    chunks: int = 8
    """Parts into which the tokens of a micro-batch are divided: more need less memory and make smaller products, which
    lose some time where a part has few tokens."""
    label_smoothing: float = 0.0
    """Share of the target's probability that is spread over the vocabulary."""
    z_loss: float = 0.0
    """Weight of the squared logarithm of the softmax's normaliser, which keeps logits from drifting; PaLM has 1e-4."""

    head: ChunkedHead | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"chunks must be at least 1, got {self.chunks}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if self.z_loss < 0:
            raise ValueError(f"z_loss must not be negative, got {self.z_loss}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        if args.label_smoothing_factor:
            raise NotApplicable(
                "chunked-cross-entropy: the trainer's label smoothing needs the logits",
                key="label_smoothing_factor",
                value=args.label_smoothing_factor,
                fix="set methods.chunked-cross-entropy.label_smoothing instead",
            )
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise NotApplicable(
                "chunked-cross-entropy: FSDP and DeepSpeed shard the head, whose weight is needed whole",
                fix="train without sharding, or remove chunked-cross-entropy from the methods",
            )
        return {}

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self._hang(model, ctx)
        assert self.head is not None
        if not ctx.planning:
            compare(model, self.head)
            # BERT's and others' losses are means, whatever the number of items: then the trainer does the division.
            takes = inspect.signature(_bare(model).forward).parameters.values()
            if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes):
                ids = torch.full((1, 4), 3, device=next(model.parameters()).device)
                self.head.divides = not ignores_num_items(model, {"input_ids": ids, "labels": ids})
        return model

    def attach(self, accelerator: Any, ctx: Any) -> None:
        if ctx.trainer.compute_loss_func is not None:
            raise NotApplicable(
                "chunked-cross-entropy: a loss function of your own needs the logits",
                key="compute_loss_func",
                fix="leave it out, or remove chunked-cross-entropy from the methods",
            )

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        self._hang(model, ctx)

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        unhook(model)
        return model

    def _hang(self, model: nn.Module, ctx: Any) -> None:
        divides = True if self.head is None else self.head.divides
        self.head = ChunkedHead(
            model,
            chunks=self.chunks,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            divides=divides,
            chosen_only=not ctx.planning,
        )
        # The smoothed loss is no measure to validate by.
        if not self.label_smoothing and not self.z_loss:
            self.head.loss_only = lambda: ctx.loss_only
