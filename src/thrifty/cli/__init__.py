"""The command line: `thrifty VERB ...`. One module a verb; nothing heavy is imported before a verb runs."""

from __future__ import annotations

from thrifty.cli.app import main

__all__ = ["main"]
