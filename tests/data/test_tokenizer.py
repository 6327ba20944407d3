"""The trained tokenizer loses nothing and is cached; facts about other tokenizers are found out, not assumed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from thrifty.data import tokenizer as module
from thrifty.data.cache import cache_dir, content_hash, write_folder
from thrifty.data.corpus import kjv
from thrifty.data.tokenizer import affixes, ensure_pad_token, fingerprint, train_tokenizer
from thrifty.errors import InputError


def word_tokenizer(*, template: bool = False, **special: str) -> PreTrainedTokenizerFast:
    vocabulary = {"<s>": 0, "</s>": 1, "[UNK]": 2, "a": 3, "b": 4, "c": 5}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_round_trip_is_lossless(tokenizer, text):
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_vocabulary_and_special_tokens(tokenizer):
    assert len(tokenizer) == 512
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|pad|>", "<|mask|>"]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    assert affixes(tokenizer).prefix == []
    assert affixes(tokenizer).suffix == []


def test_the_cache_is_used_and_a_change_of_text_is_seen(monkeypatch, tmp_path):
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    texts = kjv().train[:3]
    first = train_tokenizer(texts, 300)
    folders = list((tmp_path / "tokenizers").iterdir())
    assert [folder.name[0] for folder in folders] != ["."]
    assert len(folders) == 1
    stamp = (folders[0] / "tokenizer.json").stat().st_mtime_ns
    second = train_tokenizer(texts, 300)
    assert fingerprint(first) == fingerprint(second)
    assert (folders[0] / "tokenizer.json").stat().st_mtime_ns == stamp
    (folders[0] / "tokenizer.json").write_text("{}")
    assert fingerprint(train_tokenizer(texts, 300)) == fingerprint(first)
    train_tokenizer([*texts, "another"], 300)
    assert len(list((tmp_path / "tokenizers").iterdir())) == 2
    train_tokenizer(texts, 301, cache=False)
    assert len(list((tmp_path / "tokenizers").iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_fault(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("THRIFTY_CACHE", str(blocked))
    assert len(train_tokenizer(["some words of text"], 300)) > 259
    assert blocked.read_text() == "in the way"


def test_folders_appear_whole_or_not_at_all(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    assert write_folder(tmp_path / "target", fail) is False
    assert list(tmp_path.iterdir()) == []
    for content in ("1", "2"):

        def write(folder, content=content):
            (folder / "whole").write_text(content)

        assert write_folder(tmp_path / "target", write)
    assert (tmp_path / "target" / "whole").read_text() == "1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


def test_hashes_tell_parts_apart():
    assert content_hash(["ab", "c"]) != content_hash(["a", "bc"])
    assert content_hash(["a", b"b"]) == content_hash(["a", "b"])


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("THRIFTY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "thrifty"


@pytest.mark.parametrize("size", [0, 100, module.SMALLEST_VOCABULARY - 1])
def test_a_vocabulary_without_room_for_bytes_is_refused(size):
    with pytest.raises(InputError, match="vocab_size"):
        train_tokenizer(["text"], size)


def test_no_text_is_refused():
    with pytest.raises(InputError, match="no text"):
        train_tokenizer(["", ""], 300)


def test_affixes_are_found_and_never_doubled():
    around = affixes(word_tokenizer(template=True))
    assert (around.prefix, around.suffix) == ([0], [1])
    assert around.wrap([3, 4]) == [0, 3, 4, 1]
    assert around.wrap([0, 3, 4, 1]) == [0, 3, 4, 1]


@pytest.mark.parametrize(
    ("special", "picked"),
    [({"eos_token": "</s>"}, "</s>"), ({"unk_token": "[UNK]"}, "[UNK]"), ({"pad_token": "a"}, None)],
)
def test_a_padding_token_is_picked_and_named(special, picked):
    tokenizer = word_tokenizer(**special)
    before = len(tokenizer)
    note = ensure_pad_token(tokenizer)
    assert (note is None) == (picked is None)
    assert picked is None or picked in str(note)
    assert tokenizer.pad_token_id is not None
    assert len(tokenizer) == before


def test_a_tokenizer_with_nothing_to_pad_with_is_refused():
    with pytest.raises(InputError, match="neither a padding nor"):
        ensure_pad_token(word_tokenizer())
