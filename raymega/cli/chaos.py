"""Command `raymega chaos`: options and output; `chaos/command.py` does the work."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from raymega import api
from raymega.chaos.command import drill
from raymega.chaos.experiment import DrillOptions, Verdict, verdict_object
from raymega.chaos.faults import KINDS, PHASES
from raymega.chaos.time_accounting import Incident
from raymega.cli.options import AsJson, JobFile, Overrides
from raymega.cli.output import print_json, table

HEADERS = (
    "fault", "phase", "rank", "step", "detected", "recovered", "steps lost", "state from", "grid",
)  # fmt: skip
_FAULTS = (
    "Faults to inject in this order, each at a step (kill-worker@5) or in a phase (hang@restore, "
    f"kill-node@upload:6). Kinds: {', '.join(KINDS)}. Phases: {', '.join(PHASES)}."
)


def chaos(
    job_file: JobFile,
    overrides: Overrides = None,
    faults: Annotated[str, typer.Option("--fault", metavar="KIND@WHEN,..", help=_FAULTS)] = "",
    mtbf_s: Annotated[float, typer.Option("--mtbf", min=0)] = 0.0,
    kinds: Annotated[str, typer.Option(metavar="KIND,..")] = "",
    seconds: Annotated[float, typer.Option(min=0)] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    nodes: Annotated[int, typer.Option(min=2)] = 3,
    hold_s: Annotated[float, typer.Option(min=0)] = 3.0,
    return_s: Annotated[float, typer.Option(min=0)] = 10.0,
    timeout_s: Annotated[float, typer.Option(min=1)] = 3600.0,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Train a job twice, undisturbed and under injected faults, and compare the two runs.

    Starts a Ray cluster of several nodes on this machine. Exit codes: 0 the run recovered from every
    fault and its losses match the undisturbed run's, 1 it did not or they do not, 2 an error in the job.

    Options:
        mtbf_s: Inject random faults, with this mean time between failures in seconds.
        kinds: With --mtbf: kinds of faults to draw from.
        seconds: With --mtbf: stop the run after this many seconds; 0 runs to the last step.
        seed: Seed of the random times, kinds and ranks.
        nodes: Nodes of the cluster; the job uses two, the others are spare.
        hold_s: Duration of a service fault, and notice of a drained node, in seconds.
        return_s: Seconds until a lost node is replaced.
        timeout_s: Maximum time of each of the two runs, in seconds.
        out: Folder of both runs and the report; default: a new temporary folder.

    Example: raymega chaos jobs/verify.yaml --fault kill-worker@5,kill-node@12 --set elastic.snapshot_every=1
    Example: raymega chaos jobs/verify.yaml --mtbf 20 --seed 7 --set run.steps=2000
    """
    options = DrillOptions(
        faults=faults, mtbf_s=mtbf_s, kinds=kinds, seconds=seconds, seed=seed, nodes=nodes,
        hold_s=hold_s, return_s=return_s, timeout_s=timeout_s, out=out,
    )  # fmt: skip
    # Mistakes in the job are found before a cluster is started.
    job = api.load_job(job_file, overrides or (), is_for_training=True)
    sys.stderr.write(f"seed {seed}\n")
    verdict, folder = drill(job_file, overrides or (), job, options)
    if as_json:
        print_json(verdict_object(verdict, seed=seed) | {"folder": folder})
    else:
        _show(verdict, folder)
    if verdict.faults:
        raise typer.Exit(1)


def _show(verdict: Verdict, folder: Path) -> None:
    print(table(HEADERS, [_row(each) for each in verdict.incidents]))
    print()
    # wall time by cause, largest first
    for cause, seconds in sorted(verdict.sheet.by_cause.items(), key=lambda item: -item[1]):
        print(f"{cause:20} {seconds:8.1f} s {seconds / verdict.sheet.wall_s:7.1%}")
    print(f"goodput {verdict.sheet.goodput:.1%} of {verdict.sheet.wall_s:.1f} s")
    # losses against the undisturbed run
    loss = verdict.comparison
    print(
        f"{loss.num_equal} of {loss.num_steps} losses equal the undisturbed run's bit for bit; largest "
        f"deviation {loss.largest:.1e} at step {loss.at}"
    )
    print(f"report, picture, logs: {folder}")
    for fault in verdict.faults:
        print(f"FAILED: {fault}")


def _row(each: Incident) -> tuple[object, ...]:
    injected = each.injected
    # The grid column shows both grids only where the run was re-planned.
    before, after = _short(each.grid_before), _short(each.grid_after)
    return (
        injected.fault.kind,
        injected.fault.phase,
        str(injected.rank) if injected.rank >= 0 else "-",
        injected.step,
        _seconds(each.detection_s),
        _seconds(each.recovery_s),
        each.lost_steps,
        each.source or "-",
        before if before == after else f"{before} to {after}",
    )


def _short(grid: Mapping[str, int]) -> str:
    return "-".join(f"{axis}{degree}" for axis, degree in grid.items() if degree > 1) or "one rank"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0 else "-"
