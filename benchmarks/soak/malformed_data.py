"""The malformed inputs that were written by hand, and how a case is put on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "seven", "wizards", "box")
Values = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One malformed input."""

    name: str
    prepare: Callable[[Path, Values], list[str]]
    """Writes it into a folder, from the values of a good run file; returns the program's arguments."""
    may_pass: bool = False
    """Whether a run that goes well is an answer too."""


def base_values(folder: Path) -> Values:
    """A run file that trains one step in about a second."""
    text = folder / "text.txt"
    lines = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 12)) for i in range(1, 80)]
    text.write_text("\n\n".join(lines) + "\n")
    return {
        "model_config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
        },
        "train_file": str(text),
        "validation_fraction": 0.1,
        "vocab_size": 280,
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "max_new_tokens": 0,
        "use_cpu": True,
        "output_dir": str(folder / "out"),
    }


def config_case(name: str, changes: Values, may_pass: bool = False) -> Case:
    """A run file with some values of its own."""

    def prepare(folder: Path, values: Values) -> list[str]:
        from thrifty.config import yaml_text

        content = yaml_text.dump({**values, **changes})
        (folder / "run.yaml").write_bytes(content.encode("utf-8", "surrogatepass"))
        return ["train", str(folder / "run.yaml")]

    return Case(name, prepare, may_pass)


def override_case(name: str, words: list[str]) -> Case:
    """A good run file with words after it."""

    def prepare(folder: Path, values: Values) -> list[str]:
        return [*config_case(name, {}).prepare(folder, values), *words]

    return Case(f"override: {name}", prepare)


def record_case(name: str, file: str, content: bytes | str | list[Any], changes: Values) -> Case:
    """A data file; a list is written as JSON lines."""

    def prepare(folder: Path, values: Values) -> list[str]:
        path = folder / file
        raw = "".join(json.dumps(row) + "\n" for row in content) if isinstance(content, list) else content
        path.write_bytes(raw.encode("utf-8") if isinstance(raw, str) else raw)
        return config_case(name, {"train_file": str(path), **changes}).prepare(folder, values)

    return Case(f"data: {name}", prepare)


def file_case(name: str, file: str, content: bytes | str) -> Case:
    """A run file that cannot be read as one."""

    def prepare(folder: Path, values: Values) -> list[str]:
        (folder / file).write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        return ["train", str(folder / file)]

    return Case(f"run file: {name}", prepare)


def folder_case(name: str, fill: Callable[[Path], None], changes: Values) -> Case:
    """A folder of images."""

    def prepare(folder: Path, values: Values) -> list[str]:
        images = folder / "images"
        images.mkdir()
        fill(images)
        model = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes = {"intermediate_size": 32, "image_size": 8, "patch_size": 4}
        task = {"task": "image-classification", "train_file": str(images), "model_config": {**model, **sizes}}
        plain = {key: value for key, value in values.items() if key not in ("vocab_size", "max_length")}
        return config_case(name, {**task, **changes}).prepare(folder, plain)

    return Case(f"images: {name}", prepare)


def table_case(name: str, file: str, columns: Values, changes: Values, cut: int | None = None) -> Case:
    """A parquet or arrow file, whole or cut after some bytes."""

    def prepare(folder: Path, values: Values) -> list[str]:
        import pyarrow as pa
        import pyarrow.feather
        import pyarrow.parquet

        path = folder / file
        rows = pa.table(columns)
        if file.endswith(".parquet"):
            pyarrow.parquet.write_table(rows, path)
        else:
            pyarrow.feather.write_feather(rows, str(path), compression="uncompressed")
        if cut is not None:
            path.write_bytes(path.read_bytes()[:cut])
        return config_case(name, {"train_file": str(path), **changes}).prepare(folder, values)

    return Case(f"table: {name}", prepare)


def _good(count: int = 12) -> list[Any]:
    return [{"text": " ".join(WORDS[i % 5 :])} for i in range(count)]


def _chat(*turns: Any) -> list[Any]:
    return [{"messages": list(turns)}] * 12


USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
BERT = {"model_type": "bert"}
CLASSES: Values = {"task": "text-classification"}
TOKENS: Values = {"dataset_format": "tokenized"}
_LABELS = [{"text": "good", "label": 1}, {"text": "bad", "label": 0}] * 8

