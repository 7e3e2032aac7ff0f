"""Snapshots: checkpoints in the memory of snapshot servers, which exist without a commit.

Each rank puts its data files and, last, a *part*: an object that lists their content. A snapshot is
whole when the parts of all ranks exist; a manifest can then be derived from them. So the driver does
nothing about a snapshot until it needs one. ``snapshots/writer.py`` writes them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from raymega.checkpoint.format.keys import (
    ROOT,
    CheckpointId,
    checkpoint_of,
    folder_of,
    is_part,
    part_file,
)
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.format.manifest_builder import assemble
from raymega.errors import CheckpointError, RaymegaError, StorageError
from raymega.messages import ShardSaved
from raymega.storage.replicated_store import ReplicatedStore
from raymega.storage.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPart:
    """Record of what one rank wrote of a snapshot.

    Attributes:
        attempt: Number of the attempt that wrote it.
        grid: Degrees of the axes of the attempt's grid.
        world_size: Number of parts that make the snapshot whole.
        shard: Boxes of the rank and scalars of the trainer.
    """

    attempt: int
    grid: dict[str, int]
    world_size: int
    shard: ShardSaved

    @property
    def key(self) -> str:
        """Key of the part in a snapshot server."""
        shard = self.shard
        return folder_of(shard.step) + part_file(attempt=self.attempt, rank=shard.rank)

    def to_json(self) -> bytes:
        """Return the content of the part's object."""
        return _ADAPTER.dump_json(self)


_ADAPTER: TypeAdapter[SnapshotPart] = TypeAdapter(SnapshotPart)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A whole snapshot: its manifest, and the names of the snapshot servers that hold each object, by key."""

    manifest: Manifest
    holders: dict[str, tuple[str, ...]]

    @property
    def id(self) -> CheckpointId:
        """Identity of the snapshot, which orders snapshots by age."""
        return CheckpointId(attempt=self.manifest.attempt, step=self.manifest.step)


def find_snapshot(
    stores: Mapping[str, Store], *, job: Mapping[str, object], now: str, skip: Collection[str] = ()
) -> Snapshot | None:
    """Find the newest whole snapshot, and put its manifest into every snapshot server that answers.

    Args:
        stores: Snapshot servers, by name; one that does not answer counts as empty.
        job: Values of the job file, for the manifest.
        now: Time of the manifest: ISO 8601, UTC.
        skip: Keys of manifests of snapshots that could not be read.
    """
    # Which snapshot servers hold which object.
    listed = {name: _keys(name, store) for name, store in stores.items()}
    living = {name: stores[name] for name, keys in listed.items() if keys is not None}
    holders: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for name in living:
        for key in listed[name] or ():
            holders[key] += (name,)
    copies = ReplicatedStore(living, holders=holders)
    # The newest snapshot with all parts, all elements and all data files; others are passed over.
    for parts in _newest_first(holders):
        try:
            manifest = _assemble(copies, parts, job, now)
            files = {key: holders[key] for key in manifest.file_sizes() if key in holders}
            if len(files) < len(manifest.file_sizes()):
                raise CheckpointError(f"{manifest.key} has lost files")
            if manifest.key not in skip:
                copies.put(manifest.key, [manifest.to_json().encode()], overwrite=True)
                everywhere = {manifest.key: tuple(living)}
                return Snapshot(manifest=manifest, holders=files | everywhere)
        except RaymegaError as error:
            log.info("no snapshot of %s: %s", parts[0], error)
    return None


def _keys(name: str, store: Store) -> list[str] | None:
    try:
        return list(store.list(ROOT))
    except StorageError as error:
        log.info("%s is lost: %s", name, error)
        return None


def _newest_first(keys: Collection[str]) -> Iterator[list[str]]:
    """Yield the keys of the parts of each snapshot, complete or not, newest snapshot first."""
    parts: dict[CheckpointId, list[str]] = defaultdict(list)
    for key in keys:
        at = checkpoint_of(key)
        if at is not None and is_part(key):
            parts[at].append(key)
    for at in sorted(parts, reverse=True):
        yield sorted(parts[at])


def _assemble(store: Store, keys: list[str], job: Mapping[str, object], now: str) -> Manifest:
    """Return the manifest of the snapshot whose parts are ``keys``.

    Raises:
        CheckpointError: A rank's part is missing, or an element is not saved exactly once.
    """
    # Cheap check first: most snapshots that are not whole lack a part.
    first = _read(store, keys[0])
    if len(keys) < first.world_size:
        raise CheckpointError(f"{len(keys)} of {first.world_size} ranks have written")
    parts = [_read(store, key) for key in keys]
    return assemble(
        [part.shard for part in parts], world_size=first.world_size, attempt=first.attempt,
        created=now, job=job, grid=first.grid,
    )  # fmt: skip


def _read(store: Store, key: str) -> SnapshotPart:
    try:
        return _ADAPTER.validate_json(store.get(key), strict=True)
    except (KeyError, ValidationError) as error:
        raise CheckpointError(f"{key} cannot be read: {error}") from error
