"""A text from a language model: the passage at the end of a run, and the verb `generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from thrifty.errors import InputError


def continue_text(
    model: nn.Module,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 80,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 42,
) -> str:
    """Continues `prompt` and returns prompt and continuation; of an encoder-decoder, what it writes for `prompt`.

    The global random state is left as it was.

    Args:
        model: A language model; its mode (train or eval) is put back afterwards.
        tokenizer: The model's tokenizer.
        prompt: What the text starts with; empty starts a new document.
        max_new_tokens: The most tokens to add.
        temperature: 0 takes the likeliest token each time.
        top_p: Samples among the likeliest tokens that together have this probability.
        seed: Seeds the sampling.

    Raises:
        InputError: The tokenizer has no token to start an empty prompt with, or the prompt fills the model.
    """
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"] if prompt else torch.empty((1, 0), dtype=torch.long)
    if ids.shape[1] == 0:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise InputError(
                "the tokenizer has no token that starts a text", key="prompt", value=prompt, fix="give a prompt"
            )
        ids = torch.tensor([[start]])
    device: Any = next(model.parameters()).device
    writes_apart = bool(getattr(model.config, "is_encoder_decoder", False))
    if writes_apart and ids[0, -1] != tokenizer.eos_token_id:  # as sources end in training
        ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)
    limit = getattr(model.config, "max_position_embeddings", None)
    taken = 1 if writes_apart else ids.shape[1]
    room = max_new_tokens if not isinstance(limit, int) else min(max_new_tokens, limit - taken)
    if room < 1:
        raise InputError(
            f"the prompt has {ids.shape[1]} tokens, the model has {limit} positions", key="prompt", fix="shorten it"
        )
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    training = model.training
    model.eval()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            output: Any = model.generate(  # pyright: ignore[reportCallIssue]
                input_ids=ids.to(device),
                attention_mask=torch.ones_like(ids).to(device),
                max_new_tokens=room,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
                use_cache=True,
                **sampling,
            )
    finally:
        model.train(training)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def generate(
    name: str,
    prompt: str = "",
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 42,
    trust_remote_code: bool = False,
) -> str:
    """Loads a language model (a folder, with an adapter perhaps, or a hub id) and continues `prompt`, or answers it.

    Raises:
        InputError: There is no such model, or it does not generate.
    """
    from thrifty.run.loading import base_of, best_device, load_for_inference
    from thrifty.tasks.models import load_config

    config = load_config(base_of(name), None, trust_remote_code=trust_remote_code)
    task = "seq2seq-lm" if getattr(config, "is_encoder_decoder", False) else "causal-lm"
    model, tokenizer = load_for_inference(task, name, trust_remote_code=trust_remote_code)
    return continue_text(
        model.to(best_device()),
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )


def prompt_of(sample: dict[str, Any], tokenizer: Any, *, whole: bool = False, most: int = 16) -> str:
    """The beginning of a sample: what precedes the first token that is trained on, or its first `most` tokens.

    Args:
        sample: Has `input_ids` and `labels`.
        tokenizer: The model's tokenizer.
        whole: The input is a source that has its own target: all of it is the prompt.
        most: Where everything is trained on.
    """
    if whole:
        return str(tokenizer.decode(sample["input_ids"], skip_special_tokens=True))
    ids, labels = list(sample["input_ids"]), list(sample["labels"])
    trained = next((index for index, label in enumerate(labels) if label != -100), 0)
    return str(tokenizer.decode(ids[: trained or most], skip_special_tokens=True))
