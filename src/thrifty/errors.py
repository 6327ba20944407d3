"""The errors that thrifty raises on purpose.

`InputError` and its children mean "what you asked for cannot be done": one message, no traceback, exit code 2,
nothing written. Every message names the key, its value and the fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ThriftyError(Exception):
    """Base of all errors raised on purpose."""


class InputError(ThriftyError):
    """The input (configuration, data, model folder) is wrong.

    Args:
        message: What is wrong, in one sentence.
        key: The configuration key or file that holds the fault.
        value: The offending value.
        fix: What to write instead.
    """

    def __init__(self, message: str, *, key: str | None = None, value: object = None, fix: str | None = None) -> None:
        self.message, self.key, self.value, self.fix = message, key, value, fix
        parts = [message.rstrip(".")]
        if key is not None:
            shown = "" if value is None else f"={_short(value)}"
            parts.insert(0, f"{key}{shown}")
        text = ": ".join(parts)
        if fix:
            text += f". Fix: {fix}"
        super().__init__(text)


class NotApplicable(InputError):
    """A method cannot work on this model, task, length of run or machine. The message says what to do instead."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean 'x'?)`, or an empty string where nothing known is near `word`.

    >>> did_you_mean("learning_rat", ["learning_rate", "seed"])
    " (did you mean 'learning_rate'?)"
    """
    matches = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.6)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
