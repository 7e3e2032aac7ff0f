"""The manifest: one JSON object that says what a checkpoint is, written last, by the driver.

A checkpoint is global tensors cut into boxes. Each rank writes its boxes to one data file; the
manifest lists every box with its file, its bytes and their checksum. Without a manifest there is
no checkpoint; with one, every element of every tensor is there once. How the ranks were laid out
is noted for people, and loading never asks.

No tensor is touched here: writer and reader do that. What may be deleted is retention's.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

from isal.isal_zlib import crc32
from pydantic import TypeAdapter, ValidationError

from raymega.checkpoint.format.epochs import admitted
from raymega.checkpoint.format.keys import (
    ROOT,
    CheckpointId,
    checkpoint_of,
    folder_of,
    is_manifest,
    manifest_key,
)
from raymega.errors import CheckpointError, Fault, raise_faults
from raymega.messages import SavedBox
from raymega.storage.store import Store

VERSION = 2
READABLE = frozenset({1, 2})
"""Version 1 had no metrics."""
_BODY = ', "checkpoint": '
"""Before the checkpoint, which is the last that stands in a manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A whole checkpoint.

    Attributes:
        step: Completed optimizer steps.
        attempt: Number of the worker group that wrote it.
        created: When the driver wrote it: ISO 8601, UTC.
        state: The trainer's scalars: step, consumed samples and tokens.
        job: The job's values, as its JSON.
        grid: Degrees of the axes at the time.
        boxes: Every block of every tensor, each element once.
        metrics: What the evaluation after that step found, by the names of tracking.names.
    """

    step: int
    attempt: int
    created: str
    state: dict[str, int | float | str]
    job: dict[str, object]
    grid: dict[str, object]
    boxes: tuple[SavedBox, ...]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Where the manifest lies."""
        return manifest_key(CheckpointId(attempt=self.attempt, step=self.step))

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(box.num_bytes for box in self.boxes)

    def file_key(self, box: SavedBox) -> str:
        """Where the data file that holds ``box`` lies."""
        return folder_of(self.step) + box.file

    def file_sizes(self) -> dict[str, int]:
        """Key to bytes of every data file; a file ends with its last box."""
        sizes: dict[str, int] = {}
        for box in self.boxes:
            key = self.file_key(box)
            sizes[key] = max(sizes.get(key, 0), box.start + box.num_bytes)
        return sizes

    def tensors(self) -> dict[str, list[SavedBox]]:
        """Global name to boxes of every tensor."""
        boxes: dict[str, list[SavedBox]] = {}
        for box in self.boxes:
            boxes.setdefault(box.tensor, []).append(box)
        return boxes

    def to_json(self) -> str:
        """The manifest's file: the values above, the format's version and a checksum of it all."""
        body = _compact(_ADAPTER.dump_python(self, mode="json"))
        head = {
            "version": VERSION,
            "crc32": crc32(body.encode()),
            "total_bytes": self.total_bytes,
        }
        return json.dumps(head)[:-1] + _BODY + body + "}"


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)


class UnknownVersionError(CheckpointError):
    """A checkpoint of another version of the format; a restore never passes over it in silence."""


