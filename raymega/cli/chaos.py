"""`raymega chaos`: shows what faults do to a job's run; no logic of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from raymega import api
from raymega.chaos.command import DrillOptions, drill
from raymega.chaos.experiment import Verdict, verdict_object
from raymega.chaos.faults import KINDS, PHASES
from raymega.chaos.time_accounting import Incident
from raymega.cli.tables import table
from raymega.cli.train import Overrides

HEADERS = (
    "fault", "phase", "rank", "step", "noticed", "recovered", "steps lost", "state from", "grid",
)  # fmt: skip


def chaos(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")],
    overrides: Overrides = None,
    faults: Annotated[
        str,
        typer.Option(
            "--fault",
            metavar="KIND@WHEN,..",
            help=f"Faults in their order, each at a step (kill-worker@5) or in a phase "
            f"(hang@restore, kill-node@upload:6). Kinds: {', '.join(KINDS)}. "
            f"Phases: {', '.join(PHASES)}.",
        ),
    ] = "",
    mtbf_s: Annotated[
        float, typer.Option("--mtbf", min=0, help="Faults by chance: mean seconds between them.")
    ] = 0.0,
    kinds: Annotated[
        str, typer.Option(metavar="KIND,..", help="With --mtbf, which faults may come.")
    ] = "",
    seconds: Annotated[
        float, typer.Option(min=0, help="With --mtbf, stop the run after so long; 0 is its end.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Draws times, kinds and victims.")] = 0,
    nodes: Annotated[int, typer.Option(min=2, help="Nodes of the cluster; the grid has two.")] = 3,
    hold_s: Annotated[
        float, typer.Option(min=0, help="How long a service is in trouble, or a node drains.")
    ] = 3.0,
    return_s: Annotated[
        float, typer.Option(min=0, help="How long until a lost node is replaced.")
    ] = 10.0,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest time of each run.")] = 3600.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of both runs and the report; default: a new one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Train a job twice, undisturbed and under real faults, and compare.

    A Ray cluster of several nodes is started on this machine for it. Exit codes: 0 every fault was
    recovered from and the losses are the undisturbed run's, 1 they are not, 2 a mistake in the job.

    Example: raymega chaos jobs/verify.yaml --fault kill-worker@5,kill-node@12 --set elastic.snapshot_every=1
    Example: raymega chaos jobs/verify.yaml --mtbf 20 --seed 7 --set run.steps=2000
    """
    options = DrillOptions(
        faults=faults, mtbf_s=mtbf_s, kinds=kinds, seconds=seconds, seed=seed, nodes=nodes,
        hold_s=hold_s, return_s=return_s, timeout_s=timeout_s, out=out,
    )  # fmt: skip
    job = api.load_job(job_file, overrides or (), is_for_training=True)
    sys.stderr.write(f"seed {seed}\n")
    verdict, folder = drill(job_file, overrides or (), job, options)
    if as_json:
        print(json.dumps(verdict_object(verdict, seed=seed) | {"folder": str(folder)}))
    else:
        _show(verdict, folder)
    if verdict.faults:
        raise typer.Exit(1)


def _show(verdict: Verdict, folder: Path) -> None:
    print(table(HEADERS, [_row(each) for each in verdict.incidents]))
    print()
    for cause, seconds in sorted(verdict.sheet.by_cause.items(), key=lambda item: -item[1]):
        print(f"{cause:20} {seconds:8.1f} s {seconds / verdict.sheet.wall_s:7.1%}")
    print(f"goodput {verdict.sheet.goodput:.1%} of {verdict.sheet.wall_s:.1f} s")
    loss = verdict.comparison
    print(
        f"{loss.num_equal} of {loss.num_steps} losses are the undisturbed run's bit for bit; largest "
        f"deviation {loss.largest:.1e} at step {loss.at}"
    )
    print(f"report, picture, logs: {folder}")
    for fault in verdict.faults:
        print(f"FAILED: {fault}")


def _row(each: Incident) -> tuple[object, ...]:
    injected = each.injected
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
