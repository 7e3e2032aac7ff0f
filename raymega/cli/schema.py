"""Command `raymega schema`: prints the JSON schema of job files."""

from __future__ import annotations

from raymega.cli.init.job_text import schema_text


def schema() -> None:
    """Print the JSON schema of job files.

    Example: raymega schema > job.schema.json
    """
    print(schema_text())
