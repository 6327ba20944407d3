"""Faults that can be seen before the first step: each check is a pure function that returns findings of one line.

A finding of level `error` means that training would silently do something else than asked, or would fail later;
`settle` turns errors into one `InputError`. Batches are collated batches of tensors as the model gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from thrifty.errors import InputError

IGNORE = -100


@dataclass(frozen=True)
class Finding:
    """One line about the run to come; `fix` belongs to errors."""

    level: Literal["error", "notice"]
    check: str
    text: str
    fix: str | None = None


def settle(findings: Iterable[Finding], report: Callable[[str], None] = print) -> None:
    """Reports the notices and refuses on errors.

    Raises:
        InputError: At least one finding is an error; the message lists all of them.
    """
    findings = list(findings)
    for finding in findings:
        if finding.level == "notice":
            report(finding.text)
    if errors := [f for f in findings if f.level == "error"]:
        fixes = "; ".join(dict.fromkeys(f.fix for f in errors if f.fix))
        raise InputError("; ".join(f.text for f in errors), key=errors[0].check, fix=fixes or None)


def trainable_tokens(batches: Sequence[Mapping[str, Any]], *, causal: bool = True) -> list[Finding]:
    """The share of tokens that take part in the loss; none at all, or none in a batch, is an error.

    Args:
        batches: With `labels` of shape (rows, length) or (rows,).
        causal: Whether the model shifts labels, so that the first position never counts.
    """
    counts: list[tuple[int, int]] = []
    for batch in batches:
        labels = batch["labels"]
        labels = labels[:, 1:] if causal and labels.dim() > 1 else labels
        mask = batch.get("attention_mask")
        real = int(mask.sum()) if mask is not None and mask.shape == batch["labels"].shape else labels.numel()
        counts.append((int((labels != IGNORE).sum()), max(real, 1)))
    trained, total = sum(c for c, _ in counts), sum(t for _, t in counts)
    if trained == 0:
        return [
            Finding(
                "error",
                "labels",
                "no token takes part in the loss: every label is -100",
                "check train_on_prompt, the chat template's assistant mask, and max_length (it may cut the answer off)",
            )
        ]
    if empty := [i for i, (count, _) in enumerate(counts) if count == 0]:
        return [
            Finding(
                "error",
                "labels",
                f"{len(empty)} of {len(counts)} batches looked at have no token in the loss (first: batch {empty[0]})",
                "leave out samples without an answer, or raise max_length",
            )
        ]
    return [Finding("notice", "labels", f"{100 * trained / total:.1f} % of the tokens take part in the loss")]


def end_token(tokenizer: Any, batches: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Where padding and end share one id, masking by id hides the end: then the model never learns to stop."""
    eos = tokenizer.eos_token_id
    if eos is None or tokenizer.pad_token_id != eos or any(bool((b["labels"] == eos).any()) for b in batches):
        return []
    name = tokenizer.eos_token
    for batch in batches:
        last = _last_attended(batch)
        if bool((last == eos).any()):
            return [
                Finding(
                    "error",
                    "pad_token",
                    f"samples end in {name}, but its label is -100: pad_token is eos_token and was masked by id",
                    "mask padding by position (thrifty's own collators do), or give the tokenizer another pad_token",
                )
            ]
    return [Finding("notice", "pad_token", f"{name} occurs in no label, so the model will not learn where to stop")]


