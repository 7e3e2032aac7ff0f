"""`raymega checkpoint`: list, show and verify what a run has saved."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from raymega.checkpoint.inspection import (
    CheckpointSummary,
    list_checkpoints,
    open_checkpoint,
    verify_checkpoints,
)
from raymega.checkpoint.manifest import Manifest
from raymega.messages import SavedBox

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


def _show_summaries(uri: str, summaries: list[CheckpointSummary], *, as_json: bool) -> None:
    if as_json:
        rows = [{**asdict(row), "is_whole": not row.faults} for row in summaries]
        print(json.dumps({"uri": uri, "checkpoints": rows}))
        return
    console = Console(highlight=False)
    table = Table("checkpoint", "step", "attempt", "created", "files", "bytes", "whole")
    for row in summaries:
        numbers = (row.created, str(row.num_files), f"{row.total_bytes:,}")
        whole = "no" if row.faults else "yes"
        table.add_row(row.key, str(row.step), str(row.attempt), *numbers, whole)
    console.print(table if summaries else f"no checkpoints at {uri}")
    for row in summaries:
        for fault in row.faults:
            console.print(fault, markup=False, soft_wrap=True)


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
    console = Console(highlight=False)
    console.print(f"{manifest.key}, written {manifest.created}", soft_wrap=True)
    for title, values in (("state", manifest.state), ("grid", manifest.grid)):
        console.print(f"{title}: " + ", ".join(f"{name}={value}" for name, value in values.items()))
    files = manifest.file_sizes()
    console.print(f"{manifest.total_bytes:,} bytes of tensors in {len(files)} files")
    table = Table("tensor", "dtype", "shape", "boxes", "bytes")
    for name, boxes in sorted(manifest.tensors().items()):
        shape = " x ".join(map(str, boxes[0].global_shape))
        num_bytes = sum(box.num_bytes for box in boxes)
        table.add_row(name, boxes[0].dtype, shape, str(len(boxes)), f"{num_bytes:,}")
    console.print(table)
