"""The manifest: one JSON object that describes a checkpoint; the driver writes it last.

A checkpoint is a set of global tensors cut into boxes. Each rank writes its boxes to its own data
files; the manifest lists every box with its file, byte range and checksum. Above INLINE_BOXES it is
the root of an index, and the boxes are in the index's parts (``box_index.py``). Without a manifest
there is no checkpoint; with one, every element of every tensor is saved exactly once. The manifest
also records the grid that wrote it, for people; loading never uses it.

Tensor data are written by ``save/writer.py`` and read by ``load/reader.py``;
``tools/retention.py`` decides what may be deleted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile

from isal.isal_zlib import crc32
from pydantic import TypeAdapter, ValidationError

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.box_index import INLINE_BOXES, BoxIndex, split
from raymega.checkpoint.format.box_table import BoxTable
from raymega.checkpoint.format.catalogue import enter, manifest_keys, take_out
from raymega.checkpoint.format.commit_log import TRIED_UNLISTED, known_checkpoints
from raymega.checkpoint.format.epochs import admitted
from raymega.checkpoint.format.keys import (
    CheckpointId,
    checkpoint_of,
    folder_of,
    index_prefix,
    manifest_key,
)
from raymega.errors import CheckpointError, Fault, one_line, raise_faults
from raymega.storage.json_objects import first_damage
from raymega.storage.store import Store, is_there, sizes_below

VERSION, INDEXED_VERSION = 3, 4
READABLE = frozenset({1, 2, 3, 4})
"""Versions of the format that this build reads; 1 had no metrics, 2 no checksums of files' headers.

Version 4 is a root with an index, and is written for that alone."""
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
        boxes: Blocks of all tensors; together they hold each element once. Those that were asked for,
            where there is an ``index``.
        metrics: Results of the evaluation after that step, by the names of ``tracking/names.py``.
        headers: ``zlib.crc32`` of each data file's header, by file; empty before version 3.
        index: Summary of all boxes in a root; None where ``boxes`` are all of them.
    """

    step: int
    attempt: int
    created: str
    state: dict[str, int | float | str]
    job: dict[str, object]
    grid: dict[str, object]
    boxes: Sequence[SavedBox]
    metrics: dict[str, float] = field(default_factory=dict)
    headers: dict[str, int] = field(default_factory=dict)
    index: BoxIndex | None = None

    @property
    def key(self) -> str:
        """Key of the manifest in the run's store."""
        return manifest_key(CheckpointId(attempt=self.attempt, step=self.step))

    @property
    def total_bytes(self) -> int:
        """Size of all tensors in bytes."""
        if self.index is not None:
            return self.index.total_bytes
        return int(BoxTable.of(self.boxes).rows["num_bytes"].sum())

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of every tensor, by saved name."""
        if self.index is not None:
            return self.index.shapes
        return {tensor.name: tensor.shape for tensor in BoxTable.of(self.boxes).tensors}

    def file_key(self, box: SavedBox) -> str:
        """Return the key of the data file that holds ``box``."""
        return folder_of(self.step) + box.file

    def file_sizes(self) -> dict[str, int]:
        """Return the size in bytes of every data file, by key; a file ends with its last box."""
        if self.index is not None:
            return self._by_key(dict(zip(self.index.files, self.index.file_sizes, strict=True)))
        return self._by_key(BoxTable.of(self.boxes).file_sizes())

    def header_sizes(self) -> dict[str, int]:
        """Return the bytes before the first box of every data file, by key."""
        if self.index is not None:
            return self._by_key(dict(zip(self.index.files, self.index.header_sizes, strict=True)))
        return self._by_key(BoxTable.of(self.boxes).header_sizes())

    def _by_key(self, by_file: Mapping[str, int]) -> dict[str, int]:
        folder = folder_of(self.step)
        return {folder + file: value for file, value in by_file.items()}

    def tensors(self) -> dict[str, list[SavedBox]]:
        """Return the boxes of every tensor, by global name."""
        boxes: dict[str, list[SavedBox]] = {}
        for box in self.boxes:
            boxes.setdefault(box.tensor, []).append(box)
        return boxes

    def to_json(self) -> str:
        """Return the manifest's text: format version, crc32 and size, then the fields above."""
        # The checksum is of the compact JSON of "checkpoint", byte for byte as it stands in the text.
        body = _compact(_fields(self))
        head = {
            "version": VERSION if self.index is None else INDEXED_VERSION,
            "crc32": crc32(body.encode()),
            "total_bytes": self.total_bytes,
        }
        return json.dumps(head)[:-1] + _BODY + body + "}"


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def _fields(manifest: Manifest) -> dict[str, object]:
    """Return the manifest's fields as JSON values, without an index that it does not have."""
    fields: dict[str, object] = _ADAPTER.dump_python(
        replace(manifest, boxes=tuple(manifest.boxes)), mode="json"
    )
    if manifest.index is None:
        del fields["index"]
    return fields


