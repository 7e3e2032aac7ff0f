"""Command `raymega eval`: evaluates checkpoints on a task, on any grid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from raymega.cli.options import Address, AsJsonLines, Overrides
from raymega.cli.output import print_json, table
from raymega.cli.progress import phase_bars
from raymega.errors import counted
from raymega.evaluate.recording import OF_RUN
from raymega.evaluate.run import EvalOptions, EvalReport, evaluate_each
from raymega.evaluate.tasks.table import TASKS

EvalTask = Annotated[
    str,
    typer.Option(
        "--task",
        metavar="NAME|FILE.yaml",
        help=f"Task: {', '.join(TASKS)}; or a YAML file of lm-eval (extra eval).",
    ),
]


EvalUris = Annotated[
    list[str],
    typer.Argument(
        metavar="URI...",
        help="Folder of a run, one of its checkpoints/step-..., or a manifest; several are compared.",
    ),
]


def evaluate(  # the options of the command
    uris: EvalUris,
    task: EvalTask,
    data: Path | None = None,
    grid: str = "",
    overrides: Overrides = None,
    tokenizer: Path | None = None,
    seq_len: Annotated[int, typer.Option(min=0)] = 0,
    stride: Annotated[int, typer.Option(min=0)] = 0,
    limit: Annotated[int, typer.Option(min=0)] = 0,
    samples: Annotated[Path | None, typer.Option(metavar="FILE.jsonl")] = None,
    mlflow: Annotated[str, typer.Option(metavar="run|off|URI")] = OF_RUN,
    address: Address = "auto",
    as_json: AsJsonLines = False,
) -> None:
    """Evaluate checkpoints on a task, on any grid, whatever grid they were trained on.

    Options:
        data: Test set of the task, a file; for a YAML file JSON lines that take the place of its dataset.
        grid: Parallel degrees: --grid tp=2,pp=2; empty is one rank.
        tokenizer: A tokenizer.json; without it the model's own, or that of the run's dataset.
        seq_len: Number of tokens that the model reads at once; 0 is the run's.
        stride: Number of tokens by which a window moves on; 0 is the task's own (wikitext: 32).
        limit: Evaluate this many documents, or windows; 0 is all.
        samples: Write a record of each sample to this file.
        mlflow: Write the metrics, at the checkpoint's step, to the MLflow of the run, to none, or to a tracking URI.

    Example: raymega eval my-out/runs/my-run --task lambada --data lambada_test.jsonl --grid tp=2
    """
    options = EvalOptions(
        grid=grid,
        overrides=tuple(overrides or ()),
        tokenizer=tokenizer,
        seq_len=seq_len,
        stride=stride,
        limit=limit,
        mlflow=mlflow,
    )
    with phase_bars() as on_progress:
        reports = evaluate_each(
            uris,
            task,
            data,
            options=options,
            address=address,
            on_rows=lambda done, total: on_progress("rows", done, total),
        )
    if samples is not None:
        lines = (
            json.dumps({"checkpoint": report.checkpoint, "sample": number, **each})
            for report in reports
            for number, each in enumerate(report.samples)
        )
        samples.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if as_json:
        for report in reports:
            print_json(report.summary())
    elif len(reports) == 1:
        _show(reports[0])
    else:
        _compare(reports)


def _show(report: EvalReport) -> None:
    rows = [(name, f"{value:.6g}") for name, value in report.metrics.items()]
    print(table((report.task, f"step {report.step}"), rows))
    print(f"\n{_counts(report)}")
    for note in report.notes:
        print(note)


def _compare(reports: Sequence[EvalReport]) -> None:
    """Print a row for each checkpoint, then what was counted and what makes rows incomparable."""
    names = list(dict.fromkeys(name for report in reports for name in report.metrics))
    rows = [
        (
            report.checkpoint,
            report.step,
            *(f"{report.metrics[n]:.6g}" if n in report.metrics else "" for n in names),
        )
        for report in reports
    ]
    print(table((reports[0].task, "step", *names), rows))
    for number, report in enumerate(reports, start=1):
        print(f"\n{number}. {_counts(report)}")
        for note in report.notes:
            print(f"   {note}")
    if len({report.tokens for report in reports}) > 1:
        print(
            "\nThe checkpoints cut the text into different numbers of tokens: compare accuracies and figures of "
            "words and bytes, not those of tokens."
        )


def _counts(report: EvalReport) -> str:
    degrees = " ".join(f"{axis}{degree}" for axis, degree in report.grid.items() if degree > 1)
    words = f", {counted(report.words, 'word')}" if report.words else ""
    return (
        f"{counted(report.documents, 'document')}, {counted(report.tokens, 'token')} scored{words}; "
        f"{degrees or 'one rank'}; {report.seconds:.1f} s"
    )
