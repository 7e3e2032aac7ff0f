"""Finds the state that the next attempt starts from: the newest readable checkpoint or snapshot.

It remembers which of them workers could not read, and the rollbacks of the run. The controller decides when
to go back.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace

from pydantic import TypeAdapter

from raymega.checkpoint.format.keys import CheckpointId, checkpoint_of, manifest_key
from raymega.checkpoint.format.manifest import Manifest, find_restore
from raymega.checkpoint.load.fingerprint import sources_of
from raymega.checkpoint.snapshots.snapshot import Snapshot
from raymega.config.schema import Job
from raymega.errors import CheckpointError, ConfigError, Fault, raise_faults
from raymega.events import StateSource
from raymega.messages import SnapshotHolders
from raymega.orchestrate.core.failure_policy import Failure
from raymega.orchestrate.core.worker_group_api import SnapshotManager
from raymega.orchestrate.run_store.journal import RunRecord
from raymega.orchestrate.run_store.run_identity import precision_faults
from raymega.storage.json_objects import parse_object
from raymega.storage.store import Store

log = logging.getLogger(__name__)

ROLLBACKS = "rollbacks/"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """The state from which an attempt starts.

    Attributes:
        step: Completed steps of the state; 0 for a fresh start.
        key: Key of its manifest; empty for a fresh start.
        source: Place of the state: store, memory or nothing.
        holders: Snapshot servers that hold a snapshot.
        samples: Samples of the run that the state has consumed.
    """

    step: int = 0
    key: str = ""
    source: StateSource = "nothing"
    holders: SnapshotHolders = field(default_factory=SnapshotHolders)
    samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """A rollback of the run: the steps that it undid, and the samples that it skips for good.

    Attributes:
        attempt: Attempt that was ended for it.
        from_step: Completed steps of that attempt.
        to_step: Step of the checkpoint that the run went back to.
        samples: Range of samples to skip: the first that the checkpoint had not consumed, and the end.
        cause: Cause of the rollback, for people.
    """

    attempt: int
    from_step: int
    to_step: int
    samples: tuple[int, int]
    cause: str

    @property
    def passes_over(self) -> bool:
        """True when samples are skipped; else the same steps are done again."""
        return self.samples[1] > self.samples[0]


_ROLLBACK: TypeAdapter[Rollback] = TypeAdapter(Rollback)


class RestorePoint:
    """The state that the next attempt starts from, and what rules others out.

    Attributes:
        start: State that the next attempt starts from.
        uri: URI of the newest checkpoint in the store; empty when there is none.
        sources: Fingerprints of the checkpoints of others that each attempt reads again, by field.
    """

    def __init__(self, store: Store, job: Job, snapshot_manager: SnapshotManager) -> None:
        self.uri, self.sources = "", sources_of(job)
        self.start = ResumePoint()
        self._store, self._job, self._snapshot_manager = store, job, snapshot_manager
        self._unreadable: dict[StateSource, set[str]] = {
            "store": set(), "memory": set(), "replicas": set(),
        }  # fmt: skip
        self._rollbacks = read_rollbacks(store)
        self._going_back: Rollback | None = None

    def give_up_on_newest(self) -> None:
        """Ignore the present ``start`` in later searches, because a worker could not read it."""
        self._unreadable[self.start.source].add(self.start.key)

    @property
    def skipped_samples(self) -> tuple[tuple[int, int], ...]:
        """Ranges of samples that rollbacks skip; see StartWorker."""
        return tuple(each.samples for each in self._rollbacks if each.passes_over)

    def roll_back(self, failure: Failure, *, attempt: int) -> None:
        """Make the next search a rollback for ``failure``: to a checkpoint, never to a snapshot.

        A snapshot may already hold the steps that the rollback undoes.
        """
        self._going_back = Rollback(
            attempt=attempt, from_step=failure.step, to_step=0, samples=(0, failure.next_sample),
            cause=failure.cause,
        )  # fmt: skip

    def find(self, record: RunRecord, *, saved_step: int) -> int:
        """Find the state to start from, and return the step of the newest checkpoint, 0 for none.

        Args:
            record: Record of the run, with its name and the last step known to be saved.
            saved_step: Last step that this driver knows to be saved.

        Raises:
            CheckpointError: The run has checkpoints, and none can be restored.
            ConfigError: The checkpoint's master weights are wider than the job's.
        """
        # newest readable checkpoint, and newest snapshot unless this is a rollback
        restore = find_restore(self._store, skip=self._unreadable["store"])
        for fault in restore.broken:
            log.warning("passed over: %s", fault)
        snapshot = None if self._going_back else self._find_snapshot(record.num_attempts)
        saved = restore.manifest
        self.uri = f"{self._store.uri}/{restore.key}" if restore.key else ""
        # the newer of the two; of equal ones the snapshot, which is read faster
        if snapshot is not None and (saved is None or snapshot.id >= _id(saved)):
            self.start = _start(snapshot.manifest, "memory", snapshot.holders)
        elif saved is not None:
            raise_faults(ConfigError, precision_faults(saved.job, self._job))
            self.start = _start(saved, "store", SnapshotHolders())
        elif restore.broken or self._unreadable["store"] or max(record.step, saved_step) > 0:
            raise CheckpointError(*restore.broken, nothing_readable(record, self._store))
        else:
            self.start = ResumePoint()
        self._end_rollback()
        return saved.step if saved else 0

    def hold(self, at: CheckpointId) -> bool:
        """Start from the state ``at`` that workers hold; return False if they could not continue from it before."""
        key = manifest_key(at)
        if self._going_back or key in self._unreadable["replicas"]:
            return False
        self.start = ResumePoint(step=at.step, key=key, source="replicas")
        return True

    def _find_snapshot(self, attempt: int) -> Snapshot | None:
        """Return the newest snapshot that belongs to the history of ``attempt``, or None.

        An older attempt's snapshot belongs to it up to the state that ``attempt`` started from. Later ones are
        of an abandoned branch; a rank of that attempt may have completed them before it was aborted.
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
        """Write the pending rollback to the store before training resumes, so that later drivers skip too."""
        if self._going_back is None:
            return
        end = self._going_back.samples[1]
        rollback = replace(
            self._going_back, to_step=self.start.step, samples=(self.start.samples, end)
        )
        write_rollback(self._store, rollback)
        self._rollbacks = (*self._rollbacks, rollback)
        self._going_back = None