# name, file, content, keys of the run file
RECORDS: list[tuple[str, str, bytes | str | list[Any], Values]] = [
    ("jsonl, last line cut", "a.jsonl", "".join(json.dumps(r) + "\n" for r in _good())[:-9], {}),
    ("jsonl, a list as a line", "a.jsonl", [*_good(), [1, 2]], {}),
    ("jsonl, a number as a line", "a.jsonl", [*_good(), 7], {}),
    ("jsonl, null as a line", "a.jsonl", [None], {}),
    ("jsonl, empty objects", "a.jsonl", [{}] * 9, {}),
    ("jsonl, nothing but blank lines", "a.jsonl", "\n\n  \n", {}),
    ("jsonl, empty", "a.jsonl", b"", {}),
    ("jsonl, NUL bytes", "a.jsonl", b"\x00" * 300, {}),
    ("jsonl, UTF-16", "a.jsonl", '{"text": "caf\u00e9"}\n'.encode("utf-16"), {}),
    ("jsonl, Latin-1", "a.jsonl", b'{"text": "caf\xe9"}\n' * 9, {}),
    ("jsonl, a lone surrogate", "a.jsonl", '{"text": "\\ud800 broken"}\n' * 9, {}),
    ("jsonl, unquoted keys", "a.jsonl", "{text: 'x'}\n", {}),
    ("jsonl, two objects on a line", "a.jsonl", '{"text": "a"}{"text": "b"}\n', {}),
    ("jsonl, text is a number", "a.jsonl", [*_good(), {"text": 5}], {}),
    ("jsonl, text is null", "a.jsonl", [{"text": None}] * 9, {}),
    ("jsonl, text is a list", "a.jsonl", [{"text": ["a", "b"]}] * 9, {}),
    ("jsonl, text is an object", "a.jsonl", [{"text": {"a": 1}}] * 9, {}),
    ("jsonl, all texts empty", "a.jsonl", [{"text": ""}] * 9, {}),
    ("jsonl, other columns", "a.jsonl", [{"a": 1, "b": 2}] * 9, {}),
    ("jsonl, a column that is not there", "a.jsonl", _good(), {"text_column": "body"}),
    ("jsonl, a mapping to nothing", "a.jsonl", _good(), {"column_mapping": {"nowhere": "text"}}),
    ("jsonl, nested too deeply", "a.jsonl", '{"text": ' + "[" * 100_000 + "\n", {}),
    ("jsonl, too little for a validation part", "a.jsonl", [{"text": "a"}], {"validation_fraction": 0.5}),
    ("chat, messages is text", "a.jsonl", [{"messages": "hello"}] * 9, {}),
    ("chat, messages empty", "a.jsonl", _chat(), {}),
    ("chat, a turn is text", "a.jsonl", _chat(USER, "hi"), {}),
    ("chat, no role", "a.jsonl", _chat(USER, {"content": "hi"}), {}),
    ("chat, unknown role", "a.jsonl", _chat(USER, {"role": "robot", "content": "hi"}), {}),
    ("chat, no content", "a.jsonl", _chat(USER, {"role": "assistant"}), {}),
    ("chat, content is a number", "a.jsonl", _chat(USER, {"role": "assistant", "content": 5}), {}),
    ("chat, nobody answers", "a.jsonl", _chat(USER), {}),
    ("chat, asked for but absent", "a.jsonl", _good(), {"dataset_format": "messages"}),
    ("sharegpt, from nobody", "a.jsonl", [{"conversations": [{"value": "x"}]}] * 9, {}),
    ("sharegpt, unknown speaker", "a.jsonl", [{"conversations": [{"from": "cat", "value": "x"}]}] * 9, {}),
    ("sharegpt, not a list", "a.jsonl", [{"conversations": 5}] * 9, {}),
    ("prompt without completion", "a.jsonl", [{"prompt": "a"}] * 9, {"dataset_format": "prompt-completion"}),
    ("completion is null", "a.jsonl", [{"prompt": "a", "completion": None}] * 9, {}),
    ("completion is a list", "a.jsonl", [{"prompt": "a", "completion": [1]}] * 9, {}),
    ("completion empty", "a.jsonl", [{"prompt": "a", "completion": ""}] * 9, {}),
    ("alpaca without output", "a.jsonl", [{"instruction": "a", "input": ""}] * 9, {"dataset_format": "alpaca"}),
    ("alpaca, output is a number", "a.jsonl", [{"instruction": "a", "input": "", "output": 1}] * 9, {}),
    ("tokens, not numbers", "a.jsonl", [{"input_ids": ["a", "b"]}] * 9, TOKENS),
    ("tokens, fractions", "a.jsonl", [{"input_ids": [1.5, 2.5]}] * 9, TOKENS),
    ("tokens, negative", "a.jsonl", [{"input_ids": [5, -7, 3]}] * 9, TOKENS),
    ("tokens, beyond the vocabulary", "a.jsonl", [{"input_ids": [5, 99_999]}] * 9, TOKENS),
    ("tokens, empty", "a.jsonl", [{"input_ids": []}] * 9, TOKENS),
    ("tokens, labels of another length", "a.jsonl", [{"input_ids": [1, 2, 3], "labels": [1]}] * 9, TOKENS),
    ("tokens, labels out of range", "a.jsonl", [{"input_ids": [1, 2], "labels": [1, 99_999]}] * 9, TOKENS),
    ("tokens, every label masked", "a.jsonl", [{"input_ids": [1, 2], "labels": [-100, -100]}] * 9, TOKENS),
    ("tokens, larger than 64 bits", "a.jsonl", [{"input_ids": [1, 10**30]}] * 9, TOKENS),
    ("classes, no label", "a.jsonl", _good(), CLASSES),
    ("classes, label null", "a.jsonl", [*_LABELS, {"text": "x", "label": None}], CLASSES),
    ("classes, label negative", "a.jsonl", [*_LABELS, {"text": "x", "label": -3}], CLASSES),
    ("classes, label a fraction", "a.jsonl", [*_LABELS, {"text": "x", "label": 0.5}], CLASSES),
    ("classes, label a list", "a.jsonl", [{"text": "x", "label": [1, 0]}] * 9, CLASSES),
    ("classes, labels of two types", "a.jsonl", [*_LABELS, {"text": "x", "label": "good"}], CLASSES),
    ("classes, only one", "a.jsonl", [{"text": "x", "label": 0}] * 9, CLASSES),
    ("classes, no such column", "a.jsonl", _LABELS, {**CLASSES, "label_column": "stars"}),
    ("json, cut", "a.json", '[{"text": "a"}, {"te', {}),
    ("json, a number", "a.json", "7", {}),
    ("json, a text", "a.json", '"hello"', {}),
    ("json, null", "a.json", "null", {}),
    ("json, an empty list", "a.json", "[]", {}),
    ("json, an empty object", "a.json", "{}", {}),
    ("json, a list of numbers", "a.json", "[1, 2, 3]", {}),
    ("json, a list of lists", "a.json", "[[1], [2]]", {}),
    ("json, trailing comma", "a.json", '[{"text": "a"},]', {}),
    ("json, nested too deeply", "a.json", "[" * 200_000, {}),
    ("json, comments", "a.json", '// x\n[{"text": "a"}]', {}),
    ("csv, only a header", "a.csv", "text,label\n", {}),
    ("csv, ragged", "a.csv", "text,label\na,1,2,3\nb\n", CLASSES),
    ("csv, open quote", "a.csv", 'text\n"never closed\n' + "x\n" * 9, {}),
    ("csv, header twice", "a.csv", "text,text\na,b\n" * 9, {}),
    ("csv, empty header", "a.csv", ",\na,b\n", {}),
    ("csv, NUL bytes", "a.csv", b"text\n\x00\x00\n", {}),
    ("csv, binary", "a.csv", bytes(range(256)) * 4, {}),
    ("csv, blank", "a.csv", "\n\n\n", {}),
    ("csv, other columns", "a.csv", "a,b\n1,2\n" * 9, {}),
    ("csv, a field beyond the limit", "a.csv", "text\n" + "x" * 200_000 + '"\n', {"text_column": "body"}),
    ("parquet, text inside", "a.parquet", "no parquet at all", {}),
    ("parquet, only the magic", "a.parquet", b"PAR1PAR1", {}),
    ("arrow, text inside", "a.arrow", "no arrow at all", {}),
    ("arrow, only the magic", "a.arrow", b"ARROW1\x00\x00", {}),
    ("txt, empty", "a.txt", b"", {}),
    ("txt, blank", "a.txt", b" \n\t\n", {}),
    ("txt, Latin-1", "a.txt", b"caf\xe9 " * 40, {}),
    ("txt, UTF-16", "a.txt", ("some text " * 40).encode("utf-16"), {}),
    ("txt, binary", "a.txt", bytes(range(128, 256)) * 9, {}),
    ("txt, shorter than a sample", "a.txt", "a", {}),
    ("pickle", "a.pkl", b"\x80\x04N.", {}),
    ("torch file", "a.pt", b"PK\x03\x04", {}),
    ("numpy file", "a.npy", b"\x93NUMPY", {}),
    ("archive", "a.zip", b"PK\x03\x04", {}),
    ("gzip", "a.jsonl.gz", b"\x1f\x8b\x08\x00", {}),
    ("document", "a.docx", b"PK\x03\x04", {}),
    ("no ending", "data", "text", {}),
    ("validation file is broken", "a.jsonl", _good(), {"validation_file": "/nowhere/validation.jsonl"}),
    ("masked, all texts empty", "a.jsonl", [{"text": ""}] * 9, {"task": "masked-lm", "model_config": BERT}),
]

