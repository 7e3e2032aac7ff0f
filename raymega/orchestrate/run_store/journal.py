"""The run's journal in its store: the run's identity and status, and a record of each attempt.

    run.json               record of the run, rewritten as the run progresses
    journal/000003.json    attempt 3: its grid, its failures, and the states of the driver in it

The manifests decide how far a run got and the lease who drives it; the record repeats both for people. When a
driver did not end in good order, the next one reads from the journal what was spent of the retry budget, and
the grid that the run had.
"""

from __future__ import annotations

import json
import logging
import uuid
from concurrent.futures import Executor, Future, wait
from dataclasses import asdict, dataclass, replace
from itertools import islice
from threading import Lock
from typing import Any

from pydantic import TypeAdapter, ValidationError

from raymega.config.schema import Job
from raymega.errors import (
    ConfigError,
    Fault,
    PreemptedError,
    RaymegaError,
    StorageError,
    raise_faults,
)
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.core.failure_policy import Failure
from raymega.orchestrate.core.state import RunState, State
from raymega.orchestrate.run_store.lease import Lease
from raymega.orchestrate.run_store.run_identity import identity_faults, identity_of
from raymega.plan.run_plan import RunPlan
from raymega.storage.store import Store

log = logging.getLogger(__name__)

RECORD_KEY = "run.json"
JOURNAL = "journal/"
VERSION = 1
MAX_TURNS = 200
"""Number of newest state changes of an attempt that are kept."""
MAX_ENTRIES = 100
"""Number of newest attempts that a new driver reads."""


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
    identity: dict[str, Any]  # values of a job file: plain JSON
    num_attempts: int = 0
    status: str
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
    """

    attempt: int
    grid: dict[str, int]
    world_size: int
    num_micro_batches: int
    spares: int
    restored: str
    state: str
    failures: tuple[Failure, ...] = ()
    turns: tuple[StateChange, ...] = ()

    @property
    def key(self) -> str:
        """Key of the record's object in the run's store."""
        return f"{JOURNAL}{self.attempt:06d}.json"

    def to_json(self) -> bytes:
        """Return the record as indented JSON."""
        return json.dumps(asdict(self), indent=2, sort_keys=True).encode()


_ENTRY: TypeAdapter[AttemptRecord] = TypeAdapter(AttemptRecord)


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

    def _write(self, record: RunRecord, entry: AttemptRecord | None) -> None:
        write_record(self._store, record)
        if entry is not None:
            self._store.put(entry.key, [entry.to_json()], overwrite=True)


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
            status="new",
            total_steps=job.run.steps,
            updated=now,
        )
    faults = identity_faults(stored.name, stored.identity, job, step=stored.step)
    raise_faults(ConfigError, faults)
    # Stages ahead of the run may have changed: the next comparison is with these.
    return replace(stored, identity=identity_of(job), total_steps=job.run.steps, updated=now)


def read_record(store: Store) -> RunRecord | None:
    """Return the stored record, or None for a run that was never begun.

    Raises:
        StorageError: There is a record that this version cannot read.
    """
    try:
        text = store.get(RECORD_KEY)
    except KeyError:
        return None
    try:
        record = RunRecord(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise StorageError(_unreadable(store, str(error))) from error
    if record.version != VERSION:
        raise StorageError(_unreadable(store, f"version {record.version}"))
    return record


def write_record(store: Store, record: RunRecord) -> None:
    """Write the record, replacing the one before."""
    text = json.dumps(asdict(record), indent=2, sort_keys=True)
    store.put(RECORD_KEY, [text.encode()], overwrite=True)


def read_history(store: Store) -> RunHistory:
    """Return the history of all attempts since a driver last ended in good order."""
    failures: tuple[Failure, ...] = ()
    num_workers = 0
    # newest first, back to the last attempt whose record has a final state
    for key in islice(sorted(store.list(JOURNAL), reverse=True), MAX_ENTRIES):
        try:
            entry = _ENTRY.validate_json(store.get(key))
            if State(entry.state).is_end:
                break
        except (KeyError, ValueError, ValidationError) as error:
            log.warning("%s is skipped, it cannot be read: %s", key, error)
            continue
        failures = (*entry.failures, *failures)
        num_workers = num_workers or entry.world_size
    return RunHistory(failures=failures, num_workers=num_workers)


def _unreadable(store: Store, why: str) -> Fault:
    return Fault(
        fact=f"{store.uri}/{RECORD_KEY} cannot be read ({why})",
        rule=f"it must be a run's record of version {VERSION}",
        remedy="use the raymega that wrote it, or take another run.name",
    )


def stopped(record: RunRecord, state: RunState) -> PreemptedError:
    """Return the error of a run that was stopped by request and can be continued."""
    return PreemptedError(
        fact=f"run {record.name!r} stopped with step {state.saved_step} of {record.total_steps} "
        f"saved ({state.reason})",
        rule="a run that is stopped can be continued",
        remedy="start the same job again",
    )
