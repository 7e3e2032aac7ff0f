"""The worker group and its snapshots as the controller sees them: verbs and their timing, no Ray.

worker_group implements it on Ray; the tests' fake implements it on lists.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raymega.checkpoint.snapshots.snapshot import Snapshot
from raymega.errors import Fault
from raymega.messages import Replicas, Report, Requests, StartWorker
from raymega.orchestrate.core.rank_placement import AssignedRank, WorkerLocation
from raymega.orchestrate.core.worker_status import WorkerStatus
from raymega.plan.run_plan import RunPlan


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
