"""Command `raymega runs`: lists the runs of a store or folder."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from raymega.cli.options import AsJson
from raymega.cli.output import json_object, print_json, table
from raymega.orchestrate.run_store.list_runs import RunSummary, list_runs

DEFAULT_ROOT = Path("~/.raymega/runs")


def runs(
    uri: Annotated[str, typer.Argument(metavar="URI")] = str(DEFAULT_ROOT), as_json: AsJson = False
) -> None:
    """List the runs of a store or folder, newest first: state, step, loss, time and place.

    Options:
        uri: Root of runs, a job's checkpoint.uri, or one run's folder.

    Example: raymega runs
    Example: raymega runs ~/.raymega/runs --json
    """
    # the default folder need not exist
    is_empty = uri == str(DEFAULT_ROOT) and not DEFAULT_ROOT.expanduser().exists()
    found = [] if is_empty else list_runs(uri, now=datetime.now(UTC).isoformat())
    if as_json:
        print_json({"uri": uri, "runs": [json_object(run) for run in found]})
        return
    if not found:
        print(f"no runs at {uri}; raymega train jobs/verify.yaml starts one")
        return
    headers = ("run", "state", "step", "saved", "loss", "attempts", "updated", "where", "driver")
    print(table(headers, [_row(run) for run in found]))


def _row(run: RunSummary) -> tuple[object, ...]:
    step = f"{run.step:,} of {run.total_steps:,}" if run.total_steps else f"{run.step:,}"
    loss = "-" if run.loss is None else f"{run.loss:.4f}"
    when = run.updated[:16].replace("T", " ") or "-"
    return (
        run.name, run.state, step, f"{run.saved_step:,}", loss, run.attempts, when, run.uri, run.driver or "-"
    )  # fmt: skip
