"""Command `raymega data reference`: log-probabilities of a preference dataset's answers by a reference model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from raymega.cli.options import Address, AsJsonLines, Overrides
from raymega.cli.output import print_json, table
from raymega.cli.progress import phase_bars


def reference(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml")],
    checkpoint: str = "",
    grid: str = "",
    overrides: Overrides = None,
    address: Address = "auto",
    as_json: AsJsonLines = False,
) -> None:
    """Store the log-probabilities that a preference loss compares with, beside the job's datasets.

    Options:
        job: Job file of the run that will read them, with preference.loss_type.
        checkpoint: URI of the reference model; default: checkpoint.init_from, with which the run begins.
        grid: Parallel degrees: --grid tp=2,pp=2; empty is one rank.

    Example: raymega data reference jobs/dpo.yaml --set data.path=pairs --set checkpoint.init_from=runs/sft
    """
    from raymega.api import load_job
    from raymega.evaluate.reference import store_reference

    read = load_job(job, tuple(overrides or ()))
    with phase_bars() as on_progress:
        stored = store_reference(
            read,
            checkpoint=checkpoint,
            grid=grid,
            address=address,
            on_rows=lambda done, total: on_progress("rows", done, total),
        )
    if as_json:
        for each in stored:
            print_json(asdict(each))
        return
    typer.echo(
        table(["file", "pairs", "checkpoint"], [[e.file, e.pairs, e.checkpoint] for e in stored])
    )
