"""Recognising the format of text records from their columns, and turning each record into text with a loss mask.

| format            | columns                                                     | trained on                |
|-------------------|-------------------------------------------------------------|---------------------------|
| text              | `text`                                                      | everything                |
| prompt-completion | `prompt`, `completion` (strings, or lists of messages)      | the completion            |
| messages          | `messages`: list of {role, content}                         | what the assistant says   |
| source-target     | `source`, `target`                                          | the target                |
| alpaca            | `instruction`, `output`, optionally `input`                 | the output                |
| sharegpt          | `conversations`: list of {from, value}                      | what the assistant says   |
| tokenized         | `input_ids`, optionally `labels` (-100: not trained on)     | as the labels say         |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

    from thrifty.data.options import DataOptions

Message = dict[str, Any]

_REQUIRED: dict[str, tuple[str, ...]] = {
    "tokenized": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "source-target": ("source", "target"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
"""Format to the columns it needs, in the order in which they are looked for."""
FORMATS = tuple(_REQUIRED)

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Piece:
    """A stretch of text and whether the model is trained on it."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Conversation:
    """Messages in Hugging Face's form, and which of them are trained on."""

    messages: list[Message]
    trained: list[bool]


Example = list[Piece] | Conversation


def rename_columns(dataset: Dataset, options: DataOptions, *, key: str = "train_file") -> Dataset:
    """Applies `column_mapping`, `text_column` and `label_column`.

    Raises:
        InputError: A column is missing, or a new name is taken.
    """
    for option, mapping in (
        ("column_mapping", options.column_mapping),
        ("text_column", {options.text_column: "text"} if options.text_column else {}),
        ("label_column", {options.label_column: "label"} if options.label_column else {}),
    ):
        for theirs, ours in mapping.items():
            names = dataset.column_names
            if theirs not in names:
                raise InputError(
                    f"the data of {key} has no such column{did_you_mean(theirs, names)}",
                    key=option,
                    value=theirs,
                    fix=f"one of {', '.join(names)}",
                )
            if theirs == ours:
                continue
            if ours in names:
                # The user named the column that counts, so its namesake gives way; a mapping is held to the letter.
                if option == "column_mapping":
                    raise InputError(
                        f"the data has a column {ours!r} already", key=option, value=theirs, fix="map that one too"
                    )
                dataset = dataset.remove_columns([ours])
            dataset = dataset.rename_column(theirs, ours)
    return dataset


def detect_format(columns: Sequence[str], requested: str = "auto") -> str:
    """Returns the name of the format of text records.

    Args:
        columns: The columns that the data has.
        requested: `auto`, or the format the user asked for.

    Raises:
        InputError: The format is unknown, or the columns do not fit it.
    """
    if requested != "auto":
        if requested not in _REQUIRED:
            raise InputError(
                f"unknown format{did_you_mean(requested, FORMATS)}",
                key="dataset_format",
                value=requested,
                fix=f"auto or one of {', '.join(FORMATS)}",
            )
        missing = [name for name in _REQUIRED[requested] if name not in columns]
        if missing:
            raise InputError(
                f"the data has the columns {', '.join(columns)}, but not {', '.join(missing)}",
                key="dataset_format",
                value=requested,
                fix=f"column_mapping: {{their name: {missing[0]}}}",
            )
        return requested
    for name, required in _REQUIRED.items():
        if all(column in columns for column in required):
            return name
    known = [column for required in _REQUIRED.values() for column in required]
    near = next((f"{column!r}{hint}" for column in columns if (hint := did_you_mean(column, known))), "")
    raise InputError(
        f"no known format has the columns {', '.join(columns)}{': ' + near if near else ''}",
        key="dataset_format",
        value="auto",
        fix="text_column: NAME, or column_mapping: {their name: ours} with ours one of text; prompt and completion; "
        "source and target; messages; instruction and output; conversations; input_ids",
    )


