"""The run's journal in its store: the run's identity and status, and a record of each attempt.

    run.json               record of the run, rewritten as the run progresses
    journal/000003.json    attempt 3: its grid, its failures, and the states of the driver in it

The manifests decide how far a run got and the lease who drives it; the record repeats both for people. A driver
reads from the journal what the one before, torn away, had spent of the retry budget, and the run's grid.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import asdict, dataclass, replace
from threading import Lock
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter, ValidationError

from raymega.checkpoint.format.epochs import newest_epoch, numbers_below
from raymega.checkpoint.format.manifest import find_restore
from raymega.config.schema import Job
from raymega.errors import (
    ConfigError,
    RaymegaError,
    StorageError,
    raise_faults,
)
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.core.failure_policy import Failure
from raymega.orchestrate.core.state import RunState, State
from raymega.orchestrate.run_store.lease import Lease
from raymega.orchestrate.run_store.run_identity import (
    identity_faults,
    identity_of,
    identity_without_content,
    whole_identity,
)
from raymega.plan.run_plan import RunPlan
from raymega.storage.json_objects import DamagedError, parse_object
from raymega.storage.store import Store, delete_all

log = logging.getLogger(__name__)

RECORD_KEY = "run.json"
JOURNAL = "journal/"
VERSION, NEW = 1, "new"
MAX_TURNS = 200
"""Number of newest state changes of an attempt that are kept."""
MAX_ENTRIES = 100
"""Number of newest attempts that a driver reads, and that are kept."""


def _known_status(status: str) -> str:
    return status if status == NEW else State(status).value


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The record of a run, ``run.json``.

    Attributes:
        version: Version of this file format.
        run_id: Id of the run, chosen by its first driver.
        name: Name of the run, the job's ``run.name``.
        identity: Values that must not change in a run: model, seed, data and kind of optimizer, as JSON.
        num_attempts: Number of the newest attempt; 0 for none.
        status: Name of the driver's State when the record was written.
        step: Step of the newest committed checkpoint when the record was written.
        total_steps: Number of steps of the run, the job's ``run.steps``.
        updated: Date and time of writing, ISO 8601.
    """

    version: int = VERSION
    run_id: str
    name: str
    identity: Annotated[dict[str, Any], AfterValidator(whole_identity)]  # a job file's: plain JSON
    num_attempts: int = 0
    status: Annotated[str, AfterValidator(_known_status)]
    step: int = 0
    total_steps: int
    updated: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StateChange:
    """A transition of the driver to ``state``, at ``step`` completed steps, for ``reason``."""

    at: str
    state: str
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """The record of one attempt.

    Attributes:
        attempt: Number of the attempt, which is its epoch.
        grid: Degrees of the grid's axes, by name.
        world_size: Number of workers of the grid.
        num_micro_batches: Number of micro-batches per replica and step.
        spares: Number of spare processes at its start.
        restored: Key of the manifest that it restored; empty for a fresh start.
        state: Name of the driver's State when this was written; a final one only if the driver ended in
            good order.
        failures: Failures that ended it, without tracebacks.
        turns: Transitions of the driver during the attempt, oldest first.
        run: Copy of the run's record at that time, should ``run.json`` be damaged.
    """

    attempt: int
    grid: dict[str, int]
    world_size: int
    num_micro_batches: int
    spares: int
    restored: str
    state: Annotated[str, AfterValidator(_known_status)]
    failures: tuple[Failure, ...] = ()
    turns: tuple[StateChange, ...] = ()
    run: RunRecord | None = None

    @property
    def key(self) -> str:
        """Key of the record's object in the run's store."""
        return entry_key(self.attempt)

    def to_json(self) -> bytes:
        """Return the record as indented JSON."""
        return json.dumps(asdict(self), indent=2, sort_keys=True).encode()


_ENTRY: TypeAdapter[AttemptRecord] = TypeAdapter(AttemptRecord)
_RECORD: TypeAdapter[RunRecord] = TypeAdapter(RunRecord)


