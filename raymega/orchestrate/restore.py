"""Which checkpoint the next attempt starts from: the newest that can be read.

It remembers which ones workers could not read. When to go back to one is the controller's.
"""

from __future__ import annotations

import logging

from raymega.checkpoint.manifest import find_restore
from raymega.config.schema import Job
from raymega.errors import CheckpointError, ConfigError, raise_faults
from raymega.orchestrate import verdicts
from raymega.orchestrate.journal import RunRecord, precision_faults
from raymega.storage.store import Store

log = logging.getLogger(__name__)


class RestorePoint:
    """``key`` is the manifest to restore from, relative to the run; empty for a fresh start."""

    def __init__(self, store: Store, job: Job) -> None:
        self.key = ""
        self._store, self._job = store, job
        self._unreadable: set[str] = set()

    def give_up_on_newest(self) -> None:
        """A worker could not read it."""
        self._unreadable.add(self.key)

    def find(self, record: RunRecord, *, saved_step: int) -> int:
        """Look into the store for the newest one; its step, 0 when the run has none.

        Args:
            record: The run's; names it, and knows a step that was saved.
            saved_step: The step that this driver knows to be saved.

        Raises:
            CheckpointError: The run has checkpoints, and none can be restored.
            ConfigError: Masters would lose digits.
        """
        restore = find_restore(self._store, skip=self._unreadable)
        for fault in restore.broken:
            log.warning("passed over: %s", fault)
        self.key = restore.key
        if restore.manifest is not None:
            raise_faults(ConfigError, precision_faults(restore.manifest.job, self._job))
            return restore.manifest.step
        if restore.broken or self._unreadable or max(record.step, saved_step) > 0:
            raise CheckpointError(*restore.broken, verdicts.nothing_readable(record, self._store))
        return 0
