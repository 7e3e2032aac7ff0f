"""The manifest: one JSON object that describes a checkpoint; the driver writes it last.

A checkpoint is a set of global tensors cut into boxes. Each rank writes its boxes to its own data
files; the manifest lists every box with its file, byte range and checksum. Without a manifest there
is no checkpoint; with one, every element of every tensor is saved exactly once. The manifest also
records the grid that wrote it, for people; loading never uses it.

Tensor data are written by ``save/writer.py`` and read by ``load/reader.py``;
``tools/retention.py`` decides what may be deleted.
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
from raymega.errors import CheckpointError, Fault, one_line, raise_faults
from raymega.messages import SavedBox
from raymega.storage.store import Store

VERSION = 2
READABLE = frozenset({1, 2})
"""Versions of the format that this build reads; version 1 had no metrics."""
_BODY = ', "checkpoint": '
"""Text between the head of a manifest and its last entry, the checkpoint itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a whole checkpoint.

    Attributes:
        step: Number of completed optimizer steps.
        attempt: Number of the attempt that wrote the checkpoint.
        created: Time at which the driver wrote the manifest: ISO 8601, UTC.
        state: Scalars of the trainer: step, consumed samples and tokens.
        job: Values of the job file, as JSON.
        grid: Degrees of the axes of the grid that wrote the checkpoint.
        boxes: Blocks of all tensors; together they hold each element once.
        metrics: Results of the evaluation after that step, by the names of ``tracking/names.py``.
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
        """Key of the manifest in the run's store."""
        return manifest_key(CheckpointId(attempt=self.attempt, step=self.step))

    @property
    def total_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(box.num_bytes for box in self.boxes)

    def file_key(self, box: SavedBox) -> str:
        """Return the key of the data file that holds ``box``."""
        return folder_of(self.step) + box.file

    def file_sizes(self) -> dict[str, int]:
        """Return the size in bytes of every data file, by key; a file ends with its last box."""
        sizes: dict[str, int] = {}
        for box in self.boxes:
            key = self.file_key(box)
            sizes[key] = max(sizes.get(key, 0), box.start + box.num_bytes)
        return sizes

    def tensors(self) -> dict[str, list[SavedBox]]:
        """Return the boxes of every tensor, by global name."""
        boxes: dict[str, list[SavedBox]] = {}
        for box in self.boxes:
            boxes.setdefault(box.tensor, []).append(box)
        return boxes

    def to_json(self) -> str:
        """Return the manifest's text: format version, crc32 and size, then the fields above."""
        # The checksum is of the compact JSON of "checkpoint", byte for byte as it stands in the text.
        body = _compact(_ADAPTER.dump_python(self, mode="json"))
        head = {
            "version": VERSION,
            "crc32": crc32(body.encode()),
            "total_bytes": self.total_bytes,
        }
        return json.dumps(head)[:-1] + _BODY + body + "}"


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)


class UnknownVersionError(CheckpointError):
    """Error for a checkpoint of an unknown format version; a restore never skips such a checkpoint."""