class UnknownVersionError(CheckpointError):
    """Error for a checkpoint of an unknown format version; a restore never skips such a checkpoint."""


def parse_manifest(text: str | bytes, *, key: str) -> Manifest:
    """Parse what :meth:`Manifest.to_json` wrote; ``key`` names the manifest in error messages.

    Raises:
        CheckpointError: The text is damaged, or of an unknown format version.
    """
    # Version before checksum: an unknown version may define its checksum differently.
    raw = text if isinstance(text, bytes) else text.encode()
    try:
        whole, body = _head_and_body(raw)
        version, checksum = whole["version"], whole["crc32"]
        if type(version) is not int:
            raise TypeError(f"version={version!r} is no integer")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        byte, why = first_damage(raw) or (0, f"it is no manifest: {error!r}")
        raise _damaged(key, f"is damaged at byte {byte} of {len(raw)} ({why})") from error
    if version not in READABLE:
        raise UnknownVersionError(
            fact=f"{key} has version {version!r}",
            rule=f"this build reads versions up to {max(READABLE)}",
            remedy="use the raymega that wrote it, or give the run another name",
        )
    if crc32(body) != checksum:
        start = max(raw.find(body[:64]), 0)
        raise _damaged(
            key, f"is damaged: bytes {start} to {len(raw)} do not match its own checksum"
        )
    try:
        parsed = _ADAPTER.validate_json(body, strict=True)
        return replace(parsed, boxes=BoxTable.of(parsed.boxes))
    except ValidationError as error:
        raise _damaged(key, one_line(error)) from error


