"""What a run tells its watchers: one frozen value an event, and the protocol of a watcher.

It owns the values and the timing contract. Where they go is each sink's; when they happen is the
controller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from raymega.schedule.recording import Transfer
from raymega.tracking.names import check_names

Scalar = str | int | float | bool
WorkEvent = tuple[str, int, int, float, float]
RunStatus = Literal["finished", "failed", "preempted", "superseded"]
StateSource = Literal["nothing", "store", "memory"]
"""Where an attempt has its state from: first values, a checkpoint, or a snapshot in other nodes' memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """A driver took up the run; first event of every driver, sent once.

    Attributes:
        run_id: The run's own id, the same for all its drivers. Sinks find their records by it.
        name: The job's ``run.name``.
        uri: Folder of the run in the store.
        is_resumed: An earlier driver has already worked on this run.
        step: Steps that are complete and saved.
        total_steps: The job's ``run.steps``.
        job: The job as plain values, ``job.model_dump(mode="json")``.
    """

    run_id: str
    name: str
    uri: str
    is_resumed: bool
    step: int
    total_steps: int
    job: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStarted:
    """A worker group is about to start.

    Attributes:
        attempt: Its number, from 1 and rising over all drivers of the run.
        step: Completed steps it starts from.
        grid: Degree of each axis: ``{"tp": 2, "pp": 2, "dp": 2, ...}``.
        plan: Short facts of the plan (world size, schedule, predicted bubble, ...).
        reason: Why it starts, a few words: ``first start``, ``worker 3 died``.
        source: Where the state of that step is read.
    """

    attempt: int
    step: int
    grid: Mapping[str, int]
    plan: Mapping[str, Scalar] = field(default_factory=dict)
    reason: str
    source: StateSource = "store"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersStarted:
    """Every worker of the attempt is alive; both mappings are by rank."""

    attempt: int
    pids: Mapping[int, int]
    nodes: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesPassed:
    """The nodes that are new to this driver were checked before their workers train.

    ``seconds`` is how long it took, beside the workers' start; ``detail`` what was looked at.
    """

    attempt: int
    seconds: float
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFinished:
    """``step`` optimizer steps are complete. After a restart the same step may come again.

    A name that is not in tracking.names is an InternalError here, so no sink has to look.
    """

    attempt: int
    step: int
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        check_names(self.metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFinished:
    """Held-out metrics after ``step`` steps; names as in StepFinished."""

    attempt: int
    step: int
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        check_names(self.metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted:
    """The manifest of ``step`` was written: the checkpoint exists.

    ``stall_s`` is how long training stood still, ``save_s`` how long until the commit.
    """

    attempt: int
    step: int
    uri: str
    stall_s: float
    save_s: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFailed:
    """The checkpoint of ``step`` could not be written; training goes on."""

    attempt: int
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveUnderWay:
    """Workers have handed ``written_bytes`` of the checkpoint of ``step`` to the store.

    ``num_bytes`` is all that those workers write which have said so far how large their part is.
    """

    attempt: int
    step: int
    written_bytes: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePassedOver:
    """The save after ``step`` was left out: the one before was still being written."""

    attempt: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureSeen:
    """The attempt is lost; ``rank`` is where it began, -1 when unknown, ``step`` the last done.

    ``is_rollback`` when nothing broke, but the run goes back for numbers that are no good. ``decision``
    is what the driver does about it, ``whereabouts`` by rank where each was last seen.
    """

    attempt: int
    rank: int
    step: int
    cause: str
    is_rollback: bool = False
    decision: str = ""
    whereabouts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class DoubtSeen:
    """The first pass of ``step`` had a loss or a norm that is no good, and the run goes on.

    Attributes:
        attempt: Of the workers.
        step: The step.
        kind: ``nan`` or ``spike``.
        fact: The number, and what it is held against.
        where: The first number that is not finite, when it was looked for.
        action: What became of the step, such as ``used the second pass`` or ``left out``.
    """

    attempt: int
    step: int
    kind: str
    fact: str
    where: str
    action: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """The first new step after a failure is complete.

    Attributes:
        attempt: The attempt that took over.
        rank: Where the failure began; -1 when unknown.
        step: The step just completed.
        restored_step: Step of the state that was loaded.
        lost_steps: Completed steps that had to be done again.
        detection_s: From the last sign of progress to the failure's detection.
        recovery_s: From the detection to this event.
        source: Where that state was read.
        phases: What ``recovery_s`` was spent on, in order; see orchestrate.outage.
    """

    attempt: int
    rank: int
    step: int
    restored_step: int
    lost_steps: int
    detection_s: float
    recovery_s: float
    source: StateSource = "store"
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineReady:
    """What every rank's executor did in one step, on one clock.

    Attributes:
        attempt: Of the workers.
        step: The step.
        events: By rank as in TimelineRecorded.
        simulated_bubble: What the schedule alone costs with the durations of this step's work.
        transfers: The pipeline's messages between ranks, among the events.
    """

    attempt: int
    step: int
    events: Mapping[int, Sequence[WorkEvent]]
    simulated_bubble: float = 0.0
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReady:
    """What each rank measures of itself, memory above all, after ``step``; names as in StepFinished.

    ``work_ratio`` is the largest of worker/work_s over the median of the stage's other ranks; 0 when
    there are none.
    """

    attempt: int
    step: int
    ranks: Mapping[int, Mapping[str, float]]
    work_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_names({name for metrics in self.ranks.values() for name in metrics})


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerSeen:
    """A rank has worked longer than the others of its stage for a while; told once.

    ``work_s`` is its time in a step less its waits, ``ratio`` that over the median of the others.
    """

    attempt: int
    step: int
    rank: int
    node: str
    work_s: float
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSeen:
    """Where the tokens of ``step`` went: by layer, how many chose each expert."""

    attempt: int
    step: int
    tokens: Mapping[int, Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingCollapsed:
    """Hardly any token reaches these ``experts`` of a layer; told once, until it has recovered."""

    attempt: int
    step: int
    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtefactWritten:
    """A small local file about the run exists: a picture, a trace, the job as YAML."""

    path: str
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished:
    """The driver is done with the run; last event, sent once on every way out.

    Attributes:
        status: ``preempted`` is a good stop before the end: the run can be resumed. ``superseded``
            is the end of this driver alone: another one has the run, and its records are that one's.
        step: Completed steps.
        checkpoint_uri: The newest checkpoint; empty when there is none.
        goodput: Share of wall time spent on steps that count.
        wall_s: Seconds since this driver's RunStarted.
        reason: One sentence for people when the status is not ``finished``.
    """

    status: RunStatus
    step: int
    checkpoint_uri: str
    goodput: float
    wall_s: float
    reason: str = ""


RunEvent = (
    RunStarted
    | AttemptStarted
    | WorkersStarted
    | NodesPassed
    | StepFinished
    | EvaluationFinished
    | CheckpointCommitted
    | SaveFailed
    | SaveUnderWay
    | SavePassedOver
    | FailureSeen
    | DoubtSeen
    | Recovered
    | TimelineReady
    | MemoryReady
    | StragglerSeen
    | ExpertsSeen
    | RoutingCollapsed
    | ArtefactWritten
    | RunFinished
)


class Sink(Protocol):
    """A watcher of one run. Built before the first event, closed after the last."""

    def emit(self, event: RunEvent) -> None:
        """Take an event.

        Called by the control loop, from one thread, in order, some ten times a second at most. It
        must return within a millisecond: anything that can block (network, database) happens in
        the sink's own thread. The controller holds a CompositeSink, which never raises.
        """

    def close(self, timeout_s: float) -> None:
        """Flush and let go; called once, after RunFinished. Returns within ``timeout_s``."""
