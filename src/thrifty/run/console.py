"""What a run says about itself on standard output: short titled blocks, on the main process only."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable

_INDENT = 12


def is_main_process() -> bool:
    """Whether this is the process of rank 0, also before torch.distributed is set up."""
    return os.environ.get("RANK", "0") == "0"


def say(title: str, lines: str | Iterable[str]) -> None:
    """Prints a block: the title in the left column, the text wrapped beside it."""
    if not is_main_process():
        return
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    rows: list[str] = []
    for line in [lines] if isinstance(lines, str) else lines:
        for piece in line.splitlines() or [""]:
            rows += textwrap.wrap(piece, width - _INDENT, subsequent_indent="  ", break_on_hyphens=False) or [""]
    for number, row in enumerate(rows):
        print(f"{title if number == 0 else '':<{_INDENT}}{row}", flush=True)


def shorten(text: str, limit: int) -> str:
    """Cuts a long text in its middle."""
    if len(text) <= limit:
        return text
    half = (limit - 7) // 2
    return f"{text[:half]} [...] {text[-half:]}"
