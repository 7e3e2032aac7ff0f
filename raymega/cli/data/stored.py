"""Commands `raymega data reference` and `teacher`: outputs of another model, stored beside a job's datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

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
    from raymega.evaluate.reference import store_reference

    store = partial(store_reference, checkpoint=checkpoint, grid=grid, address=address)
    columns = {"file": "file", "pairs": "pairs", "checkpoint": "checkpoint"}
    _tell(store, job, overrides, columns, as_json=as_json)


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
    from raymega.evaluate.teacher import store_teacher

    store = partial(store_teacher, checkpoint=checkpoint, grid=grid, address=address)
    columns = {
        "dataset": "path",
        "rows": "rows",
        "logits a token": "top_k",
        "checkpoint": "checkpoint",
    }
    _tell(store, job, overrides, columns, as_json=as_json)


def _tell(
    store: Callable[..., list[Any]],
    job: Path,
    overrides: list[str] | None,
    columns: Mapping[str, str],
    *,
    as_json: bool,
) -> None:
    """Store what ``store`` makes of a job, with a bar of its rows, and print each result.

    Args:
        store: Function of a job and ``on_rows`` that returns a value for each stored file.
        job: Job file.
        overrides: Overrides of the job.
        columns: Attributes of a result, by the heading of their column.
        as_json: Whether to print JSON lines.
    """
    from raymega.api import load_job

    read = load_job(job, tuple(overrides or ()))
    with phase_bars() as on_progress:
        stored = store(read, on_rows=lambda done, total: on_progress("rows", done, total))
    rows = [asdict(each) for each in stored]
    if as_json:
        for row in rows:
            print_json(row)
        return
    typer.echo(table([*columns], [[row[name] for name in columns.values()] for row in rows]))
