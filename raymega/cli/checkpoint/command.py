"""Command `raymega checkpoint`: list, show, verify and diff; `checkpoint_changes.py` has the other commands."""

from __future__ import annotations

import re
import sys
from math import inf, isfinite
from shlex import quote
from typing import Annotated, Any

import typer

from raymega.box import SavedBox
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.tools.diff import TensorDifference, compare
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import (
    CheckpointSummary,
    list_checkpoints,
    open_checkpoint,
    verify_checkpoints,
)
from raymega.cli.checkpoint.changes import copy_, now, prune
from raymega.cli.checkpoint.merge import merge_
from raymega.cli.options import AsJson, Uri, add_command
from raymega.cli.output import json_object, print_json, table
from raymega.errors import counted

WEIGHTS = "model/"
"""Start of the names of tensors that are weights."""
MOST_NOTES = 5
"""Most tensors without a counterpart that are shown of unrelated checkpoints."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")
checkpoint_app = typer.Typer(
    help="Inspect, compare, copy, merge and prune checkpoints in any store.\n\nExample: raymega checkpoint list ~/.raymega/runs/verify",
    no_args_is_help=True,
)


def list_(uri: Uri, as_json: AsJson = False) -> None:
    """List checkpoints, newest first, and whether all their files exist.

    Example: raymega checkpoint list ~/.raymega/runs/verify
    """
    _show_summaries(uri, list_checkpoints(uri), as_json=as_json)


def show(uri: Uri, as_json: AsJson = False) -> None:
    """Show state, grid and tensors of a checkpoint; for a run, of its newest one.

    Example: raymega checkpoint show ~/.raymega/runs/verify/checkpoints/step-00000100
    """
    _, manifest = open_checkpoint(uri)
    tensors = [_tensor_object(name, boxes) for name, boxes in manifest.tensors().items()]
    if as_json:
        print_json(_manifest_object(manifest, tensors))
    else:
        _show_manifest(manifest, tensors)


def verify(uri: Uri, as_json: AsJson = False) -> None:
    """Read every byte and compare checksums; exit 1 if any file is missing or damaged.

    Example: raymega checkpoint verify ~/.raymega/runs/verify
    """
    summaries = verify_checkpoints(uri)
    _show_summaries(uri, summaries, as_json=as_json)
    if not as_json and not any(summary.faults for summary in summaries):
        print(f"verified: every byte of {len(summaries)} equals its checksum")
    if any(summary.faults for summary in summaries):
        raise typer.Exit(1)


def diff(
    uri: Uri,
    other: Annotated[str, typer.Argument(metavar="URI2")],
    limit: Annotated[float, typer.Option(min=0)] = inf,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints tensor by tensor, whatever layouts wrote them.

    relative is the largest |a - b| over the tensor's largest magnitude, elementwise the largest
    |a - b| / max(|a|, |b|). For a run, its newest checkpoint is compared. Exit 1 for checkpoints of
    different models, of which most tensors have no counterpart.

    Options:
        other: Second checkpoint: a run's folder, one of its checkpoints/step-... or a manifest.
        limit: Exit 1 if a tensor's relative difference is larger, or if a tensor has no counterpart;
            inf never fails.

    Example: raymega checkpoint diff runs/a runs/b/checkpoints/step-00000100
    """
    sides = [open_checkpoint(uri), open_checkpoint(other)]
    found = list(compare(*sides))
    if as_json:
        steps = [side.manifest.step for side in sides]
        print_json({"uris": [uri, other], "steps": steps, "tensors": _plain(found)})
    else:
        _show_differences(sides, found)
    # Unrelated checkpoints are no result. With a limit the exit code tells the result.
    if _are_unrelated(found):
        print(_unrelated_line(uri, other, found), file=sys.stderr)
        raise typer.Exit(1)
    if limit < inf and any(each.note or each.relative > limit for each in found):
        raise typer.Exit(1)


add_command(checkpoint_app, list_, "list")
for _command in (show, verify, diff, prune):
    add_command(checkpoint_app, _command)
add_command(checkpoint_app, copy_, "copy")
add_command(checkpoint_app, merge_, "merge")
add_command(checkpoint_app, now)


def _plain(found: list[TensorDifference]) -> list[dict[str, object]]:
    """Return plain values, with null for inf and nan, which JSON lacks."""
    return [
        {name: value if not isinstance(value, float) or isfinite(value) else None
         for name, value in json_object(each).items()}
        for each in found
    ]  # fmt: skip


