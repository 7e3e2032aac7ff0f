"""Looks into the checkpoints of a store for people: what is there, and is every byte right.

A URI names a run (``<checkpoint.uri>/<run.name>``), one of its checkpoints
(``.../checkpoints/step-00000100``) or a manifest. Nothing is changed, and torch is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from raymega.checkpoint.format.data_file import read_block
from raymega.checkpoint.format.keys import ROOT, checkpoint_of
from raymega.checkpoint.format.manifest import (
    Manifest,
    broken_files,
    list_manifests,
    read_manifest,
)
from raymega.checkpoint.format.manifest_builder import coverage_faults
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.errors import CheckpointError, ConfigError, Fault, raise_faults
from raymega.storage.registry import is_anything_at, local_path, open_store, reading_faults
from raymega.storage.store import Store

MAX_NAMED = 5
_PART_OF_RUN = re.compile(rf"(?P<run>.*)/(?P<part>{ROOT}step-\d+(/[^/]+)?)/?")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary:
    """One line about a checkpoint.

    Attributes:
        key: Its manifest.
        step: Completed optimizer steps.
        attempt: Worker group that wrote it.
        created: When, as its driver said; empty when the manifest cannot be read.
        num_files: Data files.
        total_bytes: Bytes of all tensors.
        faults: What is wrong with it; none when it is whole.
    """

    key: str
    step: int
    attempt: int
    created: str
    num_files: int
    total_bytes: int
    faults: tuple[str, ...]


def list_checkpoints(uri: str) -> list[CheckpointSummary]:
    """Every checkpoint that ``uri`` names, newest first, judged by the sizes of its files.

    Raises:
        ConfigError: There is nothing at all at the URI: no run that has yet to save, either.
    """
    store, keys = _locate(uri)
    raise_faults(ConfigError, [] if keys else absence_faults(uri))
    return [_summarise(store, key, is_deep=False) for key in keys]


def verify_checkpoints(uri: str) -> list[CheckpointSummary]:
    """The same, but every byte is read and held against its checksum.

    Raises:
        ConfigError: The URI names no checkpoint.
    """
    store, keys = _locate(uri)
    raise_faults(ConfigError, [] if keys else [_nothing_at(uri)])
    return [_summarise(store, key, is_deep=True) for key in keys]


def open_checkpoint(uri: str) -> Checkpoint:
    """The newest checkpoint that ``uri`` names, whole or not.

    Raises:
        ConfigError: The URI names no checkpoint.
        CheckpointError: Its manifest cannot be read.
    """
    store, keys = _locate(uri)
    raise_faults(ConfigError, [] if keys else [_nothing_at(uri)])
    return Checkpoint(store, read_manifest(store, keys[0]))


def _locate(uri: str) -> tuple[Store, list[str]]:
    """The run's store, and the keys of the manifests that ``uri`` names in it, newest first."""
    match = _PART_OF_RUN.fullmatch(uri)
    root = match["run"] if match else uri
    raise_faults(ConfigError, reading_faults(root, field="URI"))
    store = open_store(root)
    prefix = f"{match['part']}/" if match else ROOT
    return store, [key for key in list_manifests(store) if f"{key}/".startswith(prefix)]


def _summarise(store: Store, key: str, *, is_deep: bool) -> CheckpointSummary:
    at = checkpoint_of(key)
    assert at is not None, f"{key} is a manifest's"
    try:
        manifest = read_manifest(store, key)
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


def _faults(store: Store, manifest: Manifest, *, is_deep: bool) -> Iterator[Fault | str]:
    broken = broken_files(store, manifest)
    yield from broken.values()
    if not is_deep:
        return
    yield from coverage_faults(manifest)
    for box in manifest.boxes:
        if manifest.file_key(box) in broken:
            continue
        try:
            read_block(store, manifest, box)
        except CheckpointError as error:
            yield from error.faults


def absence_faults(uri: str) -> list[Fault]:
    """What is wrong when ``uri`` holds nothing at all: mistyped, most likely."""
    if is_anything_at(uri):
        return []
    return [
        Fault(
            fact=f"there is nothing at {uri!r}",
            rule="it must be a folder that exists, or a prefix below which objects lie",
            remedy="give <checkpoint.uri>/<run.name> of a run",
        )
    ]


def runs_below(uri: str) -> list[str]:
    """Names of the runs in the folder ``uri``, sorted; none for an object store, which is not walked."""
    folder = local_path(uri)
    if folder is None or not folder.is_dir():
        return []
    return sorted(each.name for each in folder.iterdir() if (each / ROOT).is_dir())


def _nothing_at(uri: str) -> Fault:
    folder, runs = local_path(uri), runs_below(uri)
    remedy = "give <checkpoint.uri>/<run.name> of a run that has saved"
    if folder is not None and (folder / "config.json").is_file():
        remedy = (
            f"it looks like a model of Hugging Face: raymega convert hf-import {uri} --out URI, "
            "then give that URI"
        )
    elif runs:
        more = ", ..." if len(runs) > MAX_NAMED else ""
        remedy = (
            f"give one of its runs, {uri.rstrip('/')}/NAME: {', '.join(runs[:MAX_NAMED])}{more}"
        )
    return Fault(
        fact=f"there is no checkpoint at {uri!r}",
        rule="a URI names a run's folder, one of its checkpoints/step-... or a manifest",
        remedy=remedy,
    )