def special_tokens(tokenizer: Any, batches: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """A template that writes the begin token and a tokenizer that adds it give it twice."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    fix = "tokenize with add_special_tokens=False where the text or template already has them"
    found: list[Finding] = []
    for batch in batches:
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if mask is None or mask.shape != ids.shape or ids.shape[1] < 2:
            continue
        rows = torch.arange(ids.shape[0], device=ids.device)
        start = mask.long().argmax(dim=1).clamp(max=ids.shape[1] - 2)
        if bos is not None and bos != eos and bool(((ids[rows, start] == bos) & (ids[rows, start + 1] == bos)).any()):
            found.append(Finding("error", "bos_token", f"samples begin with {tokenizer.bos_token} twice", fix))
        end = (ids.shape[1] - 1 - mask.long().flip(1).argmax(dim=1)).clamp(min=1)
        both_real = mask[rows, end].bool() & mask[rows, end - 1].bool()
        twice = (ids[rows, end] == eos) & (ids[rows, end - 1] == eos) & both_real
        if eos is not None and tokenizer.pad_token_id != eos and bool(twice.any()):
            found.append(Finding("error", "eos_token", f"samples end with {tokenizer.eos_token} twice", fix))
    return list(dict.fromkeys(found))


def label_range(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Ids the model has no row for: on an accelerator they end in an assertion that names nothing."""
    config: Any = getattr(model, "config", None)
    rows = _embedding_rows(model)
    found: list[Finding] = []
    for batch in batches:
        ids, labels = batch.get("input_ids"), batch.get("labels")
        if ids is not None and rows and (top := int(ids.max())) >= rows:
            fix = "use the model's own tokenizer, or model.resize_token_embeddings(len(tokenizer))"
            found.append(Finding("error", "input_ids", f"token id {top} is outside the model's {rows} embeddings", fix))
        if labels is None or labels.is_floating_point() or labels.numel() == 0:
            continue
        tokens = ids is not None and labels.dim() == ids.dim()  # a target text may be shorter than its source
        head = rows if tokens and _is_language_model(model) else getattr(config, "num_labels", None)
        bad = labels[(labels != IGNORE) & ((labels < 0) | (labels >= (head or 1 << 62)))]
        if head and getattr(config, "problem_type", None) != "multi_label_classification" and bad.numel():
            fix = "use -100 for what is not to be learned, and num_labels = highest label + 1"
            found.append(Finding("error", "labels", f"label {int(bad[0])} is outside 0..{head - 1}", fix))
    return list(dict.fromkeys(found))


def precision(
    model: nn.Module, *, fp16: bool, bf16: bool, device: torch.device, compensated: bool = False
) -> list[Finding]:
    """What mixed precision cannot work with: half weights under a gradient scaler, a device without the format.

    With `compensated`, the optimizer takes care of what half weights round away.
    """
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    found: list[Finding] = []
    if fp16 and torch.float16 in trained:
        text = "fp16=True scales gradients, which needs float32 weights, but trainable weights are float16"
        found.append(Finding("error", "fp16", text, "load the model with dtype=float32 (or bfloat16 and bf16=True)"))
    if fp16 and device.type == "cpu":
        found.append(
            Finding("error", "fp16", "fp16=True has no gradient scaler on the CPU", "use bf16=True or neither")
        )
    if (bf16 or torch.bfloat16 in trained) and not _has_bf16(device):
        text = f"the device ({_device_name(device)}) has no bfloat16 arithmetic"
        found.append(Finding("error", "bf16", text, "use fp16=True with float32 weights"))
    if torch.bfloat16 in trained and not compensated:
        text = "trainable weights are bfloat16: updates below 1/256 of a weight are rounded away"
        found.append(Finding("notice", "bf16", text))
    return found


def reentrant(model: nn.Module) -> list[Finding]:
    """Reentrant checkpointing passes no gradient through inputs that need none, so frozen embeddings cut everything
    off."""
    uses = any(
        getattr(module, "gradient_checkpointing", False)
        and getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant", False)
        for module in model.modules()
    )
    embeddings = _embeddings(model)
    if not uses or embeddings is None:
        return []
    with torch.enable_grad():
        flows = embeddings(
            torch.zeros(1, 1, dtype=torch.long, device=next(embeddings.parameters()).device)
        ).requires_grad
    if flows:
        return []
    text = "use_reentrant=True with frozen embeddings: no gradient reaches any layer"
    fix = "use use_reentrant=False, or call model.enable_input_require_grads()"
    return [Finding("error", "gradient_checkpointing_kwargs", text, fix)]


def tied_weights(model: nn.Module) -> list[Finding]:
    """Input and output embeddings that the configuration ties must still be one tensor."""
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # pyright: ignore[reportCallIssue]
    inputs = _embeddings(model)
    if not getattr(text_config, "tie_word_embeddings", False) or output is None or inputs is None:
        return []
    if output.weight is inputs.weight:  # pyright: ignore[reportAttributeAccessIssue]
        return []
    text = "tie_word_embeddings is true, but input and output embeddings are two tensors: saving would keep only one"
    return [
        Finding(
            "error", "tie_word_embeddings", text, "call model.tie_weights() after changing them, or set it to false"
        )
    ]


def packing(model: nn.Module, batch: Mapping[str, Any], *, max_documents: int = 8) -> list[Finding]:
    """Compares logits of packed documents with those of each document alone, on one real batch.

    Args:
        model: The model as it trains (attention implementation, cache setting); its modes and the random state are left
            as they were.
        batch: `input_ids` and `position_ids` of shape (rows, length); position 0 begins a document. Further keys go
            along.
        max_documents: How many documents of the first row to compare.
    """
    from thrifty.safety.oom import rng_snapshot

    ids, positions = batch["input_ids"][:1], batch["position_ids"][:1]
    length = ids.shape[1]
    starts = [int(i) for i in (positions[0] == 0).nonzero().flatten()]
    inputs = {k: v[:1] if isinstance(v, torch.Tensor) and v.dim() > 0 else v for k, v in batch.items()}
    inputs = {k: v for k, v in inputs.items() if k != "labels"}
    restore = rng_snapshot()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            packed = model(**inputs).logits[0]
            worst, scale = 0.0, float(packed.abs().max())
            for start, stop in list(zip(starts, [*starts[1:], length], strict=True))[:max_documents]:
                alone = model(input_ids=ids[:, start:stop]).logits[0]
                worst = max(worst, float((packed[start:stop] - alone).abs().max()))
    finally:
        for module, mode in modes:
            module.training = mode
        restore()
    tolerance = (1e-3 if packed.dtype == torch.float32 else 5e-2) * max(scale, 1e-6)
    if len(starts) < 2 or worst <= tolerance:
        return []
    text = f"packed documents see one another: logits are {worst:.2g} off those of each alone (allowed {tolerance:.2g})"
    fix = "pass position_ids without attention_mask, and use_cache=False, or turn packing off for this model"
    return [Finding("error", "packing", text, fix)]


def _last_attended(batch: Mapping[str, Any]) -> torch.Tensor:
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is None or mask.shape != ids.shape:
        return ids  # packed: any end token in it is a real one
    return ids.gather(1, (ids.shape[1] - 1 - mask.long().flip(1).argmax(dim=1))[:, None])


def _embeddings(model: nn.Module) -> nn.Module | None:
    if not hasattr(model, "get_input_embeddings"):
        return None
    try:
        module = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except NotImplementedError:  # models with two towers (CLIP) have no one table
        return None
    return (
        module if isinstance(module, nn.Module) and isinstance(getattr(module, "weight", None), torch.Tensor) else None
    )


def _embedding_rows(model: nn.Module) -> int | None:
    embeddings = _embeddings(model)
    return None if not isinstance(embeddings, nn.Embedding) else embeddings.num_embeddings


def _is_language_model(model: nn.Module) -> bool:
    return hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None  # pyright: ignore[reportCallIssue]


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return True


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
