"""Command `raymega doctor`: checks the cluster that a job would use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from raymega import api
from raymega.cli.options import Address, AsJson, Overrides
from raymega.cli.output import print_json, table
from raymega.errors import ConfigError, Fault, counted, raise_faults
from raymega.orchestrate.diagnostics.checks import CheckFinding, examine
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.hardware.catalog_file import SUFFIXES
from raymega.session import session_at

MIB_BYTES = 2**20
MARKS = {"ok": "ok     ", "problem": "PROBLEM", "skipped": "skipped"}


def doctor(
    job_file: Annotated[Path | None, typer.Argument(metavar="[JOB.yaml]")] = None,
    overrides: Overrides = None,
    address: Address = "auto",
    calibrate: Annotated[Path | None, typer.Option(metavar="FILE.yaml")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a cluster's resources, versions, GPUs and clocks; with a job, also its store and bandwidth.

    Exit codes: 0 no problems, 1 problems found, 2 an error in the job.

    Options:
        job_file: Job file; also check what this job needs.
        calibrate: Measure kernels and transfers with the job's workers, and write an accelerator file
            for `raymega plan --gpu`.

    Example: raymega doctor jobs/verify.yaml --address local
    Example: raymega doctor jobs/verify.yaml --calibrate my-cluster.yaml
    """
    if calibrate is not None:
        raise_faults(ConfigError, _calibrate_faults(job_file, calibrate))
    job = api.load_job(job_file, overrides or ()) if job_file else None
    # checks, each shown as soon as it is done
    findings: list[CheckFinding] = []
    with session_at(address):
        plan = api.plan(job) if job else None
        for finding in examine(plan, store_uri=job.checkpoint.uri if job else ""):
            findings.append(finding)
            if not as_json:
                _show(finding)
        # measurement of an accelerator, on the same cluster
        if calibrate is not None and plan is not None:
            device = api.calibrate(plan, name=calibrate.stem)
            calibrate.write_text(device, encoding="utf-8")
    # summary and exit code
    num_problems = sum(finding.status == "problem" for finding in findings)
    if as_json:
        print_json({"problems": num_problems, "findings": findings})
    else:
        _show_bandwidth(findings)
        print(counted(num_problems, "problem") if num_problems else "no problems")
        if calibrate is not None:
            print(
                f"wrote {calibrate}: raymega plan {quote(str(job_file))} --gpu {quote(str(calibrate))}"
            )
    raise typer.Exit(1 if num_problems else 0)


def _calibrate_faults(job_file: Path | None, path: Path) -> Iterator[Fault]:
    if job_file is None:
        yield Fault(
            fact="raymega doctor --calibrate without a job file",
            rule="the job's workers measure, on its device, in its number format and in its process groups",
            remedy="give a job file that fits the cluster, such as jobs/verify.yaml",
        )
    # The file's stem becomes the accelerator's name, which must not hide one of the catalogue.
    is_name = re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", path.stem) and path.stem not in CATALOGUE
    if path.suffix not in SUFFIXES or not is_name or not path.parent.is_dir():
        yield Fault(
            fact=f"--calibrate {path}",
            rule="it must be FOLDER/NAME.yaml in an existing folder; NAME has lower-case letters, digits, "
            "dots, dashes and underscores, and is not in the catalogue",
            remedy="use --calibrate my-cluster.yaml",
        )


def _show_bandwidth(findings: list[CheckFinding]) -> None:
    """Print the measured bandwidth of each axis beside that of its link."""
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


def _show(finding: CheckFinding) -> None:
    print(f"{MARKS[finding.status]}  {finding.check}: {finding.fact}", flush=True)
    if finding.remedy:
        print(f"         -> {finding.remedy}", flush=True)