def describe(format_name: str, options: DataOptions, columns: Sequence[str]) -> str:
    """Returns one line for the log: which format was recognised, from what, and what is trained on."""
    required = _REQUIRED[format_name]
    how = "from the columns" if options.dataset_format == "auto" else "as asked; columns"
    ignored = [name for name in columns if name not in (*required, "input", "labels", "attention_mask")]
    if options.train_on_prompt or format_name == "text":
        trained = "every token"
    elif format_name == "tokenized":
        trained = "the labels" if "labels" in columns else "every token"
    else:
        trained = "the answers only"
    rest = f"; not used: {', '.join(ignored)}" if ignored else ""
    return f"format: {format_name} ({how} {', '.join(required)}); trained on: {trained}{rest}"


def converter(format_name: str, *, chat: bool) -> Callable[[Mapping[str, Any]], Example]:
    """Returns the function that turns a record of the format into an example. It raises `ValueError` with what is
    wrong.

    Args:
        format_name: Any format but `tokenized`.
        chat: Whether the tokenizer has a chat template, into which Alpaca records are then put.
    """
    return {
        "text": _from_text,
        "prompt-completion": _from_prompt_completion,
        "source-target": lambda record: _from_pair(record, "source", "target"),
        "messages": lambda record: _from_messages(record["messages"]),
        "sharegpt": lambda record: _from_messages(record["conversations"]),
        "alpaca": _alpaca_as_chat if chat else _alpaca_as_text,
    }[format_name]


def _from_text(record: Mapping[str, Any]) -> Example:
    return [Piece(_string(record, "text", empty=True), True)]


def _from_prompt_completion(record: Mapping[str, Any]) -> Example:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            raise ValueError("prompt and completion must both be strings or both be lists of messages")
        asked, answered = _from_messages(prompt, answered=False), _from_messages(completion)
        return Conversation(asked.messages + answered.messages, [False] * len(asked.messages) + answered.trained)
    return _from_pair(record, "prompt", "completion")


def _from_pair(record: Mapping[str, Any], given: str, answer: str) -> Example:
    return [Piece(_string(record, given, empty=True), False), Piece(_string(record, answer), True)]


def _alpaca_as_text(record: Mapping[str, Any]) -> Example:
    instruction, given = _string(record, "instruction"), record.get("input") or ""
    middle = f"### Input:\n{given}\n\n" if given else ""
    return [
        Piece(f"### Instruction:\n{instruction}\n\n{middle}### Response:\n", False),
        Piece(_string(record, "output"), True),
    ]


def _alpaca_as_chat(record: Mapping[str, Any]) -> Example:
    instruction, given = _string(record, "instruction"), record.get("input") or ""
    question = f"{instruction}\n\n{given}" if given else instruction
    answer = _string(record, "output")
    messages: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(messages, [False, True])


def _from_messages(turns: Any, *, answered: bool = True) -> Conversation:
    """Normalises a list of {role, content} or of ShareGPT's {from, value}."""
    if not isinstance(turns, list) or not turns:
        raise ValueError("the conversation is empty or no list")
    messages: list[Message] = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise ValueError("a message is not an object with role and content")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if role is None or ("content" not in turn and "value" not in turn):
            raise ValueError(f"a message has the keys {', '.join(turn)}, not role and content (or from and value)")
        if str(role) not in _ROLES:
            raise ValueError(f"unknown role {role!r}{did_you_mean(str(role), _ROLES)}")
        if content is not None and not isinstance(content, (str, list)):
            raise ValueError(f"the content of a message is a {type(content).__name__}")
        # Arrow gives every message the keys of all; an absent one comes back as None and would confuse chat templates.
        extra = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
        if content is None and not extra:  # a call of a tool needs none
            raise ValueError("a message has no content")
        messages.append({"role": _ROLES[str(role)], "content": content if content is not None else "", **extra})
    trained = [message["role"] == "assistant" for message in messages]
    if answered and not any(trained):
        raise ValueError("the conversation has no message of the assistant to train on")
    return Conversation(messages, trained)


def _string(record: Mapping[str, Any], column: str, *, empty: bool = False) -> str:
    value = record[column]
    if not isinstance(value, str):
        raise ValueError(f"{column} is {'missing' if value is None else type(value).__name__}, not text")
    if not value and not empty:
        raise ValueError(f"{column} is empty")
    return value
