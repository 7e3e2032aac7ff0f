"""Command `raymega schema`: prints the JSON schema of job files."""

from __future__ import annotations

import json
from pathlib import Path

from raymega.config.schema import Job


def schema() -> None:
    """Print the JSON schema of job files.

    Example: raymega schema > job.schema.json
    """
    text = json.dumps(Job.model_json_schema(), indent=2)
    print(
        text.replace(str(Path.home()), "~")
    )  # defaults name the home of the reader, not of this user
