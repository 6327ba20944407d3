"""Nothing of a text is lost or predicted twice; samples keep their limits; results are cached and deterministic."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from thrifty.data.corpus import kjv
from thrifty.data.encode import IGNORED, blocks
from thrifty.data.masked import prepare_masked
from thrifty.data.options import DataOptions
from thrifty.data.prepare import prepare_causal
from thrifty.data.sources import load_sources, training_texts
from thrifty.errors import InputError


@given(length=st.integers(1, 200), size=st.integers(2, 20))
def test_blocks_predict_every_token_once(length, size):
    ranges = list(blocks(length, size))
    predicted = [position for start, end in ranges for position in range(start + 1, end)]
    assert predicted == list(range(1, length))
    assert all(end - start <= size for start, end in ranges)
    assert all(end - start == size for start, end in ranges[:-1])


def test_a_stream_holds_the_whole_text(tokenizer):
    documents = kjv().train[:5]
    result = prepare_causal(documents, tokenizer, DataOptions(max_length=64))
    ids = list(result.dataset["input_ids"])
    joined = ids[0] + [token for sample in ids[1:] for token in sample[1:]]
    eos = "<|endoftext|>"
    assert tokenizer.decode(joined) == eos + eos.join(documents) + eos
    assert result.bytes == sum(len(document.encode()) for document in documents)
    assert result.trained_tokens == len(joined) - 1 == sum(len(sample) - 1 for sample in ids)
    assert {len(sample) for sample in ids[:-1]} == {64}
    assert 2 <= len(ids[-1]) <= 64
    assert list(result.dataset["sample_id"]) == list(range(len(ids)))
    assert result.dataset.features["sample_id"].dtype == "int64"


def test_a_token_that_begins_every_text_is_never_trained_on(tokenizer):
    tokenizer.add_special_tokens({"bos_token": AddedToken("<s>", special=True)})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    result = prepare_causal(["one", "two"], tokenizer, DataOptions())
    ids, labels = result.dataset[0]["input_ids"], result.dataset[0]["labels"]
    assert tokenizer.decode(ids) == "<s>one<|endoftext|><s>two<|endoftext|>"
    assert [label for token, label in zip(ids, labels, strict=True) if token == bos] == [IGNORED, IGNORED]
    assert labels.count(0) == 2
    record = prepare_causal(Dataset.from_list([{"text": "one"}, {"text": "<s>two"}]), tokenizer, DataOptions())
    assert [tokenizer.decode(row) for row in record.dataset["input_ids"]] == [
        "<s>one<|endoftext|>",
        "<s>two<|endoftext|>",
    ]
    assert record.bytes == len("one") + len("two")


def test_long_documents_are_encoded_in_parts(tokenizer, monkeypatch):
    monkeypatch.setattr("thrifty.data.encode._CHUNK_CHARACTERS", 200)
    document = kjv().train[0]
    result = prepare_causal([document], tokenizer, DataOptions(max_length=100_000))
    assert tokenizer.decode(result.dataset[0]["input_ids"]) == f"<|endoftext|>{document}<|endoftext|>"


def test_bytes_count_what_is_predicted(tokenizer):
    text = "Ünïcödé 日本 and more"
    result = prepare_causal(Dataset.from_list([{"text": text}]), tokenizer, DataOptions())
    # The tokenizer puts nothing in front, so the first token (here the first byte of Ü) is not predicted.
    first = tokenizer(text, return_offsets_mapping=True)["offset_mapping"][0]
    assert result.bytes == len(text[first[1] :].encode())


@pytest.mark.parametrize("choice", ["split", "truncate", "error"])
def test_long_text_records(tokenizer, choice):
    text = " ".join(kjv().train[0].split()[:120])
    data = Dataset.from_list([{"text": text}, {"text": "short"}, {"text": ""}])
    options = DataOptions(max_length=32, long_samples=choice)
    if choice == "error":
        with pytest.raises(InputError, match="1 samples are longer than max_length=32, the longest has"):
            prepare_causal(data, tokenizer, options)
        return
    result = prepare_causal(data, tokenizer, options)
    ids = list(result.dataset["input_ids"])
    assert max(map(len, ids)) <= 32
    assert any("1 empty records left out" in note for note in result.notes)
    if choice == "split":
        joined = ids[0] + [token for sample in ids[1:-1] for token in sample[1:]]
        assert tokenizer.decode(joined) == text + "<|endoftext|>"
    else:
        assert len(ids) == 2
        assert text.startswith(tokenizer.decode(ids[0]))
        assert result.bytes is not None
        assert result.bytes < len(text)
    assert any("1 samples" in note for note in result.notes)


def test_long_answers_are_not_split_but_answered(tokenizer):
    data = Dataset.from_list([{"prompt": "a" * 50, "completion": "b" * 50}])
    with pytest.raises(InputError, match=r"only plain text can be split.*long_samples: truncate"):
        prepare_causal(data, tokenizer, DataOptions(max_length=16))
    with pytest.raises(InputError, match="no token is left to train on"):
        prepare_causal(data, tokenizer, DataOptions(max_length=16, long_samples="truncate"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_length": 1}, "max_length=1"),
        ({"max_length": -5}, "max_length=-5"),
        ({"long_samples": "cut"}, "long_samples"),
    ],
)
def test_options_out_of_range(tokenizer, options, expected):
    with pytest.raises(InputError, match=expected):
        prepare_causal(["text"], tokenizer, DataOptions(**options))


def test_no_text_at_all(tokenizer):
    with pytest.raises(InputError, match="no token is left"):
        prepare_causal(Dataset.from_list([{"text": ""}]), tokenizer, DataOptions())


def test_large_data_comes_from_the_cache_the_second_time(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    monkeypatch.setattr("thrifty.data.prepare._CACHE_ABOVE_CHARACTERS", 1000)
    documents = kjv().train[:3]
    first = prepare_causal(documents, tokenizer, DataOptions(max_length=64))
    second = prepare_causal(documents, tokenizer, DataOptions(max_length=64))
    assert len(list((tmp_path / "prepared").iterdir())) == 1
    assert second.dataset.cache_files
    assert not first.dataset.cache_files
    assert list(first.dataset) == list(second.dataset)
    assert (first.bytes, first.trained_tokens, first.notes) == (second.bytes, second.trained_tokens, second.notes)
    prepare_causal(documents, tokenizer, DataOptions(max_length=65))
    prepare_causal([*documents[:2], documents[2] + "."], tokenizer, DataOptions(max_length=64))
    assert len(list((tmp_path / "prepared").iterdir())) == 3


def test_a_damaged_cache_is_built_anew(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    monkeypatch.setattr("thrifty.data.prepare._CACHE_ABOVE_CHARACTERS", 1000)
    documents = kjv().train[:3]
    first = prepare_causal(documents, tokenizer, DataOptions(max_length=64))
    for file in (tmp_path / "prepared").rglob("data.arrow"):
        file.write_bytes(file.read_bytes()[:5000])
    again = prepare_causal(documents, tokenizer, DataOptions(max_length=64))
    assert list(first.dataset) == list(again.dataset)


def test_masked_samples_hold_the_whole_text_between_special_tokens(tokenizer):
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    document = kjv().train[0]
    result = prepare_masked([document], tokenizer, DataOptions(max_length=50))
    ids = list(result.dataset["input_ids"])
    assert all(sample[0] == sample[-1] == 0 and len(sample) <= 50 for sample in ids)
    assert tokenizer.decode([token for sample in ids for token in sample[1:-1]]) == document


def test_a_text_file_keeps_its_end_for_validation(tmp_path):
    text = "".join(f"line {number} of the text\n" for number in range(400))
    (tmp_path / "a.txt").write_text(text)
    sources = load_sources(DataOptions(train_file=str(tmp_path / "a.txt")))
    assert isinstance(sources.train, list)
    assert isinstance(sources.validation, list)
    assert sources.train[0] + sources.validation[0] == text
    assert sources.train[0].endswith("\n")
    assert 0.04 < len(sources.validation[0]) / len(text) < 0.06


def test_records_are_held_out_by_seed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(100)))

    def parts(**options):
        sources = load_sources(DataOptions(train_file=str(path), **options))
        train: Any = sources.train
        held: Any = sources.validation or []
        return [row["text"] for row in train], [row["text"] for row in held]

    train, held = parts()
    assert len(held) == 5
    assert len(train) == 95
    assert not set(train) & set(held)
    assert parts() == (train, held)
    assert parts(seed=1)[1] != held
    assert parts(validation_fraction=0)[1] == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train_file": "a.jsonl", "dataset_name": "b/c"}, "two training sources"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
        ({"validation_fraction": -0.1}, "validation_fraction=-0.1"),
    ],
)
def test_sources_out_of_order(options, expected):
    with pytest.raises(InputError, match=expected):
        load_sources(DataOptions(**options))


def test_too_little_to_hold_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "alone"}')
    with pytest.raises(InputError, match="too little data"):
        load_sources(DataOptions(train_file=str(tmp_path / "a.jsonl")))


def test_texts_for_a_tokenizer_come_from_every_format(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}'
    )
    options = DataOptions(train_file=str(tmp_path / "a.jsonl"), validation_fraction=0)
    assert training_texts(load_sources(options), options) == ["Q", "A"]
    (tmp_path / "b.csv").write_text("text,label\nwords,1\n")
    options = DataOptions(train_file=str(tmp_path / "b.csv"), validation_fraction=0)
    assert training_texts(load_sources(options), options) == ["words"]
    (tmp_path / "c.jsonl").write_text('{"input_ids": [1, 2]}')
    options = DataOptions(train_file=str(tmp_path / "c.jsonl"), validation_fraction=0)
    with pytest.raises(InputError, match="token ids"):
        training_texts(load_sources(options), options)