OVERRIDES: list[tuple[str, list[str]]] = [
    ("no value", ["learning_rate="]),
    ("no key", ["=3"]),
    ("a number as a key", ["3=3"]),
    ("two equals signs", ["learning_rate==1"]),
    ("below a number", ["learning_rate.first=1"]),
    ("below nothing", ["no_such.part=1"]),
    ("a dot at the end", ["model_config.=1"]),
    ("broken YAML", ["methods=[lora"]),
    ("a tag", ["sample_prompt=!!python/object/apply:os.getcwd []"]),
    ("an alias of nothing", ["methods=*nowhere"]),
    ("a setting of another type", ["model_config.hidden_size=wide"]),
    ("a negative size", ["model_config.hidden_size=-16"]),
    ("zero heads", ["model_config.num_attention_heads=0"]),
    ("heads that do not divide", ["model_config.num_attention_heads=3"]),
    ("no layers", ["model_config.num_hidden_layers=-1"]),
    ("a vocabulary of nothing", ["model_config.vocab_size=0"]),
    ("a model type that is a number", ["model_config.model_type=5"]),
    ("a model type that is misspelt", ["model_config.model_type=lama"]),
    ("a second file", ["other.yaml"]),
    ("methods as a mapping", ["methods={lora: {r: 4}}"]),
    ("methods with a number", ["methods=[4]"]),
    ("a method of settings that are a list", ["methods=[{lora: [4]}]"]),
    ("a method twice", ["methods=[lawa, lawa]"]),
    ("two of one slot", ["methods=[bf16, fp16]"]),
    ("two methods in one entry's settings", ["methods=[{lora: {r: many}}]"]),
    ("an unknown setting", ["methods=[{lora: {rank: 4}}]"]),
    ("a rank of nothing", ["methods=[{lora: {r: 0}}]"]),
    ("a share above one", ["methods=[{rigl: {sparsity: 1.5}}]"]),
    ("NaN as a setting", ["methods=[{rigl: {sparsity: .nan}}]"]),
    ("a method by another name", ["methods=[Lora]"]),
    ("an optimizer that is none", ["optimizer=bf16"]),
    ("precision twice", ["precision=auto", "bf16=true"]),
    ("resume from nowhere", ["resume=/nowhere/checkpoint-5"]),
    ("resume and overwrite", ["resume=auto", "overwrite=true"]),
    ("output in a file", ["output_dir=/etc/hostname/out"]),
    ("output in a pseudo file system", ["output_dir=/proc/1/out"]),
    ("a name with NUL", ["output_dir=a\\0b", 'train_file="a\\0b"']),
    ("a path too long", ["train_file=" + "a" * 5000]),
    ("a model and a configuration", ["model_name_or_path=./nowhere"]),
    ("a hub id of another shape", ["dataset_name=a/b/c/d", "train_file=null"]),
    ("two sources", ["embedded_corpus=kjv"]),
    ("a retired key", ["evaluation_strategy=steps"]),
    ("a retired optimizer", ["optim=adamw_hf"]),
    ("an option in place of a key", ["--learning_rate", "3"]),
]

