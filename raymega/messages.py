"""The only values that cross between driver and worker: plain, frozen, picklable.

It owns their shape and the two directions of the channel, not their transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add, sub
from typing import Protocol

from raymega.events import (
    BadStep,
    EvaluationFinished,
    ExpertLoads,
    NodesChecked,
    SaveSkipped,
    StepFinished,
)
from raymega.schedule.timeline import EventTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """An n-dimensional block of a global tensor: first index and extent along each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor of ``shape``."""
        return cls(offset=(0,) * len(shape), shape=shape)

    @property
    def num_elements(self) -> int:
        """Product of the extents; 1 for a scalar."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product

    def intersect(self, other: Box) -> Box | None:
        """The common block, or None when the two do not meet."""
        assert len(self.shape) == len(other.shape), f"{self} and {other} are of different tensors"
        offset = tuple(map(max, self.offset, other.offset))
        ends = map(min, map(add, self.offset, self.shape), map(add, other.offset, other.shape))
        shape = tuple(map(sub, ends, offset))
        if min(shape, default=1) <= 0:
            return None
        return Box(offset=offset, shape=shape)

    def rows(self, first: int, count: int) -> Box:
        """``count`` rows of this block, its own row ``first`` the first of them."""
        offset, *others = self.offset
        return Box(offset=(offset + first, *others), shape=(count, *self.shape[1:]))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that select this block inside an array that holds ``outer``."""
        pairs = zip(self.offset, outer.offset, self.shape, strict=True)
        return tuple(slice(a - b, a - b + n) for a, b, n in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBox:
    """One block of a global tensor as it lies in a file of a checkpoint.

    Attributes:
        tensor: Global name, such as ``model/layers.0.mlp.up.weight``.
        dtype: Element type, numpy's name (``float32``); bytes are little-endian.
        global_shape: Shape of the whole tensor.
        box: Which block of it.
        file: Key of the file, relative to the checkpoint.
        start: First byte of the block in the file.
        num_bytes: Length of the block.
        crc32: ``zlib.crc32`` of those bytes.
    """

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    file: str
    start: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Where a worker finds snapshots, and where it leaves its own; keepers as ``host:port``.

    Attributes:
        token: What keepers let a caller in by.
        write_to: Keepers of this worker's snapshots: of its own node, then of the partner's.
        num_copies: How many there should be; keepers that are lost are missing above.
        home: Of these, the one of its own node, which looks into this worker's memory; empty when it is
            lost.
        tidies: Of these, the ones in which this worker drops what is too old.
        read_from: By key the keepers that hold an object of the snapshot to restore from; empty
            when that is a checkpoint in the run's store, or nothing.
    """

    token: str = field(default="", repr=False)
    write_to: tuple[str, ...] = ()
    num_copies: int = 0
    home: str = ""
    tidies: tuple[str, ...] = ()
    read_from: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartWorker:
    """Everything that one worker needs to enter the run (driver to worker).

    Attributes:
        plan_json: The RunPlan as JSON.
        run_uri: Folder of the run in the store.
        attempt: Number of the worker group, from 1; also fences the files that it writes.
        rank: Global rank of this worker.
        local_rank: Index among the workers of its node.
        rendezvous: ``host:port`` of the store that rank 0 hosts for this attempt.
        restore: Key of the manifest to restore from, relative to the run; empty for a fresh start.
        device: ``cpu`` or ``cuda``.
        replicas: State in other nodes' memory.
        skipped_samples: Ranges of global samples, first and end, that the run is not to train on: where it
            comes upon the first one, it goes on at the end.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """A worker passed a phase of its start: ``rendezvous``, ``built``, ``restored``."""

    rank: int
    phase: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Rank ``rank`` has completed ``step`` steps; the heart beat of ranks that do not report."""

    rank: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Working:
    """Rank ``rank`` has done a portion of something long: an instruction of the schedule, a box that
    was read or written. It says that the rank is alive, not how far it is."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSaved:
    """A rank has written its part of the checkpoint of ``step``.

    ``state`` is the trainer's scalar state, equal on all ranks; ``stall_s`` is how long training
    waited (copy to host memory), ``write_s`` how long the background write took. ``error`` is the
    cause when the part could not be written; its boxes are then not to be used.
    """

    rank: int
    step: int
    boxes: tuple[SavedBox, ...]
    state: dict[str, int | float | str]
    stall_s: float
    write_s: float
    num_bytes: int
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSaveProgress:
    """A rank is writing its part: ``written_bytes`` of ``num_bytes`` were handed to the store."""

    rank: int
    step: int
    written_bytes: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimeline:
    """What one rank's executor did in one step: ``(name, micro_batch, chunk, start_s, end_s)``.

    Times are seconds on the rank's monotonic clock, relative to a step start that all ranks share.
    """

    rank: int
    step: int
    events: tuple[EventTuple, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Memory of one rank after ``step``, by the names of tracking.names; all ranks send the same
    steps."""

    rank: int
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFinished:
    """The worker left the loop in good order; ``stopped`` when it was asked to before the end."""

    rank: int
    step: int
    stopped: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailed:
    """The worker's training thread raised.

    ``error`` is the class name, ``faults`` its text. ``is_secondary`` marks a failure that another
    rank's failure caused (a lost connection), which the driver shows only when nothing else is
    known. ``exit_code`` is the error's own when it is a RaymegaError, else 1. ``next_sample`` is a
    RollbackError's.
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
    | ShardSaved
    | RankSaveProgress
    | SaveSkipped
    | RankTimeline
    | RankMemory
    | ExpertLoads
    | WorkerFinished
    | WorkerFailed
    | WorkerDied
    | NodesChecked
)
"""What a worker, or its host, says: of its rank alone, or an event of the run that one tells for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """What the driver wants at the next step boundary (driver to worker).

    Attributes:
        stop: Leave the loop, with a save.
        save: Save once. It counts on rank 0 alone: ranks hear of it at different steps, and one wish
            is one save.
    """

    stop: bool = False
    save: bool = False


class Channel(Protocol):
    """A worker's line to its driver."""

    def report(self, report: Report) -> None:
        """Hand over a report; called from any thread of the worker; never blocks, never raises."""

    def requests(self) -> Requests:
        """The driver's wishes now; called once a step; never blocks. A save is wished for once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSlots:
    """What one node of the cluster offers: worker slots by the job's resource request."""

    node_id: str
    address: str
    num_slots: int
    labels: dict[str, str] = field(default_factory=dict)
