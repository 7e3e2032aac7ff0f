"""Messages between driver and worker: plain, frozen, picklable values, and no others cross.

`orchestrate/workers/worker_actor.py` transports them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raymega.box import SavedBox
from raymega.events import (
    BadStep,
    EvaluationFinished,
    ExpertLoads,
    NodesChecked,
    SamplesDrawn,
    SaveSkipped,
    StepFinished,
)
from raymega.schedule.timeline import EventTuple


# driver to worker: start
@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotHolders:
    """Snapshot servers that hold the shares of a whole snapshot; empty without one.

    Attributes:
        servers: Servers that hold a share, each as ``host:port``.
        by_rank: Numbers in ``servers`` of those that hold the share of each rank that wrote the snapshot.
        grid: Degrees of the axes of the grid that wrote it.
    """

    servers: tuple[str, ...] = ()
    by_rank: tuple[tuple[int, ...], ...] = ()
    grid: Mapping[str, int] = field(default_factory=dict)

    def of(self, rank: int) -> tuple[str, ...]:
        """Return the servers that hold the share of ``rank``."""
        return tuple(self.servers[number] for number in self.by_rank[rank])


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Snapshot servers that a worker reads from and writes to, each as ``host:port``.

    Attributes:
        token: Secret that a server asks of its callers.
        write_to: Servers for this worker's snapshots: that of its own node, then the partner's.
        num_copies: Number of copies wanted; lost servers are missing in ``write_to``.
        home: Server of the worker's own node, which reads the worker's shared memory; empty if lost.
        tidies: Servers in which this worker deletes old snapshots.
        read_from: Servers that hold the snapshot to restore; empty when a checkpoint in the run's store
            is restored, or nothing.
    """

    token: str = field(default="", repr=False)
    write_to: tuple[str, ...] = ()
    num_copies: int = 0
    home: str = ""
    tidies: tuple[str, ...] = ()
    read_from: SnapshotHolders = field(default_factory=SnapshotHolders)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartWorker:
    """Everything that one worker needs to enter the run (driver to worker).

    Attributes:
        plan_json: RunPlan as JSON.
        run_uri: URI of the run's folder in the store.
        attempt: Number of the worker group, from 1; also fences the files that it writes.
        rank: Global rank of this worker.
        local_rank: Index among the workers of its node.
        rendezvous: ``host:port`` of the store that rank 0 hosts for this attempt.
        restore: Key of the manifest to restore from, relative to the run; empty for a fresh start.
        device: ``cpu`` or ``cuda``.
        replicas: Snapshot servers of this worker.
        skipped_samples: Ranges (first, end) of global samples that the run skips: at ``first`` it
            continues with ``end``.
        entry_input: Input of the entry module beside its plan: requests to score.
        reported_step: Steps that the driver has heard of, where the ranks continue from the state ``restore``
            that they hold in their own memory; -1 where they load it.
        is_holder: Whether this worker held a state at the end of the attempt before. One that had no rank
            then may have an older state of the same step, which it drops.
    """

    plan_json: str
    run_uri: str
    attempt: int
    rank: int
    local_rank: int
    rendezvous: str
    restore: str
    device: str
    replicas: Replicas = field(default_factory=Replicas)
    skipped_samples: tuple[tuple[int, int], ...] = ()
    entry_input: bytes = field(default=b"", repr=False)
    reported_step: int = -1
    is_holder: bool = False

    @property
    def is_held(self) -> bool:
        """True where the ranks continue from the state in their own memory."""
        return self.reported_step >= 0


