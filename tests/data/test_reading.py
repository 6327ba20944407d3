"""Every format is read; every fault gives one message with key, place and fix; nothing is written beside the file."""

from __future__ import annotations

import json
import os
import pickle
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thrifty.data.reading import read_hub, read_records
from thrifty.errors import InputError

ROWS = [{"text": "one, two", "label": 0}, {"text": 'a "quoted"\nline', "label": 1}]


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(rows):
    return "\n".join(json.dumps(row) for row in rows)


@pytest.mark.parametrize(
    "suffix", ["jsonl", "json", "data.json", "lines.json", "csv", "parquet", "arrow", "stream.arrow"]
)
def test_formats(tmp_path, suffix):
    path = tmp_path / f"file.{suffix}"
    table = pa.Table.from_pylist(ROWS)
    if suffix in ("jsonl", "lines.json"):
        path.write_text(lines(ROWS) + "\n\n")
    elif suffix == "json":
        path.write_text(json.dumps(ROWS, indent=2))
    elif suffix == "data.json":
        path.write_text(json.dumps({"version": 1, "data": ROWS}))
    elif suffix == "csv":
        path.write_text('text,label\r\n"one, two",0\r\n"a ""quoted""\nline",1\r\n')
    elif suffix == "parquet":
        pq.write_table(table, path)
    else:
        new = pa.ipc.new_stream if "stream" in suffix else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    before = sorted(tmp_path.iterdir())
    dataset = read_records(path)
    expected = [{**row, "label": str(row["label"])} for row in ROWS] if suffix == "csv" else ROWS
    assert list(dataset) == expected
    assert sorted(tmp_path.iterdir()) == before


def test_text_keeps_every_character(tmp_path):
    text = "\r\n first\r\n\r\nsécond\t\n "
    dataset = read_records(write(tmp_path, "a.txt", text))
    assert dataset[0]["text"] == text
    assert len(dataset) == 1


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert read_records(write(tmp_path, "a.csv", b"\xef\xbb\xbftext\nx\n")).column_names == ["text"]


def test_line_separators_inside_a_json_string_do_not_end_the_line(tmp_path):
    path = write(tmp_path, "a.jsonl", json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False))
    assert read_records(path)[0]["text"] == "a\u2028b\x85c"


def test_absent_keys_are_null(tmp_path):
    dataset = read_records(write(tmp_path, "a.jsonl", '{"a": "x"}\n{"b": "y"}\n'))
    assert list(dataset) == [{"a": "x", "b": None}, {"a": None, "b": "y"}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", "", "empty"),
        ("a.txt", " \n\t\n", "empty"),
        ("a.parquet", "", "empty"),
        ("a.jsonl", '{"text": "x"}\n\n{"text": "y"\n', "line 3, column"),
        ("a.jsonl", '{"text": "x"}\n["y"]\n', "line 2 is a list"),
        ("a.jsonl", '{"a": 1}\n{"a": "x"}\n', "line 2: column 'a' is a string, but a number before"),
        ("a.jsonl", '{"a": {"b": 1}}\n{"a": [1]}\n', "line 2: column 'a' is a list, but an object before"),
        ("a.jsonl", '{"a": 1' + "0" * 30 + "}\n", "column 'a' cannot be stored"),
        ("a.jsonl", '{"a": "\\ud800"}\n', "column 'a' cannot be stored"),
        ("a.jsonl", "[" * 100_000, "line 1"),
        ("a.json", "[1, 2]", "record 1 is a number"),
        ("a.json", "[]", "no records"),
        ("a.json", "[{}]", "no records"),
        ("a.json", '"text"', "holds a string"),
        ("a.json", '[{"a": 1},\n{"a": }]', "line 2, column"),
        ("a.csv", "text,label\nx,1\ny\n", "line 3 has 1 fields, the header has 2"),
        ("a.csv", "text,label\n", "no records"),
        ("a.csv", "text,text\nx,y\n", "'text' occurs twice"),
        ("a.csv", "text,\nx,y\n", "has no name"),
        ("a.csv", "text;label\nx;1\n", "not separated by commas"),
        ("a.csv", 'text\n"open', "broken CSV"),
        ("a.csv", b"text\n\xff\xfe\n", "line 2 is not UTF-8 (byte 0xff)"),
        ("a.txt", b"caf\xe9", "line 1 is not UTF-8 (byte 0xe9)"),
        ("a.parquet", "no parquet", "not a readable parquet"),
        ("a.arrow", "no arrow", "not a readable arrow"),
        ("a.pkl", pickle.dumps([1]), "may run code"),
        ("a.pt", "x", "may run code"),
        ("a.bin", "x", "may run code"),
        ("a.zip", "x", "not unpacked"),
        ("a.jsonl.gz", "x", "not unpacked"),
        ("a.jsnl", "{}", "did you mean '.jsonl'"),
        ("plain", "x", "(none) is not known"),
    ],
)
def test_faults(tmp_path, name, content, expected):
    path = write(tmp_path, name, content)
    before = path.read_bytes()
    with pytest.raises(InputError) as caught:
        read_records(path, key="validation_file")
    message = str(caught.value)
    assert expected in message, message
    assert message.startswith("validation_file=")
    assert name in message
    assert "Fix: " in message
    assert len(message) < 700
    assert "\n" not in message
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert path.read_bytes() == before


def test_a_truncated_parquet_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS * 100), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match="not a readable parquet"):
        read_records(path)


def test_missing_files_name_the_nearest(tmp_path):
    write(tmp_path, "train.jsonl", "{}")
    with pytest.raises(InputError, match=r"no such file \(did you mean 'train.jsonl'\?\)"):
        read_records(tmp_path / "trian.jsonl")
    with pytest.raises(InputError, match="dataset_name"):
        read_records("owner/name")
    with pytest.raises(InputError, match=r"cannot be read|no such file"):
        read_records("x" * 5000 + ".jsonl")
    with pytest.raises(InputError, match="no such file"):
        read_records("a\0b.jsonl")


def test_a_folder_without_classes_is_refused(tmp_path):
    write(tmp_path, "train.jsonl", "{}")
    with pytest.raises(InputError, match="a folder without sub-folders"):
        read_records(tmp_path)


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="not a regular file"):
        read_records(tmp_path / "a.jsonl")


def test_an_archive_with_a_path_that_climbs_out_writes_nothing(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    with zipfile.ZipFile(inner / "a.zip", "w") as archive:
        archive.writestr("../../escaped.jsonl", "{}")
    with pytest.raises(InputError, match="not unpacked"):
        read_records(inner / "a.zip")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.zip", "inner"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), suffix=st.sampled_from(["jsonl", "json", "csv", "parquet", "arrow", "txt"]))
def test_any_bytes_are_read_or_refused(tmp_path, content, suffix):
    path = tmp_path / f"fuzz.{suffix}"
    path.write_bytes(content)
    try:
        rows = len(read_records(path))
    except InputError as error:
        rows = error.key
    assert rows == "train_file" or int(str(rows)) > 0


@pytest.mark.parametrize("name", ["../up", "/etc", "a/b/c", "", "data.csv", "http://x/y", "owner/name.zip"])
def test_hub_ids_are_checked_before_the_network_is_touched(name):
    with pytest.raises(InputError, match="not a hub id"):
        read_hub(name)


def test_an_unreachable_hub_is_one_message():
    with pytest.raises(InputError, match="cannot be loaded from the hub"):
        read_hub("thrifty-tests/no-such-data")
