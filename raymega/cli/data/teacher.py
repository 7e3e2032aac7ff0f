"""Command `raymega data teacher`: a teacher's largest logits for every token of a job's datasets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from raymega.cli.options import Address, AsJsonLines, Overrides
from raymega.cli.output import print_json, table
from raymega.cli.progress import phase_bars


def teacher(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml")],
    checkpoint: str = "",
    grid: str = "",
    overrides: Overrides = None,
    address: Address = "auto",
    as_json: AsJsonLines = False,
) -> None:
    """Store the logits that distillation.teacher=stored reads, beside the job's datasets.

    Options:
        job: Job file of the run that will read them, with distillation.loss_type=forward_kl.
        checkpoint: URI of the teacher; default: distillation.teacher_checkpoint.
        grid: Parallel degrees: --grid tp=2,pp=2; empty is one rank.

    Example: raymega data teacher jobs/distill.yaml --set data.path=tokens --checkpoint runs/large
    """
    from raymega.api import load_job
    from raymega.evaluate.teacher import store_teacher

    read = load_job(job, tuple(overrides or ()))
    with phase_bars() as on_progress:
        stored = store_teacher(
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
    rows = [[e.path, e.rows, e.top_k, e.checkpoint] for e in stored]
    typer.echo(table(["dataset", "rows", "logits a token", "checkpoint"], rows))
