"""`raymega schema`: the JSON schema of the job file, for editors."""

from __future__ import annotations

import json
from pathlib import Path

from raymega.config.schema import Job


def schema() -> None:
    """Print the JSON schema of job files.

    Example: raymega schema > job.schema.json
    """
    text = json.dumps(Job.model_json_schema(), indent=2)
    print(text.replace(str(Path.home()), "~"))  # of whoever reads the job, not of whoever asks
