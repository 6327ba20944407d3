"""Training a tokenizer on the spot, and the facts about a tokenizer that preparing data depends on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thrifty.data.cache import cache_dir, content_hash, is_whole, write_folder
from thrifty.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
MASK_TOKEN = "<|mask|>"
SPECIAL_TOKENS = (EOS_TOKEN, PAD_TOKEN, MASK_TOKEN)
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)

# Padding tokens of current model families that may stand in a vocabulary without being declared.
_PAD_CANDIDATES = ("<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<|endoftext|>")


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, cache: bool = True) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer whose round trip is lossless on any text.

    The vocabulary begins with `<|endoftext|>` (id 0: end and start of a document), `<|pad|>` (1) and `<|mask|>` (2).
    Like GPT-2's, the tokenizer adds no special token by itself. The result depends on `texts` and `vocab_size` alone.

    Args:
        texts: The training text in documents.
        vocab_size: Entries wanted, special tokens included. A small text may give fewer.
        cache: Keep the result under the cache folder, by a hash of the text.

    Raises:
        InputError: `vocab_size` is too small to hold every byte, or there is no text.
    """
    import tokenizers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            "a byte-level vocabulary holds all 256 bytes and the special tokens",
            key="vocab_size",
            value=vocab_size,
            fix=f"at least {SMALLEST_VOCABULARY}",
        )
    documents = list(texts)
    if not any(documents):
        raise InputError("there is no text to train a tokenizer on", key="train_file", fix="give a file with text")
    folder = cache_dir() / "tokenizers" / content_hash([tokenizers.__version__, str(vocab_size), "1", *documents])
    if cache and is_whole(folder):
        return AutoTokenizer.from_pretrained(str(folder))

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    model.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(documents, trainer=trainer, length=len(documents))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=EOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        mask_token=MASK_TOKEN,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    if cache:

        def save(temporary: Path) -> None:
            tokenizer.save_pretrained(str(temporary))

        write_folder(folder, save)
    return tokenizer


@dataclass(frozen=True)
class Affixes:
    """The special tokens that a tokenizer puts around a text by itself, such as `[CLS]` ... `[SEP]` or `<s>`."""

    prefix: list[int]
    suffix: list[int]

    def wrap(self, ids: list[int]) -> list[int]:
        """Returns `ids` (a list of token ids) between the special tokens, of which none is doubled."""
        prefix = [] if self.prefix and ids[: len(self.prefix)] == self.prefix else self.prefix
        suffix = [] if self.suffix and ids[-len(self.suffix) :] == self.suffix else self.suffix
        return [*prefix, *ids, *suffix]


def affixes(tokenizer: PreTrainedTokenizerBase) -> Affixes:
    """Finds out what `tokenizer` adds around a single text, by asking it."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return Affixes(prefix=list(full[:start]), suffix=list(full[start + len(bare) :]))
    # Not a plain prefix and suffix: leave the special tokens to the chat template or to the text itself.
    return Affixes(prefix=[], suffix=[])


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Gives `tokenizer` a padding token where it has none, without enlarging the vocabulary.

    Padding is masked by position throughout, so that sharing the end-of-sequence token does no harm.

    Returns:
        One line that says what was picked, or None where there was a padding token already.

    Raises:
        InputError: Nothing in the vocabulary can serve.
    """
    if tokenizer.pad_token is not None:
        return None
    vocabulary = tokenizer.get_vocab()
    for candidate in (*_PAD_CANDIDATES, tokenizer.eos_token, tokenizer.unk_token):
        if isinstance(candidate, str) and candidate in vocabulary:
            tokenizer.pad_token = candidate
            name = f"{candidate!r} (id {tokenizer.pad_token_id})"
            return f"the tokenizer has no padding token: {name} is used, masked by position"
    raise InputError(
        "the tokenizer has neither a padding nor an end-of-sequence token",
        key="tokenizer_name_or_path",
        value=tokenizer.name_or_path,
        fix="declare pad_token in its tokenizer_config.json",
    )


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the id of the end-of-sequence token.

    Raises:
        InputError: The tokenizer has none, so that a model could not learn where to stop.
    """
    if tokenizer.eos_token_id is None:
        raise InputError(
            "the tokenizer has no end-of-sequence token, so a model could not learn where to stop",
            key="tokenizer_name_or_path",
            value=tokenizer.name_or_path,
            fix="declare eos_token in its tokenizer_config.json",
        )
    return int(tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]


def require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that `tokenizer` can say which characters a token covers.

    Raises:
        InputError: It is a slow (pure Python) tokenizer.
    """
    if not tokenizer.is_fast:
        raise InputError(
            "this tokenizer cannot tell which characters a token covers, which the loss mask needs",
            key="tokenizer_name_or_path",
            value=tokenizer.name_or_path,
            fix="convert it to tokenizer.json (AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...))",
        )


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a hash of everything about `tokenizer` that changes what it makes of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return content_hash([body, repr(sorted(tokenizer.special_tokens_map.items())), repr(tokenizer.chat_template)])
