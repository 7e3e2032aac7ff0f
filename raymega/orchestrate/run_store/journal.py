"""The run's journal in its store: who the run is, how it stands, and what became of each attempt.

    run.json               the run's record, rewritten as it goes on
    journal/000003.json    attempt 3: its grid, its failures, every state of the driver under it

How far a run got is the manifests' to say, and who drives it the lease's; the record repeats it for
people. From the journal a new driver goes on where one was torn away: with what was spent of the
retry budget, and on the grid that the run had.
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
from raymega.errors import ConfigError, Fault, RaymegaError, StorageError, raise_faults
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
"""Turns of one attempt that are kept, the newest."""
MAX_ENTRIES = 100
"""Attempts that a new driver looks back to, the newest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run's record.

    Attributes:
        version: Of this layout.
        run_id: The run's own id, from its first driver on.
        name: The job's ``run.name``.
        identity: What cannot change in a run's life: model, seed, data and the kind of optimizer,
            as plain values.
        num_attempts: Number of the newest attempt; 0 for none.
        status: Name of the State that the last driver left.
        step: Steps that were committed when the record was written.
        total_steps: The job's ``run.steps``.
        updated: When it was written.
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
    """The driver has moved to another state, at ``step`` completed steps, for ``reason``."""

    at: str
    state: str
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """One attempt.

    Attributes:
        attempt: Its number and epoch.
        grid: Degrees of its axes.
        world_size: Workers that the grid has.
        num_micro_batches: Of each step, per replica.
        spares: Warm processes beside them at its start.
        restored: Key of the manifest that it began from; empty for a fresh start.
        state: Name of the State that its driver was in when this was written; an end only when the
            driver has ended in good order.
        failures: What it was lost to; without the tracebacks.
        turns: What happened to it.
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
        """Where it lies."""
        return f"{JOURNAL}{self.attempt:06d}.json"

    def to_json(self) -> bytes:
        """Its object."""
        return json.dumps(asdict(self), indent=2, sort_keys=True).encode()


_ENTRY: TypeAdapter[AttemptRecord] = TypeAdapter(AttemptRecord)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """What drivers have left behind that did not end in good order.

    Attributes:
        failures: Theirs, oldest first: they count as this driver's own.
        num_workers: Of the grid that the run had last; 0 when the last driver has ended.
    """

    failures: tuple[Failure, ...] = ()
    num_workers: int = 0


class Journal:
    """One driver's journal. Called from the control loop; only ``begin`` and ``end`` wait."""

    def __init__(self, job: Job, *, lease: Lease, executor: Executor, clock: Clock) -> None:
        """Read what is there; nothing is written.

        Args:
            job: What the driver is to run.
            lease: Which this driver holds, on the run's store; without it, it writes nothing.
            executor: One thread, which keeps writes in order.
            clock: For dates.

        Raises:
            ConfigError: The store holds a run of this name with another model, seed or data.
        """
        self._store, self._lease, self._executor, self._clock = lease.store, lease, executor, clock
        self._lock = Lock()
        self.record = open_record(lease.store, job, now=clock.timestamp())
        self.past = read_history(lease.store)
        self._entry: AttemptRecord | None = None

    def first_state(self) -> RunState:
        """Where the record leaves the run, before anybody has looked for checkpoints."""
        num_attempts = self.record.num_attempts
        return RunState(
            attempt=num_attempts,
            step=0,
            saved_step=0,
            since_s=self._clock.monotonic(),
            reason="resumed" if num_attempts else "first start",
        )

    def begin(self, plan: RunPlan, state: RunState, *, restored: str, spares: int) -> None:
        """The attempt is on record before anything can be written under its number.

        Raises:
            StorageError: The store fails.
        """
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
        with self._lock:
            self._write(self._record_at(state), self._entry)

    def note(self, state: RunState) -> None:
        """A turn of the present attempt; it is written with what is written next."""
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
        """The present attempt is lost."""
        if self._entry is not None:
            failures = (*self._entry.failures, replace(failure, traceback=""))
            self._entry = replace(self._entry, failures=failures)

    def record_state(self, state: RunState) -> Future[None]:
        """Write what there is, beside the loop; a store that fails is only logged."""
        return self._executor.submit(self._write_quietly, self._record_at(state), self._entry)

    def end(self, state: RunState, timeout_s: float) -> None:
        """The same, and wait for it."""
        wait([self.record_state(state)], timeout=timeout_s)

    def _record_at(self, state: RunState) -> RunRecord:
        status, step = state.state.value, state.saved_step
        return replace(self.record, status=status, step=step, updated=self._clock.timestamp())

    def _write_quietly(self, record: RunRecord, entry: AttemptRecord | None) -> None:
        try:
            with self._lock:
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
    """The record to go on with: the stored one, or a new one that is not written yet.

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
    raise_faults(ConfigError, identity_faults(stored.name, stored.identity, job))
    return replace(stored, total_steps=job.run.steps, updated=now)


def read_record(store: Store) -> RunRecord | None:
    """The stored record, or None for a run that was never begun.

    Raises:
        StorageError: There is one that this version cannot read.
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
    """Put the record in the place of the one before."""
    text = json.dumps(asdict(record), indent=2, sort_keys=True)
    store.put(RECORD_KEY, [text.encode()], overwrite=True)


def read_history(store: Store) -> RunHistory:
    """What is to be taken over: all attempts since a driver has last ended in good order."""
    failures: tuple[Failure, ...] = ()
    num_workers = 0
    for key in islice(sorted(store.list(JOURNAL), reverse=True), MAX_ENTRIES):
        try:
            entry = _ENTRY.validate_json(store.get(key))
            if State(entry.state).is_end:
                break
        except (KeyError, ValueError, ValidationError) as error:
            log.warning("%s is passed over, it cannot be read: %s", key, error)
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