def entry_key(attempt: int) -> str:
    """Return the key of the record of ``attempt``."""
    return f"{JOURNAL}{attempt:06d}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """The attempts since a driver last ended in good order, as far as the next driver needs them.

    Attributes:
        failures: Failures of these attempts, oldest first; they count as the next driver's own.
        num_workers: Number of workers of the last grid; 0 when the last driver ended in good order.
    """

    failures: tuple[Failure, ...] = ()
    num_workers: int = 0


class Journal:
    """The journal as one driver writes it; called from the control loop, only ``begin`` and ``end`` block.

    Attributes:
        record: Record of the run, as this driver has changed it.
        past: History that earlier drivers left.
    """

    def __init__(self, job: Job, *, lease: Lease, executor: Executor, clock: Clock) -> None:
        """Read the run's record and history; nothing is written.

        Args:
            job: Job of the run.
            lease: Lease of this driver on the run's store; once it is lost, nothing more is written.
            executor: Executor with one thread, which keeps writes in order.
            clock: Clock for dates.

        Raises:
            ConfigError: The store holds a run of this name with another model, seed or data.
        """
        self._store, self._lease, self._executor, self._clock = lease.store, lease, executor, clock
        self._lock = Lock()
        self.record = open_record(lease.store, job, now=clock.timestamp())
        self.past = read_history(lease.store)
        self._entry: AttemptRecord | None = None

    def first_state(self) -> RunState:
        """Return the run's first state under this driver, before checkpoints are looked for."""
        num_attempts = self.record.num_attempts
        return RunState(
            attempt=num_attempts,
            step=0,
            saved_step=0,
            since_s=self._clock.monotonic(),
            reason="resumed" if num_attempts else "first start",
        )

    def begin(self, plan: RunPlan, state: RunState, *, restored: str, spares: int) -> None:
        """Write the record of a new attempt, before anything else is written under its number.

        Raises:
            StorageError: The store fails.
        """
        # from here on, pending writes of the attempt before are discarded
        with self._lock:
            self.record = replace(self.record, num_attempts=state.attempt)
        self._entry = AttemptRecord(
            attempt=state.attempt,
            grid=plan.grid.degrees(),
            world_size=plan.grid.world_size,
            num_micro_batches=plan.batch.num_micro_batches,
            spares=spares,
            restored=restored,
            state=state.state.value,
        )
        self.note(state)
        # in this thread, so that a failure is raised here
        with self._lock:
            self._write(self._record_at(state), self._entry)
        if state.attempt > MAX_ENTRIES:
            self._executor.submit(self._delete_old, state.attempt)

    def note(self, state: RunState) -> None:
        """Add a transition to the present attempt; the next write includes it."""
        if self._entry is not None:
            turn = StateChange(
                at=self._clock.timestamp(),
                state=state.state.value,
                step=state.step,
                reason=state.reason,
            )
            turns = (*self._entry.turns, turn)[-MAX_TURNS:]
            self._entry = replace(self._entry, state=turn.state, turns=turns)

    def record_failure(self, failure: Failure) -> None:
        """Add a failure to the present attempt; the next write includes it."""
        if self._entry is not None:
            failures = (*self._entry.failures, replace(failure, traceback=""))
            self._entry = replace(self._entry, failures=failures)

    def record_state(self, state: RunState) -> Future[None]:
        """Write the record and the attempt in the executor's thread; a failure is only logged."""
        return self._executor.submit(self._write_quietly, self._record_at(state), self._entry)

    def end(self, state: RunState, timeout_s: float) -> None:
        """Write the record and the attempt, and wait ``timeout_s`` seconds at most."""
        wait([self.record_state(state)], timeout=timeout_s)

    def _record_at(self, state: RunState) -> RunRecord:
        status, step = state.state.value, state.saved_step
        return replace(self.record, status=status, step=step, updated=self._clock.timestamp())

    def _write_quietly(self, record: RunRecord, entry: AttemptRecord | None) -> None:
        try:
            with self._lock:
                # neither after a newer attempt has begun nor after the lease was lost
                is_newest = record.num_attempts == self.record.num_attempts
                if is_newest and self._lease.check() is None:
                    self._write(record, entry)
        except RaymegaError as error:
            log.warning("the run's journal was not written: %s", error)

    def _delete_old(self, attempt: int) -> None:
        """Delete the records that no driver reads, beyond the newest MAX_ENTRIES; a failure is only logged."""
        try:
            first = attempt - MAX_ENTRIES
            old = [entry_key(n) for n in numbers_below(self._store, JOURNAL) if n <= first]
            if old and self._lease.check() is None:
                delete_all(self._store, old)
        except RaymegaError as error:
            log.warning("old records of attempts were not deleted: %s", error)

    def _write(self, record: RunRecord, entry: AttemptRecord | None) -> None:
        write_record(self._store, record)
        if entry is not None:
            self._store.put(entry.key, [replace(entry, run=record).to_json()], overwrite=True)