def _start(manifest: Manifest, source: StateSource, holders: SnapshotHolders) -> ResumePoint:
    return ResumePoint(
        step=manifest.step, key=manifest.key, source=source, holders=holders,
        samples=int(manifest.state.get("samples", 0)),
    )  # fmt: skip


def _id(manifest: Manifest) -> CheckpointId:
    return CheckpointId(attempt=manifest.attempt, step=manifest.step)


def write_rollback(store: Store, rollback: Rollback) -> None:
    """Write a rollback as an object of its own, so that a later driver of the run skips the same samples."""
    text = json.dumps(asdict(rollback), indent=2, sort_keys=True)
    store.put(f"{ROLLBACKS}a{rollback.attempt:04d}.json", [text.encode()], overwrite=True)


def read_rollbacks(store: Store) -> tuple[Rollback, ...]:
    """Return all rollbacks of the run, oldest first.

    Raises:
        DamagedError: A rollback cannot be read, so the samples to skip are unknown.
    """
    found = []
    for key in store.list(ROLLBACKS):
        rollback = parse_object(
            store.get(key),
            _ROLLBACK,
            name=f"{store.uri}/{key}",
            rule="it alone says which samples the run passes over; its checkpoints are sound",
            remedy=f"write it anew from incidents/ in {store.uri}, or read these samples after all: "
            f"rm {store.uri}/{key}",
        )
        found.append(rollback)
    return tuple(found)


def nothing_readable(record: RunRecord, store: Store) -> Fault:
    """Return the fault of a run that had checkpoints, of which none can be restored."""
    return Fault(
        fact=f"no checkpoint of run {record.name!r} in {store.uri} can be restored",
        rule="a run that has had checkpoints never begins again from nothing by itself",
        remedy="repair one, or take another run.name to begin again",
    )
