"""The worker group and its snapshots as the controller sees them: verbs, their timing, and signs of life.

ray_worker_group and ray_train implement it on Ray, the tests' fake on lists; here is no Ray. What follows
from a sign is hang_detector's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raymega.checkpoint.snapshots.snapshot import Snapshot
from raymega.errors import Fault
from raymega.messages import Replicas, Report, Requests, StartWorker
from raymega.orchestrate.core.rank_placement import AssignedRank, WorkerLocation
from raymega.plan.run_plan import RunPlan

ANSWER_EVERY_S = 1.0
"""A worker's process that has nothing to report answers so often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """A worker's process has met a call. It says nothing of its training."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadStatus:
    """Where a rank's training thread stands, which a worker is asked for when progress lacks.

    Attributes:
        rank: Of the worker.
        step: Completed steps.
        doing: Instruction of the schedule; empty between passes.
        waits_for: Collective or transfer that it waits for; empty for none.
        is_patient: It waits for a store, a disk or a compiler, which may take longer than a step.
        state: The kernel's letter for the thread, ``R`` while it runs; empty where nobody says so.
        cpu_s: CPU that the thread has had.
        stack: Its innermost calls, the last one innermost.
    """

    rank: int
    step: int
    doing: str
    waits_for: str
    is_patient: bool
    state: str
    cpu_s: float
    stack: tuple[str, ...]

    def __str__(self) -> str:
        location = self.waits_for or " of ".join(self.stack[:-4:-1]) or "nowhere"
        verb = "waits for" if self.waits_for else "is in"
        doing = f" at {self.doing}" if self.doing else ""
        return f"after step {self.step}{doing} it {verb} {location}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStatus:
    """A neighbour on the node has looked at the process of a rank that does not answer.

    ``state`` is the kernel's letter, ``T`` of one that is stopped; empty when there is none.
    """

    rank: int
    state: str


WorkerStatus = Heartbeat | ThreadStatus | ProcessStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSpec:
    """What the workers of one attempt shall do; see StartWorker and Replicas for the fields."""

    plan_json: str
    run_uri: str
    attempt: int
    restore: str
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skipped_samples: tuple[tuple[int, int], ...] = ()

    def start_message(
        self, assigned: AssignedRank, *, rendezvous: str, device: str, replicas: Replicas
    ) -> StartWorker:
        """Return what the worker with this rank is told."""
        return StartWorker(
            plan_json=self.plan_json,
            run_uri=self.run_uri,
            attempt=self.attempt,
            rank=assigned.rank,
            local_rank=assigned.local_rank,
            rendezvous=rendezvous,
            restore=self.restore,
            device=device,
            replicas=replicas,
            skipped_samples=self.skipped_samples,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDrain:
    """Nodes that host ranks will be taken away.

    Attributes:
        seconds: Until the first of them is.
        ranks: Who must leave.
        is_ready: There are processes that could take these ranks at once.
    """

    seconds: float
    ranks: tuple[int, ...]
    is_ready: bool

    def is_due(self, margin_s: float) -> bool:
        """It is time to go: somebody is ready, or no more than the margin is left."""
        return self.is_ready or self.seconds <= margin_s

    @property
    def reason(self) -> str:
        """A few words."""
        who = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        ready = "others are ready" if self.is_ready else "nobody is ready in their place"
        return f"the nodes of ranks {who} leave in {self.seconds:.0f} s, and {ready}"


class SnapshotManager(Protocol):
    """The run's state in the memory of its nodes, as the controller sees it; called from one thread."""

    def find(self, *, skip: Collection[str]) -> Snapshot | None:
        """The newest whole snapshot whose manifest's key is not in ``skip``; blocks for seconds."""

    def settle(self) -> None:
        """The present attempt has a whole snapshot: nodes that it left may forget. Never blocks."""


class NoSnapshots:
    """Snapshots of a run that takes none."""

    def find(self, *, skip: Collection[str]) -> Snapshot | None:  # noqa: ARG002
        """See SnapshotManager."""
        return None

    def settle(self) -> None:
        """See SnapshotManager."""


class WorkerGroup(Protocol):
    """The workers of a run, one attempt after the other; called from one thread."""

    @property
    def snapshot_manager(self) -> SnapshotManager:
        """What their nodes keep in memory, from one attempt to the next."""

    def use(self, plan: RunPlan) -> None:
        """The next attempt has the grid of ``plan``, another cut of the same job. Never blocks."""

    def ready(self) -> Sequence[WorkerLocation]:
        """Processes that could train now, with a rank or without one. Never blocks."""

    def is_loading(self) -> bool:
        """More processes will soon be ready, on nodes that are there already. Never blocks."""

    def drain(self) -> NodeDrain | None:
        """Whether ranks must leave their nodes; asks for slots in their place. Never blocks."""

    def reserve(self, timeout_s: float) -> Fault | None:
        """Ask for the slots, or look again: None when an attempt can start, else what is lacking.

        That is when the grid's slots are held, or when processes that are ready suffice without those
        that were lost. Blocks at most ``timeout_s``; called until it is None. Slots that are held are
        kept.

        Raises:
            CapacityError: The cluster has no room, and no node can join it.
            ConfigError: The nodes have no memory for the job's snapshots.
        """

    def start(self, spec: AttemptSpec) -> None:
        """Begin an attempt on the reserved slots. Never blocks: what happens shows in poll."""

    def members(self) -> Mapping[int, WorkerLocation]:
        """Where each rank lives; empty until all workers have said so. Never blocks."""

    def poll(self, timeout_s: float) -> list[Report | WorkerStatus]:
        """Reports in order of arrival; returns with the first, or empty after ``timeout_s``.

        A process that is gone is reported as WorkerDied, once. One that lives gives a sign each second
        or two.

        Raises:
            ConfigError: A node that hosts workers cannot take part; none of them has trained.
        """

    def request(self, requests: Requests) -> None:
        """Tell every worker what to do at its next step boundary. Never blocks."""

    def probe(self, silent: Collection[int]) -> None:
        """Ask ranks where they stand, and of ``silent`` ones how their process is; what is found shows
        in poll. Never blocks."""

    def release(self, *, keep_warm: bool) -> None:
        """End the attempt, if there is one; blocks for some seconds at most.

        With ``keep_warm`` the slots are kept, and so are processes that let go of their work;
        without it nothing is left, snapshots included.
        """
