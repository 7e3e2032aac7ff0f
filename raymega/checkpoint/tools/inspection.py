"""Lists, opens and verifies the checkpoints of a store, for people.

A URI names a run (``<checkpoint.uri>/<run.name>``), one of its checkpoints
(``.../checkpoints/step-00000100``) or a manifest. The module changes nothing and does not need torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote

from raymega.checkpoint.format.data_file import read_block, read_header
from raymega.checkpoint.format.epochs import newest_epoch
from raymega.checkpoint.format.keys import ROOT, checkpoint_of
from raymega.checkpoint.format.manifest import (
    Manifest,
    broken_files,
    list_manifests,
    read_manifest,
    read_root,
)
from raymega.checkpoint.format.manifest_builder import coverage_faults
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.config.hub import download, hub_name
from raymega.errors import CheckpointError, ConfigError, Fault, first_few, raise_faults
from raymega.storage.registry import is_anything_at, local_path, open_store, reading_faults
from raymega.storage.store import Store

MAX_NAMED = 5
"""Largest number of runs that an error message names."""
# A URI of a part of a run: everything before "checkpoints/step-..." is the run's folder.
_PART_OF_RUN = re.compile(rf"(?P<run>.*)/(?P<part>{ROOT}step-\d+(/[^/]+)?)/?")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary:
    """Summary of a checkpoint, as ``raymega checkpoint list`` shows it.

    Attributes:
        key: Key of the manifest.
        step: Number of completed optimizer steps.
        attempt: Number of the attempt that wrote it.
        created: Time of the commit, ISO 8601, UTC; empty when the manifest cannot be read.
        num_files: Number of data files.
        total_bytes: Size of all tensors in bytes.
        faults: Faults found; none when the checkpoint is whole.
    """

    key: str
    step: int
    attempt: int
    created: str
    num_files: int
    total_bytes: int
    faults: tuple[str, ...]


def list_checkpoints(uri: str) -> list[CheckpointSummary]:
    """Summarise every checkpoint that ``uri`` names, newest first, checking the sizes of its files.

    Raises:
        ConfigError: Nothing at all exists at the URI.
    """
    store, keys = _locate(uri)
    # A run that has not saved yet is an empty list, no error; its first driver has left a lease.
    if not keys and not newest_epoch(store):
        absent = [] if hub_name(uri) else list(absence_faults(uri))
        raise_faults(ConfigError, absent or [_nothing_at(uri)])
    return [_summarise(store, key, is_deep=False) for key in keys]


def verify_checkpoints(uri: str) -> list[CheckpointSummary]:
    """Summarise every checkpoint that ``uri`` names, newest first, reading and verifying every byte.

    Raises:
        ConfigError: The URI names no checkpoint.
    """
    store, keys = _locate(uri)
    raise_faults(ConfigError, [] if keys else [_nothing_at(uri)])
    return [_summarise(store, key, is_deep=True) for key in keys]


def open_checkpoint(uri: str) -> Checkpoint:
    """Open the newest checkpoint that ``uri`` names, whole or not.

    Raises:
        ConfigError: The URI names no checkpoint.
        CheckpointError: The manifest cannot be read.
    """
    store, root = open_root(uri)
    return Checkpoint(store, read_manifest(store, root.key) if root.index else root)


def open_root(uri: str) -> Checkpoint:
    """Open the newest checkpoint that ``uri`` names without the boxes that are in an index.

    Raises:
        ConfigError: The URI names no checkpoint.
        CheckpointError: The manifest cannot be read.
    """
    store, keys = _locate(uri)
    raise_faults(ConfigError, [] if keys else [_nothing_at(uri)])
    return Checkpoint(store, read_root(store, keys[0]))


def run_of(uri: str) -> str:
    """Return the URI of the run that ``uri`` names, or names a part of."""
    match = _PART_OF_RUN.fullmatch(uri)
    return match["run"] if match else uri


def _locate(uri: str) -> tuple[Store, list[str]]:
    """Return the run's store, and the keys of the manifests that ``uri`` names, newest first."""
    match, root = _PART_OF_RUN.fullmatch(uri), run_of(uri)
    raise_faults(ConfigError, reading_faults(root, field="URI"))
    store = open_store(root)
    # A step's folder or one manifest; the slash keeps step-00000010 from naming step-000000100.
    prefix = f"{match['part']}/" if match else ROOT
    return store, [key for key in list_manifests(store) if f"{key}/".startswith(prefix)]


