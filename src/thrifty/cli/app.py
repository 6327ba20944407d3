"""The program: its verbs, and what becomes of an error.

Exit codes: 0 done; 2 the input is wrong (one message, no traceback, nothing written); 130 interrupted; 1 anything else.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import thrifty
from thrifty.errors import InputError, ThriftyError

VERBS = (
    "train",
    "evaluate",
    "generate",
    "bench",
    "compare",
    "methods",
    "recipes",
    "plan",
    "estimate",
    "size",
    "scores",
    "devices",
    "calibrate",
    "env",
    "config-schema",
)
"""In the order of `--help`. The verb `config-schema` is the function `config_schema` of `thrifty.cli.config_schema`."""

TAKES_KEYS = ("train", "evaluate")
"""The verbs that take `key=value`."""
DEBUG = "--debug"
WRONG_INPUT, FAULT, INTERRUPTED = 2, 1, 130


def build() -> Any:
    """Makes the command from the verbs' modules."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.callback()
    def options(  # pyright: ignore[reportUnusedFunction]
        version: Annotated[
            bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
        ] = False,
        debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error; may stand anywhere.")] = False,
    ) -> None:
        """Efficient training of Transformers: plan it, train it, prove it."""

    for verb in VERBS:
        name = verb.replace("-", "_")
        app.command(verb)(getattr(importlib.import_module(f"thrifty.cli.{name}"), name))
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code.

    Args:
        arguments: What follows the program's name; None takes `sys.argv`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in words
    words = [word for word in words if word != DEBUG] or ["--help"]
    try:
        code = build().main(args=words, prog_name="thrifty", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt in a verb
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`thrifty methods | head`); the interpreter must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except Exception as error:
        return _explain(error, debug)


def _explain(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, InputError):
        _say(f"error: {error}")
        return WRONG_INPUT
    if hasattr(error, "format_message"):  # typer's own: a missing argument, an unknown option
        _say(f"error: {_usage_message(error)}")
        return WRONG_INPUT
    if isinstance(error, ThriftyError) and hasattr(error, "exit_code"):  # a run that was asked to end, and has saved
        _say(str(error))
        return int(error.exit_code)  # pyright: ignore[reportAttributeAccessIssue]
    _say(f"error: {error}" if isinstance(error, ThriftyError) else f"error: {type(error).__name__}: {error}")
    if not debug:
        with tempfile.NamedTemporaryFile("w", prefix="thrifty-", suffix=".log", delete=False, encoding="utf-8") as file:
            file.writelines(traceback.format_exception(error))
        _say(f"The traceback is in {file.name}; {DEBUG} prints it.")
    return FAULT


def _usage_message(error: Any) -> str:
    message = str(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "thrifty"
    option = getattr(error, "option_name", None)
    if option and context is not None and context.info_name in TAKES_KEYS:
        return f"{message}. Fix: keys of a run file are written without dashes: {option.lstrip('-')}=value"
    return f"{message}. Fix: see `{path} --help`"


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"thrifty {thrifty.__version__}")
        raise typer.Exit


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
