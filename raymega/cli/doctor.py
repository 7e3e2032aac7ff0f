"""`raymega doctor`: looks at the cluster that a job would use, and says what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from raymega import api
from raymega.cli.options import Address, AsJson, Overrides
from raymega.cli.output import print_json, table
from raymega.errors import ConfigError, Fault, raise_faults
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
    """Check resources, versions, GPUs, clocks; with a job, also its store and its bandwidth.

    Exit codes: 0 all is well, 1 there are problems, 2 a mistake in the job.

    Options:
        job_file: Also check what this job needs.
        calibrate: Measure kernels and transfers with the job's workers, and write an accelerator for
            `raymega plan --gpu`.

    Example: raymega doctor jobs/verify.yaml --address local
    Example: raymega doctor jobs/verify.yaml --calibrate my-cluster.yaml
    """
    if calibrate is not None:
        raise_faults(ConfigError, _calibrate_faults(job_file, calibrate))
    job = api.load_job(job_file, overrides or ()) if job_file else None
    findings: list[CheckFinding] = []
    with session_at(address):
        plan = api.plan(job) if job else None
        for finding in examine(plan, store_uri=job.checkpoint.uri if job else ""):
            findings.append(finding)
            if not as_json:
                _show(finding)
        if calibrate is not None and plan is not None:
            device = api.calibrate(plan, name=calibrate.stem)
            calibrate.write_text(device, encoding="utf-8")
    num_problems = sum(finding.status == "problem" for finding in findings)
    if as_json:
        print_json({"problems": num_problems, "findings": findings})
    else:
        _show_bandwidth(findings)
        print(f"{num_problems} problems" if num_problems else "no problems")
        if calibrate is not None:
            print(f"wrote {calibrate}: raymega plan {job_file} --gpu {calibrate}")
    raise typer.Exit(1 if num_problems else 0)


def _calibrate_faults(job_file: Path | None, path: Path) -> list[Fault]:
    faults = []
    if job_file is None:
        faults.append(
            Fault(
                fact="raymega doctor --calibrate without a job file",
                rule="the job's workers measure, on its device, in its number format, on its groups",
                remedy="give a job that has room on the cluster",
            )
        )
    is_name = re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", path.stem) and path.stem not in CATALOGUE
    if path.suffix not in SUFFIXES or not is_name or not path.parent.is_dir():
        faults.append(
            Fault(
                fact=f"--calibrate {path}",
                rule="it is a file to write, FOLDER/NAME.yaml: the folder is there, the name of lower-case "
                "letters, digits, dots and dashes and none of the catalogue's",
                remedy="use for example my-cluster.yaml",
            )
        )
    return faults


def _show_bandwidth(findings: list[CheckFinding]) -> None:
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


def _show(finding: CheckFinding) -> None:
    print(f"{MARKS[finding.status]}  {finding.check}: {finding.fact}", flush=True)
    if finding.remedy:
        print(f"         -> {finding.remedy}", flush=True)