def _show_differences(sides: list[Checkpoint], found: list[TensorDifference]) -> None:
    for side in sides:
        print(f"{side.store.uri}/{side.manifest.key}: step {side.manifest.step}")
    if _are_unrelated(found):
        found = [each for each in found if each.note][:MOST_NOTES]
    # weights first, then what the optimizer keeps of them
    rows = [
        (each.name, each.note, "", "") if each.note else
        (each.name, f"{each.relative:.3g}", f"{each.elementwise:.3g}",
         f"{each.num_different:,} of {each.num_elements:,}")
        for each in sorted(found, key=lambda each: not each.name.startswith(WEIGHTS))
    ]  # fmt: skip
    print(table(("tensor", "relative", "elementwise", "elements that differ"), rows))
    # Tensors with a note have no counterpart, so no difference.
    measured = [each for each in found if not each.note]
    if measured:
        print(
            "relative: largest |a - b| over the tensor's largest magnitude; elementwise: largest "
            "|a - b| / max(|a|, |b|) of an element"
        )
        _show_layers(measured)
        worst = max(measured, key=lambda each: each.relative)
        print(f"largest relative difference: {worst.relative:.3g} in {worst.name}")


def _show_layers(measured: list[TensorDifference]) -> None:
    """Print the largest difference of the weights of each layer; nothing for equal weights."""
    worst: dict[str, float] = {}
    for each in measured:
        if each.name.startswith(WEIGHTS):
            found = _LAYER.search(each.name)
            layer = f"layer {int(found[1]):,}" if found else "others"
            worst[layer] = max(worst.get(layer, 0.0), each.relative)
    if any(worst.values()):
        rows = [(layer, f"{value:.3g}") for layer, value in worst.items()]
        print(f"\n{table(('weights of', 'largest relative'), rows)}\n")


def _are_unrelated(found: list[TensorDifference]) -> bool:
    """Return whether most weights have no counterpart of their shape."""
    weights = [each for each in found if each.name.startswith(WEIGHTS)] or found
    return 2 * sum(bool(each.note) for each in weights) > len(weights)


def _unrelated_line(uri: str, other: str, found: list[TensorDifference]) -> str:
    return (
        f"{uri} and {other} are of different models: {sum(bool(each.note) for each in found)} of "
        f"{counted(len(found), 'tensor')} have no counterpart; compare checkpoints of one model, see "
        f"`raymega checkpoint show {quote(uri)}`"
    )


def _show_summaries(uri: str, summaries: list[CheckpointSummary], *, as_json: bool) -> None:
    if as_json:
        rows = [{**json_object(row), "is_whole": not row.faults} for row in summaries]
        print_json({"uri": uri, "checkpoints": rows})
        return
    if not summaries:
        print(f"no checkpoints at {uri}: the run has not saved yet")
        return
    headers = ("checkpoint", "step", "attempt", "created", "files", "bytes", "whole")
    lines = [
        (s.key, s.step, s.attempt, s.created, s.num_files, s.total_bytes, "no" if s.faults else "yes")
        for s in summaries
    ]  # fmt: skip
    print(table(headers, lines))
    for summary in summaries:
        for fault in summary.faults:
            print(fault)


def _tensor_object(name: str, boxes: list[SavedBox]) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": boxes[0].dtype,
        "shape": boxes[0].global_shape,
        "num_boxes": len(boxes),
        "num_bytes": sum(box.num_bytes for box in boxes),
    }


def _manifest_object(manifest: Manifest, tensors: list[dict[str, Any]]) -> dict[str, object]:
    shown = ("key", "step", "attempt", "created", "state", "grid", "metrics", "job", "total_bytes")
    head = {name: getattr(manifest, name) for name in shown}
    return {**head, "files": manifest.file_sizes(), "tensors": tensors}


def _show_manifest(manifest: Manifest, tensors: list[dict[str, Any]]) -> None:
    print(f"{manifest.key}, written {manifest.created}")
    # head, then one row per tensor
    for title in ("state", "grid", "metrics"):
        if values := getattr(manifest, title):
            print(f"{title}: " + ", ".join(f"{name}={value}" for name, value in values.items()))
    print(
        f"{counted(manifest.total_bytes, 'byte')} of tensors in {counted(len(manifest.file_sizes()), 'file')}"
    )
    rows = [
        (at["name"], at["dtype"], " x ".join(map(str, at["shape"])), at["num_boxes"], at["num_bytes"])
        for at in sorted(tensors, key=lambda at: at["name"])
    ]  # fmt: skip
    print(table(("tensor", "dtype", "shape", "boxes", "bytes"), rows))
