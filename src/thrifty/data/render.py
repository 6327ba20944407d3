"""From examples to strings with trained spans: chat templates, and what is done where there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thrifty.data.formats import Conversation, Example, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FALLBACK_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""One line a message, `Role: content`; an answer ends with the end-of-sequence token."""


@dataclass(frozen=True)
class Rendered:
    """A text and the stretches of it that are trained on."""

    text: str
    spans: list[tuple[int, int]]
    """Half-open ranges of characters, ascending."""
    templated: bool
    """Whether a chat template wrote the special tokens, so that none is added around the text."""


def ensure_chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Gives `tokenizer` the plain fallback template where it has none, so that it is saved with the model.

    Returns:
        One line that says so, or None where there was a template already.
    """
    if tokenizer.chat_template is not None:
        return None
    tokenizer.chat_template = FALLBACK_CHAT_TEMPLATE
    return "the tokenizer has no chat template: a plain one (`Role: content`, a line each) is used and saved with it"


def render(example: Example, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Returns the text of an example and what of it is trained on.

    Raises:
        ValueError: The chat template refuses the messages, or its output cannot be taken apart into turns.
    """
    if isinstance(example, Conversation):
        return _render_chat(example, tokenizer)
    spans: list[tuple[int, int]] = []
    position = 0
    for piece in example:
        if piece.trained and piece.text:
            spans.append((position, position + len(piece.text)))
        position += len(piece.text)
    return Rendered("".join(piece.text for piece in example), spans, templated=False)


def _render_chat(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Finds the answers by rendering ever longer beginnings of the conversation.

    An answer starts where the beginning before it, with the generation prompt, ends. It ends where the beginning with
    it ends; some templates write the last answer in another way than earlier ones, and there its end is found by its
    words.
    """
    messages = conversation.messages
    text = _apply(tokenizer, messages)
    spans: list[tuple[int, int]] = []
    for index, trained in enumerate(conversation.trained):
        if not trained:
            continue
        before = _apply(tokenizer, messages[:index], prompt=True) if index else ""
        until = text if index == len(messages) - 1 else _apply(tokenizer, messages[: index + 1])
        start = len(before) if text.startswith(before) else _find_turn(text, messages, index, spans)
        if text.startswith(until) and len(until) > start:
            end = len(until)
        else:
            content = str(messages[index]["content"]).strip()
            found = text.find(content, start)
            if found < 0:
                raise ValueError("the chat template does not show the assistant's words as they are")
            end = _past_special_token(text, found + len(content), tokenizer)
        spans.append((start, _without_trailing_space(text, start, end, tokenizer)))
    return Rendered(text, spans, templated=True)


def _find_turn(text: str, messages: list[Message], index: int, spans: list[tuple[int, int]]) -> int:
    """Finds an answer by its words, after the last one found, where the template's beginnings do not match its
    whole."""
    content = str(messages[index]["content"]).strip()
    position = text.find(content, spans[-1][1] if spans else 0)
    if not content or position < 0:
        raise ValueError("the chat template's output cannot be taken apart into turns")
    return position


def _apply(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, prompt: bool = False) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # templates raise whatever their author wrote
        raise ValueError(f"the chat template refuses the messages ({str(error).strip()[:200]})") from error


def _past_special_token(text: str, end: int, tokenizer: PreTrainedTokenizerBase) -> int:
    rest = text[end:]
    space = len(rest) - len(rest.lstrip())
    for token in tokenizer.all_special_tokens:
        if rest[space:].startswith(token):
            return end + space + len(token)
    return end


def _without_trailing_space(text: str, start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Leaves out the line break that templates write after the token that ends a turn: a model stops before it."""
    stripped = text[start:end].rstrip()
    if stripped.endswith(tuple(tokenizer.all_special_tokens)):
        return start + len(stripped)
    return end