def objects_of(manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """Yield the key and the content of each object that describes the checkpoint, the manifest last."""
    root = manifest
    if len(manifest.boxes) > INLINE_BOXES:
        at = CheckpointId(attempt=manifest.attempt, step=manifest.step)
        index, parts = split(BoxTable.of(manifest.boxes), index_prefix(at))
        for name, content in parts:
            yield folder_of(manifest.step) + name, content
        root = replace(manifest, boxes=(), index=index)
    yield manifest.key, root.to_json().encode()


def commit(store: Store, manifest: Manifest) -> str:
    """Write the manifest, which makes the checkpoint exist, and return its key.

    Committing the same manifest again does nothing, so a commit of unknown outcome can be retried.

    Raises:
        CheckpointError: A different manifest has that key.
    """
    at = CheckpointId(attempt=manifest.attempt, step=manifest.step)
    others = take_out(store, at)
    # Parts of an index come first, and are created once like the manifest: another checkpoint's stay.
    for key, data in objects_of(manifest):
        _create(store, key, data)
    enter(store, at)
    for other in others:
        if is_there(store, manifest_key(other)):
            enter(store, other)
    return manifest.key


def _create(store: Store, key: str, data: bytes) -> None:
    """Write an object that no other driver writes; equal bytes are an earlier try whose answer was lost."""
    try:
        store.put(key, [data], overwrite=False)
    except FileExistsError:
        if store.get(key) != data:
            raise CheckpointError(
                fact=f"{key} exists already in {store.uri!r}",
                rule="a manifest is never overwritten and the number of an attempt is used once",
                remedy="look for a second driver of this run; start anew to get a higher number",
            ) from None


def read_manifest(store: Store, key: str) -> Manifest:
    """Read the manifest under ``key`` with all its boxes.

    Raises:
        CheckpointError: The manifest or its index is missing, damaged, or of an unknown format version.
    """
    return replace(_read(store, key, None), index=None)


def read_root(store: Store, key: str) -> Manifest:
    """Read the manifest under ``key`` without the boxes that are in an index.

    Raises:
        CheckpointError: The manifest is missing, damaged, or of an unknown format version.
    """
    return _read(store, key, {})


def read_blocks(store: Store, key: str, blocks: Mapping[str, Sequence[Box]]) -> Manifest:
    """Read the manifest under ``key`` with the boxes that meet ``blocks``, which are by saved name.

    Without an index all boxes are there anyway.

    Raises:
        CheckpointError: The manifest or its index is missing, damaged, or of an unknown format version.
    """
    return _read(store, key, blocks)


def _read(store: Store, key: str, blocks: Mapping[str, Sequence[Box]] | None) -> Manifest:
    try:
        root = parse_manifest(store.get(key), key=key)
    except KeyError:
        raise _damaged(key, f"is not in {store.uri!r}") from None
    if root.index is None:
        return root
    return replace(root, boxes=root.index.read(store, folder_of(root.step), blocks))


def list_manifests(store: Store) -> list[str]:
    """Return the keys of all valid manifests, newest first, without a look at their data files.

    Manifests that a driver wrote after it had lost the run are left out; see ``epochs.py``. The first key's
    manifest is there. One further down may have been deleted by hand, beside its entry in the catalogue.
    """
    keys = admitted(store, manifest_keys(store))
    newest_first = [
        key for _, key in sorted(((checkpoint_of(key), key) for key in keys), reverse=True)
    ]
    gone = sum(1 for _ in takewhile(lambda key: not is_there(store, key), newest_first))
    return newest_first[gone:]


def valid_checkpoints(store: Store) -> list[CheckpointId]:
    """Return the valid checkpoints, newest first; of thousands, some may have been deleted since they were noted."""
    if (known := known_checkpoints(store)) is not None:
        return known
    return [at for key in list_manifests(store) if (at := checkpoint_of(key))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """Checkpoint that a run can be restored from.

    Attributes:
        manifest: Root of the newest whole checkpoint, as :func:`read_root` gives it; None when there is none.
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
    for key in _newest_first(store):
        if key in skip:
            continue
        try:
            manifest = read_root(store, key)
            raise_faults(CheckpointError, list(broken_files(store, manifest).values()))
        except UnknownVersionError:
            # An older checkpoint instead would silently drop the steps of a newer build.
            raise
        except CheckpointError as error:
            broken += error.faults
        else:
            return Restore(manifest=manifest, broken=tuple(broken))
    return Restore(manifest=None, broken=tuple(broken))


def _newest_first(store: Store) -> Iterator[str]:
    """Yield the keys of all valid manifests; the newest without a listing, where they are many."""
    known = known_checkpoints(store) or []
    newest = [manifest_key(at) for at in known[:TRIED_UNLISTED]]
    yield from (key for key in newest if is_there(store, key))
    yield from (key for key in list_manifests(store) if key not in newest)


def broken_files(store: Store, manifest: Manifest) -> dict[str, Fault]:
    """Return the faults of data files that are missing or have a wrong size, by key."""
    wanted = manifest.file_sizes()
    if manifest.index is not None:
        parts = {
            folder_of(manifest.step) + part.file: part.num_bytes for part in manifest.index.parts
        }
        wanted |= parts
    found = sizes_below(store, folder_of(manifest.step), wanted)
    return {
        key: _file_fault(manifest, key, fact)
        for key, size in wanted.items()
        if (fact := _size_fault(found.get(key), size))
    }


def _size_fault(size: int | None, wanted: int) -> str:
    if size is None:
        return "is missing"
    return "" if size == wanted else f"has {size} bytes, not {wanted}"


def _compact(body: object) -> str:
    return json.dumps(body, separators=(",", ":"))


def _head_and_body(raw: bytes) -> tuple[dict[str, object], bytes]:
    """Return the entries of a manifest's head, and its checkpoint as the JSON that was checksummed."""
    # Fast path, for text as Manifest.to_json lays it out: the checkpoint's bytes are cut out, not
    # parsed. Every rank reads the whole manifest, and to parse it and write it again for the
    # checksum would take three times as long as the rest of the reading.
    head, _, body = raw.rstrip().removesuffix(b"}").partition(_BODY.encode())
    with suppress(ValueError, RecursionError):
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
