"""YAML as run files use it: numbers as people write them, no key twice, and a lossless round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thrifty.config import yaml_text
from thrifty.errors import InputError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=8), inner, max_size=3),
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3E5", 3e5),
        ("+2.5e+3", 2500.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("010", 10),
        ("-.inf", float("-inf")),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("null", None),
        ("", None),
        ("'1e-4'", "1e-4"),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars_are_read_as_they_look(text: str, value: object) -> None:
    read = yaml_text.parse(text)
    assert read == value
    assert type(read) is type(value)


@given(DOCUMENTS)
@settings(derandomize=True, max_examples=500, deadline=None)
def test_what_is_written_is_read_back_equal(document: object) -> None:
    assert yaml_text.parse(yaml_text.dump(document)) == document


def test_texts_that_look_like_numbers_stay_texts() -> None:
    values = {"run_name": "1e-4", "project": "true", "optim_args": "12"}
    assert yaml_text.parse(yaml_text.dump(values)) == values


def test_a_key_that_stands_twice_names_both_lines() -> None:
    with pytest.raises(InputError, match=r"seed: .*lines 1 and 3"):
        yaml_text.parse("seed: 1\nmax_steps: 2\nseed: 3\n")


def test_a_nested_key_that_stands_twice_is_found() -> None:
    with pytest.raises(InputError, match="hidden_size"):
        yaml_text.parse("model_config:\n  hidden_size: 1\n  hidden_size: 2\n")


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\nmethods: [lora\n")
    with pytest.raises(InputError, match="line 3"):
        yaml_text.read_mapping(file)


def test_json_is_accepted_and_its_keys_are_unique(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{\n\t"learning_rate": 1e-4\n}')
    assert yaml_text.read_mapping(file) == {"learning_rate": 1e-4}
    file.write_text('{"seed": 1, "seed": 2}')
    with pytest.raises(InputError, match="twice"):
        yaml_text.read_mapping(file)


@pytest.mark.parametrize("content", ["- a\n- b\n", "just text", "3"])
def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(InputError, match="not keys and values"):
        yaml_text.read_mapping(file)


def test_yaml_cannot_run_code() -> None:
    with pytest.raises(InputError):
        yaml_text.parse("!!python/object/apply:os.getcwd []")
