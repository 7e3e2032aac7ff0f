"""`raymega checkpoint`: list, show and verify what a run has saved, remove what killed writers left."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from raymega.checkpoint.inspection import (
    CheckpointSummary,
    list_checkpoints,
    open_checkpoint,
    verify_checkpoints,
)
from raymega.checkpoint.manifest import Manifest
from raymega.cli.tables import table
from raymega.messages import SavedBox
from raymega.storage.open import drop_unfinished

checkpoint_app = typer.Typer(help="Look into the checkpoints of a run.", no_args_is_help=True)

Uri = Annotated[
    str, typer.Argument(help="A run's folder, one of its checkpoints/step-... or a manifest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@checkpoint_app.command("list")
def list_(uri: Uri, as_json: AsJson = False) -> None:
    """List checkpoints, newest first, and whether their files are all there.

    Example: raymega checkpoint list ~/.raymega/runs/verify
    """
    _show_summaries(uri, list_checkpoints(uri), as_json=as_json)


@checkpoint_app.command()
def show(uri: Uri, as_json: AsJson = False) -> None:
    """Show state, grid and tensors of a checkpoint; of a run, the newest one.

    Example: raymega checkpoint show ~/.raymega/runs/verify/checkpoints/step-00000100
    """
    _, manifest = open_checkpoint(uri)
    if as_json:
        print(json.dumps(_manifest_object(manifest)))
    else:
        _show_manifest(manifest)


@checkpoint_app.command()
def verify(uri: Uri, as_json: AsJson = False) -> None:
    """Read every byte and compare checksums; exit 1 when anything is not as it was written.

    Example: raymega checkpoint verify ~/.raymega/runs/verify
    """
    summaries = verify_checkpoints(uri)
    _show_summaries(uri, summaries, as_json=as_json)
    if any(summary.faults for summary in summaries):
        raise typer.Exit(1)


@checkpoint_app.command()
def prune(
    uri: Annotated[str, typer.Argument(help="A run's folder, or any folder above runs.")],
    older_than_h: Annotated[
        float,
        typer.Option("--older-than", min=0, help="Hours; more than a write under way can take."),
    ] = 24.0,
    as_json: AsJson = False,
) -> None:
    """Remove what killed writers left: unfinished uploads, which are invisible but cost space.

    Checkpoints are not touched. Folders need none of this.

    Example: raymega checkpoint prune s3://team/runs
    """
    keys = drop_unfinished(uri, older_than=timedelta(hours=older_than_h), now=datetime.now(UTC))
    if as_json:
        print(json.dumps({"uri": uri, "aborted": keys}))
        return
    for key in keys:
        print(f"aborted the upload of {key}")
    print(f"{len(keys)} unfinished uploads older than {older_than_h:g} h at {uri}")


def _show_summaries(uri: str, summaries: list[CheckpointSummary], *, as_json: bool) -> None:
    if as_json:
        rows = [{**asdict(row), "is_whole": not row.faults} for row in summaries]
        print(json.dumps({"uri": uri, "checkpoints": rows}))
        return
    if not summaries:
        print(f"no checkpoints at {uri}")
        return
    headers = ("checkpoint", "step", "attempt", "created", "files", "bytes", "whole")
    lines = [
        (
            s.key,
            s.step,
            s.attempt,
            s.created,
            s.num_files,
            s.total_bytes,
            "no" if s.faults else "yes",
        )
        for s in summaries
    ]
    print(table(headers, lines))
    for summary in summaries:
        for fault in summary.faults:
            print(fault)


def _tensor_object(name: str, boxes: list[SavedBox]) -> dict[str, object]:
    return {
        "name": name,
        "dtype": boxes[0].dtype,
        "shape": boxes[0].global_shape,
        "num_boxes": len(boxes),
        "num_bytes": sum(box.num_bytes for box in boxes),
    }


def _manifest_object(manifest: Manifest) -> dict[str, object]:
    return {
        "key": manifest.key,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "created": manifest.created,
        "state": manifest.state,
        "grid": manifest.grid,
        "job": manifest.job,
        "total_bytes": manifest.total_bytes,
        "files": manifest.file_sizes(),
        "tensors": [_tensor_object(name, boxes) for name, boxes in manifest.tensors().items()],
    }


def _show_manifest(manifest: Manifest) -> None:
    print(f"{manifest.key}, written {manifest.created}")
    for title, values in (("state", manifest.state), ("grid", manifest.grid)):
        print(f"{title}: " + ", ".join(f"{name}={value}" for name, value in values.items()))
    print(f"{manifest.total_bytes:,} bytes of tensors in {len(manifest.file_sizes())} files")
    rows = [
        (
            name,
            boxes[0].dtype,
            " x ".join(map(str, boxes[0].global_shape)),
            len(boxes),
            sum(box.num_bytes for box in boxes),
        )
        for name, boxes in sorted(manifest.tensors().items())
    ]
    print(table(("tensor", "dtype", "shape", "boxes", "bytes"), rows))