FILES: list[Case] = [
    file_case("empty list", "a.yaml", "[]"),
    file_case("a number", "a.yaml", "7"),
    file_case("a text", "a.yaml", "hello"),
    file_case("keys that are numbers", "a.yaml", "1: 2\n"),
    file_case("keys that are lists", "a.yaml", "? [a, b]\n: 2\n"),
    file_case("a key twice", "a.yaml", "seed: 1\nseed: 2\n"),
    file_case("tabs", "a.yaml", "model_config:\n\tmodel_type: llama\n"),
    file_case("open bracket", "a.yaml", "methods: [lora\n"),
    file_case("open quote", "a.yaml", 'name: "abc\n'),
    file_case("bad indentation", "a.yaml", "model_config:\n    a: 1\n  b: 2\n"),
    file_case("a python object", "a.yaml", "seed: !!python/object/apply:os.system ['true']\n"),
    file_case("an unknown tag", "a.yaml", "seed: !thing 3\n"),
    file_case("an alias of nothing", "a.yaml", "seed: *nowhere\n"),
    file_case("an alias of itself", "a.yaml", "methods: &a [*a]\n"),
    file_case(
        "a billion laughs",
        "a.yaml",
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)),
    ),
    file_case("nested too deeply", "a.yaml", "a: " + "[" * 20_000),
    file_case("two documents", "a.yaml", "seed: 1\n---\nseed: 2\n"),
    file_case("not UTF-8", "a.yaml", b"name: caf\xe9\n"),
    file_case("binary", "a.yaml", bytes(range(256))),
    file_case("a date", "a.yaml", "seed: 2026-01-01\n"),
    file_case("a set", "a.yaml", "methods: !!set {a, b}\n"),
    file_case("bytes", "a.yaml", "seed: !!binary aGVsbG8=\n"),
    file_case("json, cut", "a.json", '{"seed": 1'),
    file_case("json, a list", "a.json", "[1]"),
    file_case("json, trailing comma", "a.json", '{"seed": 1,}'),
    file_case("json, a key twice", "a.json", '{"seed": 1, "seed": 2}'),
    file_case("json, nested too deeply", "a.json", '{"a": ' + "[" * 200_000),
    Case("run file: a folder", lambda folder, values: ["train", str(folder)]),
    Case("run file: missing", lambda folder, values: ["train", str(folder / "nowhere.yaml")]),
    Case("run file: a fifo would block", lambda folder, values: ["train", "/dev/null"]),
    table_case("parquet, cut", "a.parquet", {"text": ["some text"] * 50}, {}, cut=120),
    table_case("parquet, no rows", "a.parquet", {"text": []}, {}),
    table_case("parquet, other columns", "a.parquet", {"a": [1, 2, 3]}, {}),
    table_case("parquet, text is a number", "a.parquet", {"text": [1, 2, 3]}, {"text_column": "text"}),
    table_case("parquet, all null", "a.parquet", {"text": [None, None]}, {}),
    table_case("arrow, cut", "a.arrow", {"text": ["some text"] * 50}, {}, cut=300),
    table_case("arrow, no rows", "a.arrow", {"text": []}, {}),
    table_case("arrow, other columns", "a.arrow", {"a": [1, 2, 3]}, {}),
    folder_case("empty folder", lambda images: None, {}),
    folder_case("no sub-folders", lambda images: (images / "a.png").write_bytes(b"x") and None, {}),
    folder_case("empty classes", lambda images: [(images / name).mkdir() for name in "ab"] and None, {}),
    folder_case("broken image", lambda images: _images(images, b"\x89PNG\r\n\x1a\n broken"), {}),
    folder_case("text as an image", lambda images: _images(images, b"hello"), {}),
    folder_case("empty image", lambda images: _images(images, b""), {}),
    folder_case("one class", lambda images: _pictures(images, "a"), {}),
    folder_case("another task", lambda images: _pictures(images, "ab"), {"task": "text-classification"}),
]


def _images(images: Path, content: bytes) -> None:
    for name in "ab":
        (images / name).mkdir()
        for number in range(4):
            (images / name / f"{number}.png").write_bytes(content)


def _pictures(images: Path, classes: str) -> None:
    from PIL import Image

    for name in classes:
        (images / name).mkdir()
        for number in range(4):
            Image.new("L", (8, 8), number * 40).save(images / name / f"{number}.png")
