"""Sources as links: web addresses and arXiv numbers in a plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LINK = re.compile(
    r"(?P<url>https?://[^\s<>\"'`;]*[^\s<>\"'`;.,:!?)])|arXiv:\s?(?P<arxiv>\d{4}\.\d{4,5}(?:v\d+)?)", re.I
)


def pieces(source: str | Sequence[str]) -> list[tuple[str, str | None]]:
    """Splits a source into pieces of text with the address that each links to, or None.

    Only `http` and `https` addresses become links, so a source can never hold a script.

    >>> pieces("Hu et al. 2021, arXiv:2106.09685")
    [('Hu et al. 2021, ', None), ('arXiv:2106.09685', 'https://arxiv.org/abs/2106.09685')]
    """
    content = source if isinstance(source, str) else "; ".join(str(part) for part in source)
    found: list[tuple[str, str | None]] = []
    position = 0
    for match in _LINK.finditer(content):
        if match.start() > position:
            found.append((content[position : match.start()], None))
        address = match["url"] or f"https://arxiv.org/abs/{match['arxiv']}"
        found.append((match[0].removeprefix("https://") if match["url"] else match[0], address))
        position = match.end()
    if position < len(content):
        found.append((content[position:], None))
    return found
