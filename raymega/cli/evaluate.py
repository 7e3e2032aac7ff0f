"""Command `raymega eval`: evaluates a checkpoint on a task, on any grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from raymega import api
from raymega.cli.options import Address, AsJson, Overrides, Uri
from raymega.cli.output import print_json, table
from raymega.cli.progress import phase_bars
from raymega.evaluate.run import EvalOptions, EvalReport
from raymega.evaluate.tasks.table import TASKS

EvalTask = Annotated[str, typer.Option("--task", metavar="NAME", help=f"Task: {', '.join(TASKS)}.")]


def evaluate(  # the options of the command
    uri: Uri,
    task: EvalTask,
    data: Path,
    grid: str = "",
    overrides: Overrides = None,
    tokenizer: Path | None = None,
    seq_len: Annotated[int, typer.Option(min=0)] = 0,
    stride: Annotated[int, typer.Option(min=0)] = 0,
    limit: Annotated[int, typer.Option(min=0)] = 0,
    samples: Annotated[Path | None, typer.Option(metavar="FILE.jsonl")] = None,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint on a task, on any grid, whatever grid it was trained on.

    Options:
        data: Test set of the task, a file.
        grid: Parallel degrees: --grid tp=2,pp=2; empty is one rank.
        tokenizer: A tokenizer.json; without it the model's own, or that of the run's dataset.
        seq_len: Number of tokens that the model reads at once; 0 is the run's.
        stride: Number of tokens by which a window moves on; 0 is the task's own (wikitext: 32).
        limit: Evaluate this many documents, or windows; 0 is all.
        samples: Write a record of each sample to this file.

    Example: raymega eval my-out/runs/my-run --task lambada --data lambada_test.jsonl --grid tp=2
    """
    options = EvalOptions(
        grid=grid,
        overrides=tuple(overrides or ()),
        tokenizer=tokenizer,
        seq_len=seq_len,
        stride=stride,
        limit=limit,
    )
    with phase_bars() as on_progress:
        report = api.evaluate(
            uri,
            task,
            data,
            options=options,
            address=address,
            on_rows=lambda done, total: on_progress("rows", done, total),
        )
    if samples is not None:
        lines = (json.dumps({"sample": n, **each}) for n, each in enumerate(report.samples))
        samples.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if as_json:
        print_json(_as_object(report))
    else:
        _show(report)


def _as_object(report: EvalReport) -> dict[str, object]:
    return {
        "task": report.task,
        "metrics": dict(report.metrics),
        "documents": report.documents,
        "tokens": report.tokens,
        "words": report.words,
        "step": report.step,
        "checkpoint": report.checkpoint,
        "grid": dict(report.grid),
        "notes": list(report.notes),
        "seconds": report.seconds,
    }


def _show(report: EvalReport) -> None:
    rows = [(name, f"{value:.6g}") for name, value in report.metrics.items()]
    print(table((report.task, f"step {report.step}"), rows))
    degrees = " ".join(f"{axis}{degree}" for axis, degree in report.grid.items() if degree > 1)
    words = f", {report.words:,} words" if report.words else ""
    print(
        f"\n{report.documents:,} documents, {report.tokens:,} tokens scored{words}; "
        f"{degrees or 'one rank'}; {report.seconds:.1f} s"
    )
    for note in report.notes:
        print(note)
