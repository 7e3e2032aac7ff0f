"""What the next attempt starts from: the newest state that can be read, in the store or in memory.

It remembers which ones workers could not read. When to go back to one is the controller's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from raymega.checkpoint.format.keys import CheckpointId, checkpoint_of
from raymega.checkpoint.format.manifest import Manifest, find_restore
from raymega.checkpoint.snapshots.snapshot import Snapshot
from raymega.config.schema import Job
from raymega.errors import CheckpointError, ConfigError, raise_faults
from raymega.events import StateSource
from raymega.orchestrate.core.failure_policy import Failure
from raymega.orchestrate.core.worker_group_api import SnapshotManager
from raymega.orchestrate.driver import exit_errors
from raymega.orchestrate.driver.rollbacks import Rollback, read_rollbacks, write_rollback
from raymega.orchestrate.run_store.journal import RunRecord
from raymega.orchestrate.run_store.run_identity import precision_faults
from raymega.storage.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Where an attempt starts.

    Attributes:
        step: Completed steps of the state; 0 is also that of a fresh start.
        key: The manifest; empty for a fresh start.
        source: Where it is.
        holders: By key, who holds the objects of a snapshot in memory.
        samples: Samples of the run that the state has consumed.
    """

    step: int = 0
    key: str = ""
    source: StateSource = "nothing"
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    samples: int = 0


class RestorePoint:
    """``start`` is what the next attempt starts from, ``uri`` the newest checkpoint in the store, empty
    when there is none."""

    def __init__(self, store: Store, job: Job, snapshot_manager: SnapshotManager) -> None:
        self.uri = ""
        self.start = ResumePoint()
        self._store, self._job, self._snapshot_manager = store, job, snapshot_manager
        self._unreadable: dict[StateSource, set[str]] = {"store": set(), "memory": set()}
        self._rollbacks = read_rollbacks(store)
        self._going_back: Rollback | None = None

    def give_up_on_newest(self) -> None:
        """A worker could not read it."""
        self._unreadable[self.start.source].add(self.start.key)

    @property
    def skipped_samples(self) -> tuple[tuple[int, int], ...]:
        """Ranges of samples that rollbacks left out; see StartWorker."""
        return tuple(each.samples for each in self._rollbacks if each.passes_over)

    def roll_back(self, failure: Failure, *, attempt: int) -> None:
        """What is found next is a checkpoint: memory may hold what ``failure`` of ``attempt`` undoes."""
        self._going_back = Rollback(
            attempt=attempt, from_step=failure.step, to_step=0, samples=(0, failure.next_sample),
            cause=failure.cause,
        )  # fmt: skip

    def find(self, record: RunRecord, *, saved_step: int) -> int:
        """Look for what to start from, and return the step of the newest checkpoint, 0 for none.

        Args:
            record: The run's; names it, and knows a step that was saved.
            saved_step: The step that this driver knows to be saved.

        Raises:
            CheckpointError: The run has checkpoints, and nothing can be restored.
            ConfigError: Masters would lose digits.
        """
        restore = find_restore(self._store, skip=self._unreadable["store"])
        for fault in restore.broken:
            log.warning("passed over: %s", fault)
        snapshot = None if self._going_back else self._find_snapshot(record.num_attempts)
        saved = restore.manifest
        self.uri = f"{self._store.uri}/{restore.key}" if restore.key else ""
        if snapshot is not None and (saved is None or snapshot.id >= _id(saved)):
            self.start = _start(snapshot.manifest, "memory", snapshot.holders)
        elif saved is not None:
            raise_faults(ConfigError, precision_faults(saved.job, self._job))
            self.start = _start(saved, "store", {})
        elif restore.broken or self._unreadable["store"] or max(record.step, saved_step) > 0:
            raise CheckpointError(
                *restore.broken, exit_errors.nothing_readable(record, self._store)
            )
        else:
            self.start = ResumePoint()
        self._end_rollback()
        return saved.step if saved else 0

    def _find_snapshot(self, attempt: int) -> Snapshot | None:
        """The newest of ``attempt``, or of those before as far as it began from them.

        What an older attempt took after that is a branch that was given up: a rank that had not let go
        yet may finish it in the memory of a node.
        """
        skip, begun = set(self._unreadable["memory"]), checkpoint_of(self.start.key)
        while (found := self._snapshot_manager.find(skip=skip)) is not None:
            if found.id.attempt >= attempt or (begun is not None and found.id <= begun):
                return found
            key = found.manifest.key
            log.warning("passed over: %s came after attempt %d had begun without it", key, attempt)
            skip.add(key)
        return None

    def _end_rollback(self) -> None:
        """On record before anything is trained from here, so that a later driver keeps to it too."""
        if self._going_back is None:
            return
        end = self._going_back.samples[1]
        rollback = replace(
            self._going_back, to_step=self.start.step, samples=(self.start.samples, end)
        )
        write_rollback(self._store, rollback)
        self._rollbacks = (*self._rollbacks, rollback)
        self._going_back = None


def _start(
    manifest: Manifest, source: StateSource, holders: Mapping[str, tuple[str, ...]]
) -> ResumePoint:
    return ResumePoint(
        step=manifest.step, key=manifest.key, source=source, holders=holders,
        samples=int(manifest.state.get("samples", 0)),
    )  # fmt: skip


def _id(manifest: Manifest) -> CheckpointId:
    return CheckpointId(attempt=manifest.attempt, step=manifest.step)
