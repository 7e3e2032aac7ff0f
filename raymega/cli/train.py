"""Command `raymega train`: runs the driver; with --dry-run it only checks and plans."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout

from rich.console import Console

from raymega import api
from raymega.cli.options import Address, AsJsonLines, Grid, JobFile, Overrides
from raymega.cli.plan.bill import Price, dollars_per_s
from raymega.cli.plan.predictions import show_choice
from raymega.cli.plan.text import show_plan
from raymega.cli.progress import BillSink, step_bar
from raymega.config.grid_text import grid_overrides
from raymega.tracking.console import ConsoleSink
from raymega.tracking.jsonl import JsonLinesSink
from raymega.tracking.trackers.selection import CONSOLE


def train(
    job_file: JobFile,
    overrides: Overrides = None,
    grid: Grid = "",
    address: Address = "auto",
    dry_run: bool = False,
    price: Price = 0.0,
    as_json: AsJsonLines = False,
) -> None:
    """Run a job; the same run name continues the same run.

    Exit codes: 0 finished, 2 an error in the job, 3 no capacity, 4 retry budget exhausted, 5 data or
    numerics, 6 the run has another driver, 75 stopped and resumable.

    Options:
        dry_run: Check the job and the cluster and show the plan, without starting workers.

    Example: raymega train jobs/verify.yaml --set run.steps=50
    Example: raymega train jobs/verify.yaml --grid tp=2,pp=2
    """
    # the first line comes at once: checks may ask a store, and Ray and the workers take seconds
    if not dry_run:
        print(f"Checking {job_file}; then Ray and its workers start.", file=sys.stderr, flush=True)
    # parallel.layout=auto is decided here, before anything starts.
    server = os.environ.get("MLFLOW_TRACKING_URI")
    job, choice = api.load_chosen(
        job_file,
        [*(overrides or ()), *grid_overrides(grid)],
        is_for_training=True,
        is_in_ray_job="RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ,
        defaults={"tracking.mlflow_uri": server} if server else {},
    )
    if dry_run:
        show_plan(api.dry_run(job, address=address), as_json=as_json)
        return
    if not as_json:
        show_choice(choice)
        plan = api.plan(job)
        with step_bar(dollars_per_s=dollars_per_s(plan, price)) as bar:
            has_lines = CONSOLE in job.tracking.trackers
            lines = ConsoleSink(sys.stdout, every=job.tracking.console_every)
            bill = BillSink(Console(file=sys.stdout), plan, price=price)
            sinks = (bar, lines, bill) if has_lines else (bar, bill)
            api.train(job, address=address, sinks=sinks, choice=choice)
        return
    # Libraries that print must not break the lines: to them, stdout is stderr.
    records = JsonLinesSink(sys.stdout)
    with redirect_stdout(sys.stderr):
        api.train(job, address=address, sinks=(records,), choice=choice)
