"""`thrifty generate`."""

from __future__ import annotations

from typing import Annotated

import typer


def generate(
    model: Annotated[str, typer.Argument(help="The folder of a run, or any causal language model's folder or hub id.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What the text starts with.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the continuation in tokens.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Keep the likeliest tokens up to this mass.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seeds the sampling.")] = 42,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code in the folder.")] = False,
) -> None:
    """Continue a text with a causal language model."""
    from thrifty.cli.arguments import quiet

    quiet()
    from thrifty.run.generation import generate as continue_text

    text = continue_text(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    typer.echo(text)
