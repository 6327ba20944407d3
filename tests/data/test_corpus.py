"""The embedded text is whole, and its validation part is whole books that training never sees."""

from __future__ import annotations

from importlib import resources

from thrifty.data.corpus import KJV_VALIDATION_BOOKS, kjv, kjv_books


def test_the_whole_canon_is_there():
    books = kjv_books()
    assert len(books) == 66
    assert next(iter(books)) == "Genesis"
    assert list(books)[-1] == "Revelation"
    assert sum(len(chapters) for chapters in books.values()) == 1189
    assert sum(chapter.count("\n") + 1 for chapters in books.values() for chapter in chapters) == 31102
    assert len(books["Psalms"]) == 150
    assert books["Psalms"][116].count("\n") == 1
    assert books["John"][10].split("\n")[34] == "Jesus wept."


def test_validation_is_about_a_twentieth_in_both_testaments_and_disjoint():
    corpus = kjv()
    held, kept = sum(map(len, corpus.validation)), sum(map(len, corpus.train))
    assert 0.04 < held / (held + kept) < 0.06
    assert not set(corpus.validation) & set(corpus.train)
    assert len(corpus.train) + len(corpus.validation) == 1189
    order = list(kjv_books())
    testaments = {order.index(book) >= order.index("Matthew") for book in KJV_VALIDATION_BOOKS}
    assert testaments == {True, False}


def test_the_packed_text_is_small_and_its_origin_is_told():
    folder = resources.files("thrifty.data").joinpath("corpora")
    assert len(folder.joinpath("kjv.txt.xz").read_bytes()) < 1_500_000
    assert "public domain" in folder.joinpath("ORIGIN.md").read_text(encoding="utf-8")
