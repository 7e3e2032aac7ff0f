"""The log of an epoch's commits: a run's checkpoints are known without a listing, however many are kept.

    lease/commits-000003.json    the checkpoints that the driver of epoch 3 knows, and its commits under way

A grant names the checkpoints that existed before its epoch. Its driver writes the log before each manifest, so
grant and log together name every checkpoint that counts. They may also name some that were deleted since.
A log is written, and read, only in runs with more than FEW_CHECKPOINTS: below, a listing costs as little.
It also finds folders that were copied by hand.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from raymega.checkpoint.format.epochs import (
    LeaseGrant,
    StepRange,
    checkpoints_of,
    damaged_epoch,
    log_key,
    newest_grant,
    read_grant,
    step_ranges,
)
from raymega.checkpoint.format.keys import CheckpointId, manifest_key
from raymega.storage.json_objects import DamagedError, parse_object
from raymega.storage.store import Store, is_there

FEW_CHECKPOINTS = 1_000
"""Most checkpoints that are listed at a start: those of one page of a listing."""

TRIED_UNLISTED = 16
"""Newest of the known checkpoints that are tried before all are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Log:
    """Content of a log.

    Attributes:
        epoch: Epoch whose driver wrote it.
        checkpoints: Checkpoints that were there, of this epoch and of those before it.
        pending: Commits that were begun and are not known to have ended well.
    """

    epoch: int
    checkpoints: tuple[StepRange, ...]
    pending: tuple[StepRange, ...]


_ADAPTER: TypeAdapter[_Log] = TypeAdapter(_Log)


class CommitLog:
    """Writer of the log of one attempt's epoch; for the thread that commits."""

    def __init__(self, store: Store, epoch: int) -> None:
        """Prepare the log; the store is not accessed yet."""
        self._store, self._epoch = store, epoch
        self._before: set[CheckpointId] | None = None
        self._own: set[CheckpointId] = set()
        self._pending: set[CheckpointId] = set()
        self._is_written = False

    def begin(self, at: CheckpointId, known: Collection[CheckpointId] | None) -> None:
        """Write that ``at`` is about to be committed; a second time changes nothing.

        Args:
            at: Checkpoint of this epoch.
            known: All checkpoints that the run has now, this epoch's among them, where they are known.

        Raises:
            StorageError: The store fails.
        """
        if self._before is None:
            self._before = self._checkpoints_before()
        self._pending.add(at)
        there = self._before | self._own if known is None else {*known}
        # few: readers list them, unless they take the grant's for all
        is_due = max(len(self._before), len(there) + len(self._pending)) > FEW_CHECKPOINTS
        if not is_due and not self._is_written:
            return
        log = _Log(
            epoch=self._epoch,
            checkpoints=step_ranges(map(manifest_key, there - self._pending)),
            pending=step_ranges(map(manifest_key, self._pending)),
        )
        content = json.dumps(asdict(log), sort_keys=True).encode()
        self._store.put(log_key(self._epoch), [content], overwrite=True)
        self._is_written = True

    def end(self, at: CheckpointId) -> None:
        """Note that ``at`` is committed; the next write of the log tells it."""
        self._pending.discard(at)
        self._own.add(at)

    def _checkpoints_before(self) -> set[CheckpointId]:
        try:
            return checkpoints_of(read_grant(self._store, self._epoch))
        except (KeyError, DamagedError):  # without a sound grant no reader uses the log
            return set()


def known_checkpoints(store: Store) -> list[CheckpointId] | None:
    """Return a run's checkpoints as its newest grant and log name them, newest first; None where a listing is due.

    A listing is due for few checkpoints, and where grant or log are damaged or of an earlier build. Checkpoints
    that were deleted may be named; those whose commit was under way are there.

    Raises:
        StorageError: The store cannot be read.
    """
    grant = newest_grant(store)
    if grant is None or not grant.has_commit_log:
        return None
    try:
        found = _named(store, grant)
    except DamagedError:
        return None
    # a damaged newest grant has a log that no sound grant belongs to
    if len(found) <= FEW_CHECKPOINTS or damaged_epoch(store, grant):
        return None
    return sorted(found, reverse=True)


def _named(store: Store, grant: LeaseGrant) -> set[CheckpointId]:
    """Return the checkpoints of a grant's epoch and of those before it."""
    key = log_key(grant.epoch)
    try:
        raw = store.get(key)
    except KeyError:
        return checkpoints_of(grant)
    rule, remedy = "it names the run's checkpoints", "none is needed: they are listed instead"
    log = parse_object(raw, _ADAPTER, name=f"{store.uri}/{key}", rule=rule, remedy=remedy)
    found = {at for each in log.checkpoints for at in each.ids()}
    pending = (at for each in log.pending for at in each.ids())
    return found | {at for at in pending if is_there(store, manifest_key(at))}