def parse_manifest(text: str | bytes, *, key: str) -> Manifest:
    """Parse what :meth:`Manifest.to_json` wrote; ``key`` names the manifest in error messages.

    Raises:
        CheckpointError: The text is damaged, or of an unknown format version.
    """
    # Version before checksum: an unknown version may define its checksum differently.
    try:
        whole, body = _head_and_body(text if isinstance(text, bytes) else text.encode())
        version, checksum = whole["version"], whole["crc32"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(key, f"is not a manifest ({error!r})") from error
    if version not in READABLE:
        raise UnknownVersionError(
            fact=f"{key} has version {version!r}",
            rule=f"this build reads versions up to {VERSION}",
            remedy="use the raymega that wrote it, or give the run another name",
        )
    if crc32(body) != checksum:
        raise _damaged(key, "does not match its own checksum")
    try:
        return _ADAPTER.validate_json(body, strict=True)
    except ValidationError as error:
        raise _damaged(key, one_line(error)) from error


def commit(store: Store, manifest: Manifest) -> str:
    """Write the manifest, which makes the checkpoint exist, and return its key.

    Committing the same manifest again does nothing, so a commit of unknown outcome can be retried.

    Raises:
        CheckpointError: A different manifest has that key.
    """
    data = manifest.to_json().encode()
    try:
        store.put(manifest.key, [data], overwrite=False)
    except FileExistsError:
        # Equal bytes are an earlier try of this commit whose answer was lost.
        if store.get(manifest.key) != data:
            raise CheckpointError(
                fact=f"{manifest.key} exists already in {store.uri!r}",
                rule="a manifest is never overwritten and the number of an attempt is used once",
                remedy="look for a second driver of this run; start anew to get a higher number",
            ) from None
    return manifest.key


def read_manifest(store: Store, key: str) -> Manifest:
    """Read the manifest under ``key``.

    Raises:
        CheckpointError: The manifest is missing, damaged, or of an unknown format version.
    """
    try:
        return parse_manifest(store.get(key), key=key)
    except KeyError:
        raise _damaged(key, f"is not in {store.uri!r}") from None


def list_manifests(store: Store) -> list[str]:
    """Return the keys of all valid manifests, newest first, without a look at their data files.

    Manifests that a driver wrote after it had lost the run are left out; see ``epochs.py``.
    """
    keys = admitted(store, filter(is_manifest, store.list(ROOT)))
    found = [(checkpoint_of(key), key) for key in keys]
    return [key for _, key in sorted(found, reverse=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """Checkpoint that a run can be restored from.

    Attributes:
        manifest: Newest whole checkpoint, or None when there is none.
        broken: Faults of the newer checkpoints, which are not whole.
    """

    manifest: Manifest | None
    broken: tuple[Fault, ...]

    @property
    def key(self) -> str:
        """Key of the manifest; empty when no checkpoint can be restored."""
        return self.manifest.key if self.manifest else ""


def find_restore(store: Store, *, skip: Collection[str] = ()) -> Restore:
    """Find the newest checkpoint whose files all exist with the right sizes, without reading tensors.

    Args:
        store: Store of the run.
        skip: Keys of manifests to pass over: their data failed to load although all sizes are right.

    Raises:
        UnknownVersionError: A checkpoint newer than every whole one has an unknown format version.
    """
    broken: list[Fault] = []
    for key in list_manifests(store):
        if key in skip:
            continue
        try:
            manifest = read_manifest(store, key)
            raise_faults(CheckpointError, list(broken_files(store, manifest).values()))
        except UnknownVersionError:
            # An older checkpoint instead would silently drop the steps of a newer build.
            raise
        except CheckpointError as error:
            broken += error.faults
        else:
            return Restore(manifest=manifest, broken=tuple(broken))
    return Restore(manifest=None, broken=tuple(broken))


def broken_files(store: Store, manifest: Manifest) -> dict[str, Fault]:
    """Return the faults of data files that are missing or have a wrong size, by key."""
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
    """Return the entries of a manifest's head, and its checkpoint as the JSON that was checksummed."""
    # Fast path, for text as Manifest.to_json lays it out: the checkpoint's bytes are cut out, not
    # parsed. Every rank reads the whole manifest, and to parse it and write it again for the
    # checksum would take three times as long as the rest of the reading.
    head, _, body = raw.rstrip().removesuffix(b"}").partition(_BODY.encode())
    with suppress(ValueError):
        whole = json.loads(head + b"}")
        if whole.get("crc32") == crc32(body):
            return whole, body
    # Slow path, for text that was reformatted: compact JSON restores the bytes of the checksum.
    whole = json.loads(raw)
    return whole, _compact(whole["checkpoint"]).encode()


def _damaged(key: str, fact: str) -> CheckpointError:
    return CheckpointError(
        fact=f"{key} {fact}",
        rule="a checkpoint exists by an undamaged manifest",
        remedy="restore from an older one; raymega checkpoint list shows them",
    )


def _file_fault(manifest: Manifest, key: str, fact: str) -> Fault:
    return Fault(
        fact=f"{key} {fact}",
        rule=f"every file that {manifest.key} lists must be as it was written",
        remedy="restore from an older checkpoint; raymega checkpoint list shows them",
    )
