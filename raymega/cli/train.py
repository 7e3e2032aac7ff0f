"""`raymega train`: runs the driver, or with --dry-run everything short of starting workers."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from raymega import api
from raymega.cli.plan.predictions import show_choice
from raymega.cli.plan.text import show_plan
from raymega.cli.progress import step_bar
from raymega.tracking.console import ConsoleSink
from raymega.tracking.jsonl import JsonLinesSink

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a field: --set run.steps=50")
]


def train(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")],
    overrides: Overrides = None,
    address: Annotated[
        str,
        typer.Option(
            help="auto joins a running cluster, else starts a local one; local; HOST:PORT."
        ),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and plan, look at the cluster, start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line per event.")] = False,
) -> None:
    """Run a job; the same run name continues the same run.

    Exit codes: 0 finished, 2 a mistake in the job, 3 no capacity, 4 retry budget spent, 5 data or
    numerics, 6 the run has another driver, 75 stopped and resumable.

    Example: raymega train jobs/verify.yaml --set run.steps=50
    """
    job, choice = api.load_chosen(
        job_file,
        overrides or (),
        is_for_training=True,
        is_in_ray_job="RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ,
    )
    if dry_run:
        plan = api.dry_run(job, address=address)
        show_plan(plan, as_json=as_json)
        return
    if not as_json:
        show_choice(choice)
        with step_bar() as bar:
            console = ConsoleSink(sys.stdout, every=job.tracking.console_every)
            api.train(job, address=address, sinks=(bar, console), choice=choice)
        return
    # Libraries that print must not break the lines: to them, stdout is stderr.
    lines = JsonLinesSink(sys.stdout)
    with redirect_stdout(sys.stderr):
        api.train(job, address=address, sinks=(lines,), choice=choice)