def open_record(store: Store, job: Job, *, now: str) -> RunRecord:
    """Return the stored record with the job's number of steps, or a new one that is not written yet.

    Raises:
        ConfigError: The store holds a run of that name with another model, seed or data.
    """
    stored = read_record(store)
    if stored is None:
        return RunRecord(
            run_id=uuid.uuid4().hex[:12],
            name=job.run.name,
            identity=identity_of(job),
            status=NEW,
            total_steps=job.run.steps,
            updated=now,
        )
    faults = identity_faults(stored.name, stored.identity, job, step=stored.step)
    raise_faults(ConfigError, faults)
    # Stages ahead of the run may have changed: the next comparison is with these.
    return replace(stored, identity=identity_of(job), total_steps=job.run.steps, updated=now)


def read_record(store: Store) -> RunRecord | None:
    """Return the stored record, or None for a run that was never begun.

    Instead of a damaged record it returns the newest attempt's copy; for a run without one, what the
    newest checkpoint says.

    Raises:
        StorageError: There is a record of a version that this one cannot read.
    """
    name = f"{store.uri}/{RECORD_KEY}"
    try:
        raw = store.get(RECORD_KEY)
        record = parse_object(
            raw,
            _RECORD,
            name=name,
            rule="the record repeats what the checkpoints and the journal say, which count instead",
            remedy="start the same job again, which writes it anew; "
            f"raymega checkpoint verify {store.uri}",
        )
    except KeyError:
        return None
    except DamagedError as error:
        log.warning("%s", error)
        return _copied_record(store) or record_of_checkpoint(store)
    if record.version != VERSION:
        raise StorageError(
            fact=f"{name} has version {record.version}",
            rule=f"this build reads version {VERSION}",
            remedy="use the raymega that wrote it, or take another run.name",
        )
    return record


def _copied_record(store: Store) -> RunRecord | None:
    """Return the copy of the run's record in the newest attempt that has one."""
    return next((entry.run for entry in _entries(store) if entry.run), None)


def record_of_checkpoint(store: Store) -> RunRecord | None:
    """Return a record from the newest readable checkpoint; None where there is none.

    Its id follows from the store's URI, so that each reader finds the same.
    """
    saved = find_restore(store).manifest
    if saved is None:
        return None
    try:
        job = Job.model_validate_json(json.dumps(saved.job))
    except ValidationError:  # of weights that no run has written, or of an older version's job
        return None
    try:
        identity = identity_of(job)
    except (RaymegaError, OSError):  # the data have moved since: they cannot be compared
        identity = identity_without_content(job)
    return RunRecord(
        run_id=uuid.uuid5(uuid.NAMESPACE_URL, store.uri).hex[:12],
        name=job.run.name,
        identity=identity,
        num_attempts=newest_epoch(store),
        status=State.RESTARTING.value,
        step=saved.step,
        total_steps=job.run.steps,
        updated=saved.created,
    )


def write_record(store: Store, record: RunRecord) -> None:
    """Write the record, replacing the one before."""
    text = json.dumps(asdict(record), indent=2, sort_keys=True)
    store.put(RECORD_KEY, [text.encode()], overwrite=True)


def read_history(store: Store) -> RunHistory:
    """Return the history of all attempts since a driver last ended in good order."""
    failures: tuple[Failure, ...] = ()
    num_workers = 0
    # back to the last attempt whose record has a final state
    for entry in _entries(store):
        if State(entry.state).is_end:
            break
        failures = (*entry.failures, *failures)
        num_workers = num_workers or entry.world_size
    return RunHistory(failures=failures, num_workers=num_workers)


def _entries(store: Store) -> Iterator[AttemptRecord]:
    """Yield the records of the newest attempts, newest first, without damaged ones."""
    newest = sorted(numbers_below(store, JOURNAL), reverse=True)[:MAX_ENTRIES]
    for key in map(entry_key, newest):
        try:
            yield parse_object(
                store.get(key),
                _ENTRY,
                name=f"{store.uri}/{key}",
                rule="it holds what one attempt spent of the retry budget; without it that counts as nothing",
                remedy="no step is lost: start the same job again",
            )
        except KeyError:
            continue
        except DamagedError as error:
            log.warning("%s", error)
