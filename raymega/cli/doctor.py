"""`raymega doctor`: looks at the cluster that a job would use, and says what is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from raymega import api
from raymega.cli.tables import table
from raymega.cli.train import Overrides
from raymega.orchestrate.doctor import Finding, examine
from raymega.session import session_at

MIB_BYTES = 2**20
MARKS = {"ok": "ok     ", "problem": "PROBLEM", "skipped": "skipped"}


def doctor(
    job_file: Annotated[
        Path | None, typer.Argument(metavar="[JOB.yaml]", help="Also check what this job needs.")
    ] = None,
    overrides: Overrides = None,
    address: Annotated[
        str, typer.Option(help="auto joins a running cluster, else a local one; local; HOST:PORT.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check resources, versions, GPUs, clocks; with a job, also its store and its bandwidth.

    Exit codes: 0 all is well, 1 there are problems, 2 a mistake in the job.

    Example: raymega doctor jobs/verify.yaml --address local
    """
    job = api.load_job(job_file, overrides or ()) if job_file else None
    findings: list[Finding] = []
    with session_at(address):
        plan = api.plan(job) if job else None
        for finding in examine(plan, store_uri=job.checkpoint.uri if job else ""):
            findings.append(finding)
            if not as_json:
                _show(finding)
    num_problems = sum(finding.status == "problem" for finding in findings)
    if as_json:
        checks = [asdict(finding) for finding in findings]
        print(json.dumps({"problems": num_problems, "findings": checks}))
    else:
        _show_bandwidth(findings)
        print(f"{num_problems} problems" if num_problems else "no problems")
    raise typer.Exit(1 if num_problems else 0)


def _show_bandwidth(findings: list[Finding]) -> None:
    """What was measured on each axis beside what its link can carry."""
    measured = [f.values for f in findings if f.check == "bandwidth" and f.status == "ok"]
    rows = [
        (
            values["axis"],
            values["groups"],
            f"{values['message_bytes'] / MIB_BYTES:g} MiB",
            f"{values['bytes_per_s'] / 1e9:.3f}",
            f"{values['slowest_bytes_per_s'] / 1e9:.3f}",
            f"{values['link_bytes_per_s'] / 1e9:g}" if values["link_bytes_per_s"] else "not known",
        )
        for values in measured
    ]
    if rows:
        headers = ("axis", "groups", "message", "GB/s", "slowest GB/s", "NVLink GB/s")
        print(table(headers, rows))


def _show(finding: Finding) -> None:
    print(f"{MARKS[finding.status]}  {finding.check}: {finding.fact}", flush=True)
    if finding.remedy:
        print(f"         -> {finding.remedy}", flush=True)
