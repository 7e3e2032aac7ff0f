"""Snapshots: checkpoints in the memory of snapshot servers, which exist without a commit.

Each rank puts its data files and, last, its part (``snapshots/part.py``). A snapshot is whole when some
server holds the share of each rank. The driver learns that from a line of each server; boxes and data
go from servers to ranks (``snapshots/copies.py``). ``snapshots/writer.py`` writes snapshots.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raymega.checkpoint.format.keys import CheckpointId, manifest_key
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.snapshots.queries import HeldShares, ask_held
from raymega.errors import StorageError
from raymega.messages import SnapshotHolders
from raymega.storage.store import Store

log = logging.getLogger(__name__)

ASKED_AT_ONCE = 16
"""Snapshot servers that the driver asks at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A whole snapshot: its manifest without boxes, and the servers that hold each rank's share."""

    manifest: Manifest
    holders: SnapshotHolders

    @property
    def id(self) -> CheckpointId:
        """Identity of the snapshot, which orders snapshots by age."""
        return CheckpointId(attempt=self.manifest.attempt, step=self.manifest.step)


def find_snapshot(
    stores: Mapping[str, Store], *, job: Mapping[str, object], now: str, skip: Collection[str] = ()
) -> Snapshot | None:
    """Find the newest whole snapshot; each snapshot server is asked once, and sends a few hundred bytes.

    Args:
        stores: Snapshot servers, by name; one that does not answer counts as empty.
        job: Values of the job file, for the manifest.
        now: Time of the manifest: ISO 8601, UTC.
        skip: Keys of manifests of snapshots that could not be read.
    """
    # ask all servers, and sort their shares by snapshot
    by_id: dict[CheckpointId, dict[str, HeldShares]] = defaultdict(dict)
    with ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="snapshots") as pool:
        answers = pool.map(_held_by, stores, stores.values())
        for name, shares in zip(stores, answers, strict=True):
            for share in shares:
                by_id[share.id][name] = share
    # the newest of which each rank's share is somewhere; others are passed over
    for at in sorted(by_id, reverse=True):
        any_share = next(iter(by_id[at].values()))
        holders = _holders(by_id[at], any_share)
        num_lacking = sum(not servers for servers in holders.by_rank)
        if num_lacking:
            log.info("no snapshot of %s: %d ranks' shares are lost", at, num_lacking)
        elif manifest_key(at) not in skip:
            manifest = Manifest(
                step=at.step, attempt=at.attempt, created=now, state=any_share.state, job=dict(job),
                grid=dict(any_share.grid), boxes=(),
            )  # fmt: skip
            return Snapshot(manifest=manifest, holders=holders)
    return None


def _held_by(name: str, store: Store) -> tuple[HeldShares, ...]:
    try:
        return ask_held(store)
    except StorageError as error:
        log.info("%s is lost: %s", name, error)
        return ()


def _holders(shares: Mapping[str, HeldShares], any_share: HeldShares) -> SnapshotHolders:
    # turn ranges of ranks by server into servers by rank
    by_rank: list[tuple[int, ...]] = [()] * any_share.world_size
    for number, share in enumerate(shares.values()):
        for first, last in share.ranks:
            for rank in range(first, last + 1):
                by_rank[rank] += (number,)
    return SnapshotHolders(servers=tuple(shares), by_rank=tuple(by_rank), grid=any_share.grid)
