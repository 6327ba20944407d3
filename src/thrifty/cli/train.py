"""`thrifty train`."""

from __future__ import annotations

from typing import Annotated

import typer


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG|KEY=VALUE", help="A run file (YAML or JSON), and keys that override it."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint, or start where there is none.")
    ] = False,
) -> None:
    """Train a model. With no arguments: a small Llama from scratch on the King James text, in about three minutes.

    Examples: `thrifty train my.yaml learning_rate=1e-4`, `thrifty train my.yaml model_config.hidden_size=128`,
    `thrifty train runs/my-001/run.yaml --resume`. `thrifty config-schema` lists the keys.
    """
    from thrifty.cli.arguments import quiet, split_arguments

    quiet()
    import atexit
    import gc

    gc.disable()  # collections while a million objects of torch and transformers come into being find nothing
    from thrifty import run
    from thrifty.config import load_config

    gc.freeze()  # and later ones need not walk them
    atexit.register(gc.unfreeze)  # but the last one must, or libraries report their objects as leaked
    gc.enable()
    path, overrides = split_arguments(arguments or [])
    run.train(load_config(path, [*overrides, "resume=auto"] if resume else overrides))
