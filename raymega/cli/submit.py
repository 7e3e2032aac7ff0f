"""Command `raymega submit`: submits a job to a cluster's job server, and follows or stops it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from raymega import api
from raymega.cli.options import AsJsonLines, JobFile, Overrides
from raymega.cli.output import print_json, relay
from raymega.orchestrate.jobs import client as jobs_client
from raymega.orchestrate.jobs.client import JobsClient
from raymega.orchestrate.jobs.submission import Submission


def submit(
    job_file: JobFile,
    overrides: Overrides = None,
    address: str = "auto",
    working_dir: Path = Path(),
    follow: bool = False,
    stop: bool = False,
    as_json: AsJsonLines = False,
) -> None:
    """Submit a job to a cluster; the same run name continues the same run.

    Relative paths in the job are resolved on this machine. Ctrl-C while following leaves the job
    running. With --follow and --stop the exit code is the driver's, else 0 means submitted.

    Options:
        address: Job server of the head, http://HOST:8265; auto is this machine's.
        working_dir: Folder to ship to the nodes; it must contain the job file.
        follow: Show the driver's output, and exit with its exit code.
        stop: Ask the run's job to save and stop, and wait for its end.

    Example: raymega submit jobs/llama-7b-16gpu.yaml --address http://127.0.0.1:8265 --follow
    """
    server = server_url(address)
    job = api.load_job(job_file, overrides or ())
    client = jobs_client.JobsClient(server)
    # --stop acts on the run's newest job, and submits nothing.
    if stop:
        raise typer.Exit(jobs_client.stop_job(job, client=client))
    submission = jobs_client.submit_job(
        job,
        client=client,
        job_file=job_file,
        overrides=overrides or (),
        working_dir=working_dir,
        as_json=as_json,
    )
    _announce(submission, client.address, as_json=as_json)
    if follow:
        raise typer.Exit(_follow(client, submission.submission_id, as_json=as_json))


def server_url(address: str) -> str:
    """Return the job server's URL; unlike in Ray, the option overrides RAY_API_SERVER_ADDRESS."""
    if address == "auto":
        address = os.environ.get("RAY_API_SERVER_ADDRESS", "auto")
    os.environ["RAY_API_SERVER_ADDRESS"] = server = jobs_client.job_server(address)
    return server


def _announce(submission: Submission, server: str, *, as_json: bool) -> None:
    name = submission.submission_id
    if as_json:
        event = {"event": "submitted", "submission_id": name, "address": server}
        print_json(event | {"entrypoint": submission.entrypoint})
        return
    print(f"submitted {name} to {server}: {submission.entrypoint}")
    # Commands to paste: the job does not depend on this process.
    print(f"  follow: ray job logs --address {server} --follow {name}")
    print(f"  save and stop: ray job stop --address {server} {name}", flush=True)


def _follow(client: JobsClient, submission_id: str, *, as_json: bool) -> int:
    try:
        # With --json only the events reach stdout; Ray's own lines go to stderr.
        write = relay(lambda line: not as_json or line.startswith("{"))
        return client.follow(submission_id, write)
    except KeyboardInterrupt:
        print(f"\n{submission_id} continues on the cluster", file=sys.stderr)
        return 1
