"""What a run tells its watchers: one frozen value for each thing that happens.

Workers report some of these themselves, the driver finds the others; both are the same value from
where it arises to the last sink. Where they go is each sink's; when they happen is the driver's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from raymega.schedule.recording import Transfer
from raymega.schedule.timeline import EventTuple

Scalar = str | int | float | bool
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

    json_name: ClassVar[str] = "run"
    run_id: str
    name: str
    uri: str
    is_resumed: bool
    step: int
    total_steps: int
    job: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEvent:
    """What happens within an attempt.

    ``attempt`` is the number of its worker group, from 1 and rising over all drivers of the run; the
    driver writes it in when it tells the sinks.
    """

    json_name: ClassVar[str]
    attempt: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured(AttemptEvent):
    """What was measured after ``step`` steps, by the names of tracking.names.

    ``metrics`` are of all ranks together, ``ranks`` those that each rank has of its own.
    """

    step: int
    metrics: Mapping[str, float]
    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStarted(AttemptEvent):
    """A worker group is about to start.

    Attributes:
        step: Completed steps it starts from.
        grid: Degree of each axis: ``{"tp": 2, "pp": 2, "dp": 2, ...}``.
        plan: Short facts of the plan (world size, schedule, predicted bubble, ...).
        reason: Why it starts, a few words: ``first start``, ``worker 3 died``.
        source: Where the state of that step is read.
    """

    json_name: ClassVar[str] = "attempt"
    step: int
    grid: Mapping[str, int]
    plan: Mapping[str, Scalar] = field(default_factory=dict)
    reason: str
    source: StateSource = "store"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersStarted(AttemptEvent):
    """Every worker of the attempt is alive; both mappings are by rank."""

    json_name: ClassVar[str] = "workers"
    pids: Mapping[int, int]
    nodes: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesChecked(AttemptEvent):
    """The nodes that are new to this driver were checked before their workers train.

    ``seconds`` is how long it took, beside the workers' start; ``detail`` what was looked at.
    """

    json_name: ClassVar[str] = "nodes"
    seconds: float
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFinished(Measured):
    """``step`` optimizer steps are complete; rank 0 reports for all. The same step may come again
    after a restart."""

    json_name: ClassVar[str] = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFinished(Measured):
    """Held-out metrics; rank 0 reports for all."""

    json_name: ClassVar[str] = "evaluation"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted(AttemptEvent):
    """The manifest of ``step`` was written: the checkpoint exists.

    ``stall_s`` is how long training stood still, ``save_s`` how long until the commit.
    """

    json_name: ClassVar[str] = "checkpoint"
    step: int
    uri: str
    stall_s: float
    save_s: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFailed(AttemptEvent):
    """The checkpoint of ``step`` could not be written; training goes on."""

    json_name: ClassVar[str] = "save_failed"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveProgress(AttemptEvent):
    """Workers have handed ``written_bytes`` of the checkpoint of ``step`` to the store.

    ``num_bytes`` is all that those workers write which have sent a RankSaveProgress so far.
    """

    json_name: ClassVar[str] = "save_progress"
    step: int
    written_bytes: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSkipped(AttemptEvent):
    """The save after ``step`` was left out: the one before was still being written."""

    json_name: ClassVar[str] = "save_skipped"
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFailed(AttemptEvent):
    """The attempt is lost; ``rank`` is where it began, -1 when unknown, ``step`` the last done.

    ``is_rollback`` when nothing broke, but the run goes back for numbers that are no good. ``decision``
    is what the driver does about it, ``whereabouts`` by rank where each was last seen.
    """

    json_name: ClassVar[str] = "failure"
    rank: int
    step: int
    cause: str
    is_rollback: bool = False
    decision: str = ""
    whereabouts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class BadStep(AttemptEvent):
    """The first pass of ``step`` had a loss or a norm that is no good, and the run goes on; rank 0
    reports for all.

    Attributes:
        step: The step.
        kind: ``nan`` or ``spike``.
        fact: The number, and what it is held against.
        where: The first number that is not finite, when it was looked for.
        action: What became of the step, such as ``used the second pass`` or ``left out``.
    """

    json_name: ClassVar[str] = "bad_step"
    step: int
    kind: str
    fact: str
    where: str = ""
    action: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered(AttemptEvent):
    """The attempt that took over after a failure has completed the first new step.

    Attributes:
        rank: Where the failure began; -1 when unknown.
        step: The step just completed.
        restored_step: Step of the state that was loaded.
        lost_steps: Completed steps that had to be done again.
        detection_s: From the last sign of progress to the failure's detection.
        recovery_s: From the detection to this event.
        source: Where that state was read.
        phases: What ``recovery_s`` was spent on, in order; see orchestrate.driver.recovery_log.
    """

    json_name: ClassVar[str] = "recovered"
    rank: int
    step: int
    restored_step: int
    lost_steps: int
    detection_s: float
    recovery_s: float
    source: StateSource = "store"
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline(Measured):
    """What every rank's executor did in one step, on one clock.

    ``events`` is each RankTimeline's, by rank; ``transfers`` are the pipeline's messages among them.
    """

    json_name: ClassVar[str] = "timeline"
    events: Mapping[int, Sequence[EventTuple]]
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory(Measured):
    """What each rank measures of itself, memory above all: every RankMemory of the step."""

    json_name: ClassVar[str] = "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerDetected(AttemptEvent):
    """A rank has worked longer than the others of its stage for a while; told once.

    ``work_s`` is its time in a step less its waits, ``ratio`` that over the median of the others.
    """

    json_name: ClassVar[str] = "straggler"
    step: int
    rank: int
    node: str
    work_s: float
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoads(AttemptEvent):
    """Where the tokens of ``step`` went: by layer, how many chose each expert."""

    json_name: ClassVar[str] = "experts"
    step: int
    tokens: Mapping[int, Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingCollapsed(AttemptEvent):
    """Hardly any token reaches these ``experts`` of a layer; told once, until it has recovered."""

    json_name: ClassVar[str] = "routing_collapsed"
    step: int
    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtefactWritten:
    """A small local file about the run exists: a picture, a trace, the job as YAML."""

    json_name: ClassVar[str] = "artefact"
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

    json_name: ClassVar[str] = "finished"
    status: RunStatus
    step: int
    checkpoint_uri: str
    goodput: float
    wall_s: float
    reason: str = ""


RunEvent = RunStarted | AttemptEvent | ArtefactWritten | RunFinished