def _summarise(store: Store, key: str, *, is_deep: bool) -> CheckpointSummary:
    at = checkpoint_of(key)
    assert at is not None, f"{key} is a manifest's"
    # An unreadable manifest: its key still tells step and attempt.
    try:
        manifest = (read_manifest if is_deep else read_root)(store, key)
    except CheckpointError as error:
        return CheckpointSummary(
            key=key, step=at.step, attempt=at.attempt, created="", num_files=0, total_bytes=0,
            faults=(str(error),),
        )  # fmt: skip
    return CheckpointSummary(
        key=key,
        step=manifest.step,
        attempt=manifest.attempt,
        created=manifest.created,
        num_files=len(manifest.file_sizes()),
        total_bytes=manifest.total_bytes,
        faults=tuple(map(str, _faults(store, manifest, is_deep=is_deep))),
    )


def _faults(store: Store, manifest: Manifest, *, is_deep: bool) -> Iterator[Fault]:
    # Sizes of the files; reads no data.
    broken = broken_files(store, manifest)
    yield from broken.values()
    if not is_deep:
        return
    # Coverage of the tensors, then header and boxes of the files that have the right size.
    yield from coverage_faults(manifest)
    for key in manifest.file_sizes().keys() - broken.keys():
        try:
            read_header(store, manifest, key)
        except CheckpointError as error:
            yield from error.faults
    for box in manifest.boxes:
        if manifest.file_key(box) in broken:
            continue
        try:
            read_block(store, manifest, box)
        except CheckpointError as error:
            yield from error.faults


def absence_faults(uri: str) -> Iterator[Fault]:
    """Return the fault of a URI at which nothing at all exists, most likely because of a typo."""
    if not is_anything_at(uri):
        yield Fault(
            fact=f"there is nothing at {uri!r}",
            rule="it must be a folder that exists, or a prefix below which objects lie",
            remedy="give <checkpoint.uri>/<run.name> of a run",
        )


def runs_below(uri: str) -> list[str]:
    """Return the sorted names of the runs in the folder ``uri``; none for an object store."""
    folder = local_path(uri)
    if folder is None or not folder.is_dir():
        return []
    return sorted(each.name for each in folder.iterdir() if (each / ROOT).is_dir())


def _steps_of(run: str) -> list[str]:
    """Return the steps of a run's checkpoints as text, newest first."""
    found = [checkpoint_of(key) for key in list_manifests(open_store(run))]
    return [str(at.step) for at in found if at is not None]


def _nothing_at(uri: str) -> Fault:
    # The remedy depends on what the folder looks like: a Hugging Face model, or a parent of runs.
    folder, runs = local_path(uri), runs_below(uri)
    remedy = "give <checkpoint.uri>/<run.name> of a run that has saved"
    if folder is not None and (folder / "config.json").is_file():
        remedy = (
            f"it looks like a model of Hugging Face: raymega convert hf-import {quote(uri)} --out URI, "
            "then give that URI"
        )
    elif name := hub_name(uri):
        fetch, local = download(name, "model")
        remedy = (
            f"nothing is read from the Hub: `{fetch}`, then `raymega convert hf-import {local} "
            f"--out {local}-raymega` and give that folder"
        )
    elif (match := _PART_OF_RUN.fullmatch(uri)) and (steps := _steps_of(match["run"])):
        remedy = f"the run has the steps {first_few(steps)}: raymega checkpoint list {quote(match['run'])}"
    elif runs:
        more = ", ..." if len(runs) > MAX_NAMED else ""
        remedy = (
            f"give one of its runs, such as {uri.rstrip('/')}/{runs[0]}, of "
            f"{', '.join(runs[:MAX_NAMED])}{more}; `raymega runs {quote(uri)}` lists them"
        )
    is_file = folder is not None and folder.is_file()
    return Fault(
        fact=f"{uri!r} is a file" if is_file else f"there is no checkpoint at {uri!r}",
        rule="a URI names a run's folder, one of its checkpoints/step-... or a manifest",
        remedy=remedy,
    )
