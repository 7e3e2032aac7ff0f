"""Events of a run: one frozen value for each fact that sinks (console, MLflow, ...) receive.

Workers report some events, the driver makes the others. An event is the same value from its origin to the
last sink. `tracking/` holds the sinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from raymega.schedule.recording import Transfer
from raymega.schedule.timeline import EventTuple

Scalar = str | int | float | bool
RunStatus = Literal["finished", "failed", "preempted", "superseded", "interrupted"]
StateSource = Literal["nothing", "store", "memory", "replicas"]
"""Source of an attempt's state: initial values, a checkpoint, a snapshot in the memory of nodes, or what
the workers themselves hold."""


# start of a driver and of an attempt
@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """A driver took up the run; first event of every driver, sent once.

    Attributes:
        run_id: Id of the run, equal for all its drivers; sinks find their records by it.
        name: Name of the run, ``run.name``.
        uri: URI of the run's folder in the store.
        is_resumed: Whether an earlier driver has worked on this run.
        step: Number of steps that are complete and saved.
        total_steps: Number of steps of the whole run, ``run.steps``.
        job: Job as plain values, ``job.model_dump(mode="json")``.
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
    """Base class of events within an attempt.

    ``attempt`` is the number of the worker group, from 1, increasing over all drivers of the run. The
    driver fills it in.
    """

    json_name: ClassVar[str]
    attempt: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured(AttemptEvent):
    """Measurements after ``step`` completed steps, by the metric names of `tracking/names.py`.

    ``metrics`` are those of all ranks together, ``ranks`` those of single ranks.
    """

    step: int
    metrics: Mapping[str, float]
    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStarted(AttemptEvent):
    """A worker group is about to start.

    Attributes:
        step: Number of completed steps in the restored state.
        grid: Degree of each axis: ``{"tp": 2, "pp": 2, "dp": 2, ...}``.
        plan: Short facts of the plan (world size, schedule, predicted bubble, ...).
        reason: Reason of the start in a few words: ``first start``, ``worker 3 died``.
        source: Source of the restored state.
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
    """Nodes that are new to this driver passed their checks; their workers may train.

    ``seconds`` is the duration of the checks, which overlap with the workers' start; ``detail`` lists the
    checks.
    """

    json_name: ClassVar[str] = "nodes"
    seconds: float
    detail: str


# steps, evaluation and saves
@dataclass(frozen=True, kw_only=True, slots=True)
class StepFinished(Measured):
    """``step`` optimizer steps are complete; rank 0 reports for all. A restart may repeat a step."""

    json_name: ClassVar[str] = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFinished(Measured):
    """Held-out metrics; rank 0 reports for all."""

    json_name: ClassVar[str] = "evaluation"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesDrawn(AttemptEvent):
    """The model after ``step`` steps continued each of ``prompts`` by ``texts``; rank 0 reports for all."""

    json_name: ClassVar[str] = "samples"
    step: int
    prompts: tuple[str, ...]
    texts: tuple[str, ...]

    @property
    def page(self) -> str:
        """Prompts and texts, one below the other."""
        pairs = zip(self.prompts, self.texts, strict=True)
        return "\n".join(f"[{number}] {a}|{b}\n" for number, (a, b) in enumerate(pairs, start=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksEvaluated(Measured):
    """Metrics of evaluation tasks, ``eval/task/TASK/METRIC``, with the weights after ``step``."""

    json_name: ClassVar[str] = "tasks"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted(AttemptEvent):
    """The manifest of ``step`` was written: the checkpoint exists.

    ``stall_s`` is the time for which training was blocked, ``save_s`` the time until the commit.
    """

    json_name: ClassVar[str] = "checkpoint"
    step: int
    uri: str
    stall_s: float
    save_s: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFailed(AttemptEvent):
    """The checkpoint of ``step`` could not be written."""

    json_name: ClassVar[str] = "save_failed"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveProgress(AttemptEvent):
    """Workers have handed ``written_bytes`` of the checkpoint of ``step`` to the store.

    ``num_bytes`` is the total of the workers that have sent a RankSaveProgress so far.
    """

    json_name: ClassVar[str] = "save_progress"
    step: int
    written_bytes: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSkipped(AttemptEvent):
    """The save after ``step`` was skipped, as the previous one was still being written."""

    json_name: ClassVar[str] = "save_skipped"
    step: int


# failures and recovery
@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFailed(AttemptEvent):
    """The attempt failed; ``rank`` is where the failure began (-1: unknown), ``step`` the last done.

    ``is_rollback`` is true when the run rolls back for bad numbers, without a crash. ``decision`` is the
    driver's reaction, ``whereabouts`` the last known activity of each rank.
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
    """The first pass of ``step`` had a bad loss or gradient norm, and the run continues.

    Rank 0 reports for all.

    Attributes:
        step: Number of the step.
        kind: ``nan`` or ``spike``.
        fact: The number and the limit that it breaks.
        where: Place of the first non-finite number, if it was searched; else empty.
        action: Outcome of the step, such as ``used the second pass`` or ``left out``.
    """

    json_name: ClassVar[str] = "bad_step"
    step: int
    kind: str
    fact: str
    where: str = ""
    action: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered(AttemptEvent):
    """The first attempt after a failure has completed its first new step.

    Attributes:
        rank: Rank in which the failure began; -1 when unknown.
        step: Number of the step just completed.
        restored_step: Step of the state that was loaded.
        lost_steps: Number of completed steps that had to be repeated.
        detection_s: Seconds from the last sign of progress to the detection.
        recovery_s: Seconds from the detection to this event.
        source: Source of the restored state.
        phases: Seconds of each phase of the recovery, in order; see `orchestrate/driver/recovery_log.py`.
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


# diagnostics: time line, memory, stragglers, experts
@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline(Measured):
    """Instructions that every rank's executor ran in one step, on one clock.

    ``events`` are those of each RankTimeline, by rank; ``transfers`` the pipeline's messages between them.
    """

    json_name: ClassVar[str] = "timeline"
    events: Mapping[int, Sequence[EventTuple]]
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory(Measured):
    """Measurements of single ranks, memory above all: every RankMemory of the step."""

    json_name: ClassVar[str] = "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerDetected(AttemptEvent):
    """A rank has worked longer than the others of its stage for some time; sent once.

    ``work_s`` is its time in a step less its waits, ``ratio`` that time over the others' median.
    """

    json_name: ClassVar[str] = "straggler"
    step: int
    rank: int
    node: str
    work_s: float
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoads(AttemptEvent):
    """Number of tokens of ``step`` that chose each expert, by layer."""

    json_name: ClassVar[str] = "experts"
    step: int
    tokens: Mapping[int, Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingCollapsed(AttemptEvent):
    """Almost no token reaches these ``experts`` of a layer; sent once until they recover."""

    json_name: ClassVar[str] = "routing_collapsed"
    step: int
    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SparesChanged(AttemptEvent):
    """None of the job's ``wanted`` spares is loaded after ``step``, or all of them are again."""

    json_name: ClassVar[str] = "spares"
    step: int
    ready: int
    wanted: int


# files, and the end of a driver
@dataclass(frozen=True, kw_only=True, slots=True)
class ArtefactWritten:
    """A small local file about the run exists: a picture, a trace, the job as YAML."""

    json_name: ClassVar[str] = "artefact"
    path: str
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished:
    """The driver is done with the run; last event, sent once however the driver ends.

    Attributes:
        status: ``preempted`` is an orderly stop before the end; the run can be resumed. ``superseded``
            ends this driver alone: another driver has taken the run and continues its records.
            ``interrupted`` is an end by a second Ctrl-C, without a save.
        step: Number of completed steps that are saved.
        checkpoint_uri: URI of the newest checkpoint; empty when there is none.
        goodput: Share of wall time spent on steps that count.
        wall_s: Seconds since this driver's RunStarted.
        reason: Sentence for people when the status is not ``finished``.
    """

    json_name: ClassVar[str] = "finished"
    status: RunStatus
    step: int
    checkpoint_uri: str
    goodput: float
    wall_s: float
    reason: str = ""


RunEvent = RunStarted | AttemptEvent | ArtefactWritten | RunFinished