def parse_manifest(text: str | bytes, *, key: str) -> Manifest:
    """Inverse of :meth:`Manifest.to_json`; ``key`` is for the messages.

    Raises:
        CheckpointError: It is damaged, or of another version.
    """
    try:
        whole, body = _head_and_body(text if isinstance(text, bytes) else text.encode())
        version, checksum = whole["version"], whole["crc32"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(key, f"is not a manifest ({error!r})") from error
    if version not in READABLE:
        raise UnknownVersionError(
            Fault(
                fact=f"{key} has version {version!r}",
                rule=f"this build reads versions up to {VERSION}",
                remedy="use the raymega that wrote it, or give the run another name",
            )
        )
    if crc32(body) != checksum:
        raise _damaged(key, "does not match its own checksum")
    try:
        return _ADAPTER.validate_json(body, strict=True)
    except ValidationError as error:
        raise _damaged(key, " ".join(str(error).split())) from error


def commit(store: Store, manifest: Manifest) -> str:
    """Make the checkpoint exist and return its manifest's key.

    Committing the same manifest again does nothing, so a commit of unknown outcome can be retried.

    Raises:
        CheckpointError: The key holds another manifest.
    """
    data = manifest.to_json().encode()
    try:
        store.put(manifest.key, [data], overwrite=False)
    except FileExistsError:
        if store.get(manifest.key) != data:
            fault = Fault(
                fact=f"{manifest.key} exists already in {store.uri!r}",
                rule="a manifest is never overwritten and the number of an attempt is used once",
                remedy="look for a second driver of this run; start anew to get a higher number",
            )
            raise CheckpointError(fault) from None
    return manifest.key


def read_manifest(store: Store, key: str) -> Manifest:
    """The manifest under ``key``.

    Raises:
        CheckpointError: It is missing, damaged, or of another version.
    """
    try:
        return parse_manifest(store.get(key), key=key)
    except KeyError:
        raise _damaged(key, f"is not in {store.uri!r}") from None


def list_manifests(store: Store) -> list[str]:
    """Keys of all manifests that count, newest first, whether their data files are whole or not.

    What a driver wrote after another one took its run does not count; see fence.
    """
    keys = admitted(store, filter(is_manifest, store.list(ROOT)))
    found = [(checkpoint_of(key), key) for key in keys]
    return [key for _, key in sorted(found, reverse=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """Where a run can be restored from.

    Attributes:
        manifest: The newest whole checkpoint, or None when there is none.
        broken: What is wrong with the newer ones.
    """

    manifest: Manifest | None
    broken: tuple[Fault, ...]

    @property
    def key(self) -> str:
        """The manifest's key; empty for a fresh start."""
        return self.manifest.key if self.manifest else ""


def find_restore(store: Store, *, skip: Collection[str] = ()) -> Restore:
    """The newest checkpoint whose files all exist with the right sizes; reads no tensor data.

    Args:
        store: The run's store.
        skip: Keys of manifests that failed to load, which sizes alone do not show.

    Raises:
        UnknownVersionError: The newest one was written by another version of raymega.
    """
    broken: list[Fault] = []
    for key in list_manifests(store):
        if key in skip:
            continue
        try:
            manifest = read_manifest(store, key)
            raise_faults(CheckpointError, list(broken_files(store, manifest).values()))
        except UnknownVersionError:
            raise
        except CheckpointError as error:
            broken += [fault for fault in error.faults if isinstance(fault, Fault)]
        else:
            return Restore(manifest=manifest, broken=tuple(broken))
    return Restore(manifest=None, broken=tuple(broken))


def broken_files(store: Store, manifest: Manifest) -> dict[str, Fault]:
    """Data files that are missing or have a wrong size, by key."""
    faults = {}
    for key, wanted in manifest.file_sizes().items():
        try:
            size = store.size(key)
        except KeyError:
            faults[key] = _file_fault(manifest, key, "is missing")
            continue
        if size != wanted:
            faults[key] = _file_fault(manifest, key, f"has {size} bytes, not {wanted}")
    return faults


def _compact(body: object) -> str:
    return json.dumps(body, separators=(",", ":"))


def _head_and_body(raw: bytes) -> tuple[dict[str, object], bytes]:
    """What a manifest says of itself, and its checkpoint as compact JSON, which its checksum is of.

    As :meth:`Manifest.to_json` lays it out the checkpoint is taken as it stands: each rank reads all
    of it, and to parse and write it for its checksum's sake takes three times as long as what is left.
    """
    head, _, body = raw.rstrip().removesuffix(b"}").partition(_BODY.encode())
    with suppress(ValueError):
        whole = json.loads(head + b"}")
        if whole.get("crc32") == crc32(body):
            return whole, body
    whole = json.loads(raw)
    return whole, _compact(whole["checkpoint"]).encode()


def _damaged(key: str, fact: str) -> CheckpointError:
    return CheckpointError(
        Fault(
            fact=f"{key} {fact}",
            rule="a checkpoint exists by an undamaged manifest",
            remedy="restore from an older one; raymega checkpoint list shows them",
        )
    )


def _file_fault(manifest: Manifest, key: str, fact: str) -> Fault:
    return Fault(
        fact=f"{key} {fact}",
        rule=f"every file that {manifest.key} lists must be as it was written",
        remedy="restore from an older checkpoint; raymega checkpoint list shows them",
    )
