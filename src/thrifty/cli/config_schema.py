"""`thrifty config-schema`."""

from __future__ import annotations

from typing import Annotated

import typer


def config_schema(
    default: Annotated[
        bool, typer.Option("--default", help="Print the embedded default run file (YAML) instead.")
    ] = False,
) -> None:
    """Print the JSON schema of a run file: every key, its type, default and meaning, for editors."""
    from thrifty.cli.arguments import quiet

    quiet()
    import json

    from thrifty.config.run_config import default_text
    from thrifty.config.schema import json_schema

    typer.echo(default_text().rstrip() if default else json.dumps(json_schema(), indent=2))
