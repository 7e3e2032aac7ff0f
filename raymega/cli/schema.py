"""`raymega schema`: the JSON schema of the job file, for editors."""

from __future__ import annotations

import json

from raymega.config.schema import Job


def schema() -> None:
    """Print the JSON schema of job files.

    Example: raymega schema > job.schema.json
    """
    print(json.dumps(Job.model_json_schema(), indent=2))
