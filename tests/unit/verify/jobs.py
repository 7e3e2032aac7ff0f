"""Jobs for tests of verify, without files."""

from pathlib import Path

from raymega.config.load import parse_job
from raymega.config.schema import Job

JOBS = Path(__file__).parents[3] / "jobs"


def make_job(*overrides: str, file: str = "verify.yaml") -> Job:
    return parse_job(JOBS / file, overrides).job()