# worker to driver: start and progress
@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """A worker passed a phase of its start: ``rendezvous``, ``built``, ``restored``."""

    rank: int
    phase: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Rank ``rank`` has completed ``step`` steps; the heartbeat of ranks that report no metrics."""

    rank: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Working:
    """Rank ``rank`` is alive within a long operation: it ran an instruction, or read or wrote a box."""

    rank: int


# worker to driver: saves
@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSaved:
    """A rank has written its part of the checkpoint of ``step``, or failed to.

    Attributes:
        rank: Global rank.
        step: Number of completed steps in the checkpoint.
        boxes: Blocks written; not to be used when there is an ``error``.
        state: Scalars of TrainState, equal on all ranks.
        stall_s: Seconds for which training was blocked by the copy to host memory.
        write_s: Seconds of the background write.
        num_bytes: Bytes written.
        error: Cause of a failed write, else empty.
        headers: ``zlib.crc32`` of each file's header, the bytes before its first block, by file.
    """

    rank: int
    step: int
    boxes: Sequence[SavedBox]
    state: dict[str, int | float | str]
    stall_s: float
    write_s: float
    num_bytes: int
    error: str = ""
    headers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSaveProgress:
    """Progress of a rank's save: ``written_bytes`` of ``num_bytes`` were handed to the store.

    ``error`` is the cause of a write that failed and will be tried again, else empty.
    """

    rank: int
    step: int
    written_bytes: int
    num_bytes: int
    error: str = ""


# worker to driver: diagnostics
@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimeline:
    """Instructions of one rank in one step: ``(name, micro_batch, chunk, start_s, end_s)`` each.

    Times are seconds on the rank's monotonic clock, relative to a step start that all ranks share.
    """

    rank: int
    step: int
    events: tuple[EventTuple, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Memory and work of one rank after ``step``, by metric name; all ranks send the same steps."""

    rank: int
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryOutput:
    """Output of an entry module: scores of an evaluation's requests, after ``step`` steps of training."""

    rank: int
    step: int = 0
    data: bytes = field(repr=False)


# end of a worker
@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFinished:
    """The worker left the loop without an error; ``stopped`` if it was asked to before the end."""

    rank: int
    step: int
    stopped: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailed:
    """The worker's training thread raised.

    ``error`` is the class name, ``message`` the text. ``is_secondary`` marks a failure that another rank's
    failure caused (a lost connection); the driver shows it only when nothing else is known. ``exit_code``
    is that of a RaymegaError, else 1; ``next_sample`` that of a RollbackError.
    """

    rank: int
    step: int
    error: str
    message: str
    traceback: str
    is_secondary: bool
    exit_code: int = 1
    next_sample: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerDied:
    """The worker's process or node is gone; made by the driver, not by the worker."""

    rank: int
    cause: str


Report = (
    Entered
    | StepFinished
    | BadStep
    | Progress
    | Working
    | EvaluationFinished
    | SamplesDrawn
    | ShardSaved
    | RankSaveProgress
    | SaveSkipped
    | RankTimeline
    | RankMemory
    | ExpertLoads
    | EntryOutput
    | WorkerFinished
    | WorkerFailed
    | WorkerDied
    | NodesChecked
)
"""Messages from a worker or its host: of one rank, or an event that one rank reports for all."""


# channel between both
@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """Requests of the driver for the next step boundary (driver to worker).

    Attributes:
        stop: Request to save and leave the loop.
        save: Request to save once. It counts on rank 0 alone: ranks receive it at different steps, and
            one request is one save.
        regroup: Request to leave the loop without a save and to keep the state in memory, for a world of
            other ranks. It counts on rank 0 alone.
    """

    stop: bool = False
    save: bool = False
    regroup: bool = False


class Channel(Protocol):
    """Connection of a worker to its driver."""

    def report(self, report: Report) -> None:
        """Send a report; called from any thread of the worker; never blocks, never raises."""

    def requests(self) -> Requests:
        """Return the driver's requests; called once a step; never blocks. A save is returned once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSlots:
    """Worker slots that one node of the cluster offers, by the job's resource request.

    ``cpus`` and ``gpus`` are what they are counted in; ``needs_gpu`` tells whether a worker takes a GPU.
    """

    node_id: str
    address: str
    num_slots: int
    cpus: float = 0.0
    gpus: float = 0.0
    needs_gpu: bool = False
    labels: dict[str, str] = field(default_factory=dict)
