"""Command `raymega report`: one self-contained HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raymega import api
from raymega.cli.options import AsJson
from raymega.cli.output import print_json, write_drawing


def report(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    out: Annotated[Path, typer.Option(metavar="FILE.html")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write a run's page: curves, speed, memory by rank against the plan, experts, incidents, settings.

    The page is one file without scripts, fonts or pictures of others. A run that is under way or was
    killed has one too. It is made from metrics.jsonl, so it needs no MLflow.

    Options:
        run: Name of a run in ~/.raymega/runs, a run's folder, its URI, or its metrics.jsonl.
        out: HTML file to write.

    Example: raymega report ~/.raymega/runs/verify --out report.html
    """
    page = api.report(run)
    write_drawing(
        out,
        page,
        option="--out",
        rule="it must be a file that can be written, in an existing folder",
        remedy="use --out report.html",
    )
    if as_json:
        print_json({"run": run, "out": out, "num_bytes": len(page)})
    else:
        print(f"report written to {out}")
