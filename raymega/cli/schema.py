"""Command `raymega schema`: prints the JSON schema of job files."""

from __future__ import annotations

from typing import Annotated

import typer

from raymega.cli.init.job_text import schema_text


def schema(
    plugins: Annotated[list[str] | None, typer.Option(metavar="MODULE")] = None,
) -> None:
    """Print the JSON schema of job files.

    Options:
        plugins: Module of plug-ins whose options the schema gets; repeat for several.

    Example: raymega schema > job.schema.json
    """
    print(schema_text(plugins or ()))
