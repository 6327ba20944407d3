"""`thrifty bench`."""

from __future__ import annotations

from typing import Annotated

import typer


def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A run file, and keys that override it."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", help="Techniques in the order to add them, e.g. 'bf16,lora:r=8'.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", help="One table: additive or ablation.")] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="Time for everything; decides the steps a row.")] = 10.0,
    steps: Annotated[int | None, typer.Option("--steps", help="Steps a row, in place of --minutes.")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Seeds of the losses; default 3.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Rounds of speed; default what fits.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Processor threads.")] = None,
    guide: Annotated[bool, typer.Option("--guide", help="The experiment of Hugging Face's single-GPU guide.")] = False,
    evidence: Annotated[
        str | None, typer.Option("--evidence", help="A file: one technique against its baseline at equal seconds.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", help="The folder; an unfinished bench in it goes on.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what was measured before.")] = False,
    publish: Annotated[str | None, typer.Option("--publish", help="Write the result file into this folder.")] = None,
    html: Annotated[str | None, typer.Option("--html", help="Write the page here as well.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what each technique buys on this machine. With no arguments: on the embedded text, in about ten minutes.

    A killed bench goes on where it was. Examples: `thrifty bench`, `thrifty bench run.yaml --minutes 60`,
    `thrifty bench --methods bf16,lora --only ablation`, `thrifty bench --guide`.
    """
    from thrifty.cli.arguments import quiet, split_arguments

    quiet()
    from thrifty.bench import run
    from thrifty.errors import InputError
    from thrifty.planner.workload import parse_methods

    path, overrides = split_arguments(arguments or [])
    if guide and evidence is not None:
        raise InputError("excludes --guide", key="--evidence", value=evidence, fix="keep one")
    if (guide or evidence is not None) and path is not None:
        raise InputError("goes with neither --guide nor --evidence", key="CONFIG", value=path, fix="leave it out")
    fixed = {"--methods": methods, "--only": only, "--steps": steps}
    fixed |= {"--seeds": seeds} if guide else {"--rounds": rounds}
    for option, value in fixed.items():
        if value is not None and (guide or evidence is not None):
            where = "by the guide" if guide else "in the evidence file"
            raise InputError(f"is fixed {where}", key=option, value=value, fix="leave it out")
    if json and markdown:
        raise InputError("excludes --markdown", key="--json", fix="keep one")
    form = "json" if json else "markdown" if markdown else "text"
    common = {"output": output, "fresh": fresh, "publish_to": publish, "html": html, "form": form}
    if evidence is not None:
        code = run.evidence(evidence, overrides, seeds=seeds, threads=threads, **common)
    elif guide:
        code = run.guide(overrides, minutes=minutes, rounds=rounds, threads=threads, **common)
    else:
        chosen = None if methods is None else parse_methods(methods)
        code = run.bench(
            path, overrides, chosen=chosen, only=only, minutes=minutes, steps=steps,
            seeds=3 if seeds is None else seeds, rounds=rounds, threads=threads, **common,
        )  # fmt: skip
    raise typer.Exit(code)
