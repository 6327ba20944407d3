"""What `thrifty bench` does: measure, write everything into the output folder, and print."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thrifty.bench import tables
from thrifty.bench.html import page
from thrifty.bench.options import Options, read_run
from thrifty.bench.processes import StartMethod
from thrifty.bench.publish import publish
from thrifty.bench.result import faults, result_of
from thrifty.bench.rows import candidates
from thrifty.bench.session import Session
from thrifty.bench.state import fingerprint
from thrifty.errors import InputError
from thrifty.report.files import to_json, write_atomic

RESULT_FILE, PAGE_FILE, TABLE_FILE = "result.json", "report.html", "tables.md"
FAULT, INTERRUPTED = 1, 130
Texts = Callable[[Mapping[str, Any]], str]


def bench(
    path: str | None,
    overrides: Sequence[str] = (),
    *,
    chosen: list[Any] | None = None,
    only: str | None = None,
    minutes: float = 10.0,
    steps: int | None = None,
    seeds: int = 3,
    rounds: int | None = None,
    threads: int | None = None,
    **common: Any,
) -> int:
    """Measures the tables of a run file and returns the exit code.

    Raises:
        InputError: Something cannot be done as asked.
    """
    content, own, name = read_run(path, overrides)
    options = Options(
        run=content, own_methods=own, name=name, chosen=chosen, only=only, minutes=minutes, steps=steps, seeds=seeds,
        rounds=rounds, threads=threads,
    )  # fmt: skip

    candidates(options.chosen, options.own_methods)  # a wrong name is better found before the first measurement

    def start(folder: Path, fresh: bool, method: StartMethod | None) -> Session:
        return Session(options, folder, fresh=fresh, method=method)

    return carry_out(start, result_of, options, page, tables.markdown, tables.plain, **common)


def guide(overrides: Sequence[str] = (), **given: Any) -> int:
    """The guide's experiment; see `thrifty.bench.guide`."""
    from thrifty.bench import guide as experiment

    return experiment.run(overrides, **given)


def evidence(path: str, overrides: Sequence[str] = (), **given: Any) -> int:
    """One technique against its baseline; see `thrifty.bench.evidence`."""
    from thrifty.bench import evidence as experiment

    return experiment.run(path, overrides, **given)


def carry_out(
    start: Callable[[Path, bool, StartMethod | None], Session],
    conclude: Callable[[Session], dict[str, Any]],
    options: Options,
    as_page: Texts,
    as_markdown: Texts,
    as_text: Texts,
    *,
    output: str | None = None,
    fresh: bool = False,
    publish_to: str | None = None,
    html: str | None = None,
    form: str = "text",
    method: StartMethod | None = None,
) -> int:
    """Runs a session and leaves its result as JSON, HTML and Markdown.

    Args:
        start: Makes the session.
        conclude: Makes the result of a session.
        options: What decides the name of the folder.
        as_page: The result as HTML.
        as_markdown: The result as Markdown.
        as_text: The result for a terminal.
        output: The folder; None chooses one by name and settings, so that the same command goes on in it.
        fresh: Measure anew.
        publish_to: Folder for the result file.
        html: A further place for the page.
        form: What to print: text, markdown or json.
        method: How processes begin.

    Returns:
        The exit code: 1 where a measurement crashed, 130 where it was interrupted.
    """
    folder = Path(output or f"runs/bench-{options.name}-{fingerprint(options.settings())[:6]}").expanduser()
    # Before minutes of measuring, not after them.
    for option, place in (("--output", folder), ("--publish", publish_to), ("--html", html and Path(html).parent)):
        if place:
            _make_folder(option, Path(place).expanduser())
    if html is not None and Path(html).is_dir():
        raise InputError("is a folder", key="--html", value=html, fix="the path of a file")
    session = start(folder, fresh, method)
    if session.state.resumed:
        print(f"going on with what {folder} holds; --fresh measures anew", file=sys.stderr)
    session.run()
    result = conclude(session)
    write_atomic(folder / RESULT_FILE, to_json(result, indent=1) + "\n")
    write_atomic(folder / TABLE_FILE, as_markdown(result))
    write_atomic(folder / PAGE_FILE, as_page(result))
    if html is not None:
        write_atomic(html, as_page(result))
    print({"json": lambda: to_json(result, indent=1), "markdown": lambda: as_markdown(result)}.get(
        form, lambda: as_text(result))(), flush=True)  # fmt: skip
    print(f"report: {folder / PAGE_FILE}", file=sys.stderr)
    if session.interrupted:
        return INTERRUPTED
    if publish_to is not None:
        print(f"published: {publish(result, publish_to)}", file=sys.stderr)
    crashed = faults(session)
    for line in crashed:
        print(f"crashed: {line}", file=sys.stderr)
    return FAULT if crashed else 0


def _make_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot be a folder ({error.strerror})", key=option, value=str(folder), fix="choose another path"
        ) from error
    if not os.access(folder, os.W_OK):
        raise InputError("cannot be written to", key=option, value=str(folder), fix="choose another path")
