"""What the next attempt starts from: the newest state that can be read, in the store or in memory.

It remembers which ones workers could not read. When to go back to one is the controller's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from raymega.checkpoint.keys import CheckpointId, checkpoint_of
from raymega.checkpoint.manifest import Manifest, find_restore
from raymega.checkpoint.snapshots import Snapshot
from raymega.config.schema import Job
from raymega.errors import CheckpointError, ConfigError, raise_faults
from raymega.orchestrate import verdicts
from raymega.orchestrate.group import SnapshotKeeping
from raymega.orchestrate.identity import precision_faults
from raymega.orchestrate.journal import RunRecord
from raymega.storage.store import Store
from raymega.tracking.sink import StateSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where an attempt starts.

    Attributes:
        step: Completed steps of the state; 0 is also that of a fresh start.
        key: The manifest; empty for a fresh start.
        source: Where it is.
        holders: By key, who holds the objects of a snapshot in memory.
    """

    step: int = 0
    key: str = ""
    source: StateSource = "nothing"
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class RestorePoint:
    """``start`` is what the next attempt starts from, ``key`` the newest checkpoint in the store."""

    def __init__(self, store: Store, job: Job, keeping: SnapshotKeeping) -> None:
        self.key = ""
        self.start = Start()
        self._store, self._job, self._keeping = store, job, keeping
        self._unreadable: dict[StateSource, set[str]] = {"store": set(), "memory": set()}

    @property
    def uri(self) -> str:
        """Where the newest checkpoint is; empty when there is none."""
        return f"{self._store.uri}/{self.key}" if self.key else ""

    def give_up_on_newest(self) -> None:
        """A worker could not read it."""
        self._unreadable[self.start.source].add(self.start.key)

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
        snapshot = self._find_snapshot(record.num_attempts)
        saved, self.key = restore.manifest, restore.key
        if snapshot is not None and (saved is None or snapshot.id >= _id(saved)):
            step, key = snapshot.manifest.step, snapshot.manifest.key
            self.start = Start(step=step, key=key, source="memory", holders=snapshot.holders)
        elif saved is not None:
            raise_faults(ConfigError, precision_faults(saved.job, self._job))
            self.start = Start(step=saved.step, key=restore.key, source="store")
        elif restore.broken or self._unreadable["store"] or max(record.step, saved_step) > 0:
            raise CheckpointError(*restore.broken, verdicts.nothing_readable(record, self._store))
        else:
            self.start = Start()
        return saved.step if saved else 0

    def _find_snapshot(self, attempt: int) -> Snapshot | None:
        """The newest of ``attempt``, or of those before as far as it began from them.

        What an older attempt took after that is a branch that was given up: a rank that had not let go
        yet may finish it in the memory of a node.
        """
        skip, begun = set(self._unreadable["memory"]), checkpoint_of(self.start.key)
        while (found := self._keeping.find(skip=skip)) is not None:
            if found.id.attempt >= attempt or (begun is not None and found.id <= begun):
                return found
            key = found.manifest.key
            log.warning("passed over: %s came after attempt %d had begun without it", key, attempt)
            skip.add(key)
        return None


def _id(manifest: Manifest) -> CheckpointId:
    return CheckpointId(attempt=manifest.attempt, step=manifest.step)
