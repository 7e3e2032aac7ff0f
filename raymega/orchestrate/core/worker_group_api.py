"""Interfaces of the worker group and its snapshots, and the signs of life that a worker group reports.

``workers/ray_worker_group.py`` and ``ray_train/worker_group.py`` implement them on Ray, a fake in the tests
on lists; this module does not import Ray. ``driver/hang_detector.py`` interprets the signs of life.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raymega.checkpoint.snapshots.snapshot import Snapshot
from raymega.errors import Fault
from raymega.messages import Replicas, Report, Requests, SnapshotHolders, StartWorker
from raymega.orchestrate.core.rank_placement import AssignedRank, WorkerLocation
from raymega.plan.run_plan import RunPlan

TRAIN_ENTRY = "raymega.train.entry"
"""Name of the module that workers run, unless a test names another."""
ANSWER_EVERY_S = 1.0
"""Interval in which a worker's process with nothing to report answers, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Sign that a worker's process answered a call; it tells nothing about its training thread.

    ``every_s`` is the interval in which such signs come, in seconds.
    """

    rank: int
    every_s: float = ANSWER_EVERY_S


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadStatus:
    """Position of a rank's training thread; the driver asks for it when progress is overdue.

    Attributes:
        rank: Rank of the worker.
        step: Completed steps.
        doing: Instruction of the schedule; empty between passes.
        waits_for: Collective or transfer that it waits for; empty for none.
        is_patient: True while it waits for a store, a disk or a compiler, which may take longer than a step.
        state: State letter of the thread in /proc, ``R`` while it runs; empty where there is no /proc.
        cpu_s: CPU time of the thread in seconds.
        stack: Innermost calls of the thread, the last one innermost.
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
        # what it waits for, else its three innermost calls, the innermost first
        location = self.waits_for or " of ".join(self.stack[:-4:-1]) or "nowhere"
        verb = "waits for" if self.waits_for else "is in"
        doing = f" at {self.doing}" if self.doing else ""
        return f"after step {self.step}{doing} it {verb} {location}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStatus:
    """State of the process of a rank that does not answer, as another process on its node saw it.

    ``state`` is its letter in /proc, ``T`` for a stopped process; empty when the process is gone.
    """

    rank: int
    state: str


WorkerStatus = Heartbeat | ThreadStatus | ProcessStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSpec:
    """Instructions for the workers of one attempt; StartWorker and Replicas document the fields."""

    plan_json: str
    run_uri: str
    attempt: int
    restore: str
    holders: SnapshotHolders = field(default_factory=SnapshotHolders)
    skipped_samples: tuple[tuple[int, int], ...] = ()
    entry_input: bytes = b""
    reported_step: int = -1

    def start_message(
        self,
        assigned: AssignedRank,
        *,
        rendezvous: str,
        device: str,
        replicas: Replicas,
        is_holder: bool = False,
    ) -> StartWorker:
        """Return the message that starts the worker with this rank."""
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
            entry_input=self.entry_input,
            reported_step=self.reported_step,
            is_holder=is_holder,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDrain:
    """Draining of nodes that host ranks.

    Attributes:
        seconds: Time until the first of the nodes is taken away, in seconds.
        ranks: Ranks on these nodes.
        is_ready: True when other processes could take these ranks at once.
    """

    seconds: float
    ranks: tuple[int, ...]
    is_ready: bool

    def is_due(self, margin_s: float) -> bool:
        """Return whether to leave now: replacements are ready, or at most ``margin_s`` seconds are left."""
        return self.is_ready or self.seconds <= margin_s

    @property
    def reason(self) -> str:
        """Ranks, time and readiness of replacements, in a few words."""
        who = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        ready = "others are ready" if self.is_ready else "no substitute is ready"
        return f"the nodes of ranks {who} leave in {self.seconds:.0f} s, and {ready}"


class SnapshotManager(Protocol):
    """Interface of the controller to snapshots in the nodes' memory; called from one thread."""

    def find(self, *, skip: Collection[str]) -> Snapshot | None:
        """Return the newest whole snapshot whose manifest key is not in ``skip``; blocks for seconds."""

    def settle(self) -> None:
        """Free snapshots on nodes that the present attempt left, as it has a whole one. Never blocks."""


class NoSnapshots:
    """Snapshot manager of a run without snapshots."""

    def find(self, *, skip: Collection[str]) -> Snapshot | None:  # noqa: ARG002
        """See SnapshotManager."""
        return None

    def settle(self) -> None:
        """See SnapshotManager."""


class WorkerGroup(Protocol):
    """Interface of the controller to a run's workers over all attempts; called from one thread."""

    @property
    def snapshot_manager(self) -> SnapshotManager:
        """Snapshots in the memory of the workers' nodes, which outlive an attempt."""

    def use(self, plan: RunPlan, homes: Mapping[int, int] | None = None) -> None:
        """Set the plan of the next attempt: the same job, maybe on another grid. Never blocks.

        ``homes`` has the new rank of each rank of the last attempt whose process keeps its part of the
        state; None lets the nodes decide.
        """

    def held(self) -> Mapping[int, int]:
        """Return the step of the state that each rank of the last attempt holds in memory. Never blocks.

        Ranks whose process is gone, or holds none, are missing; so are all before an attempt has ended.
        """

    def ready(self) -> Sequence[WorkerLocation]:
        """Return the processes that could train now, with a rank or without one. Never blocks."""

    def is_loading(self) -> bool:
        """Return whether more processes are starting on nodes that are alive already. Never blocks."""

    def drain(self) -> NodeDrain | None:
        """Return the drain of nodes that host ranks, if any, and ask for other slots. Never blocks."""

    def reserve(self, timeout_s: float) -> Fault | None:
        """Request slots, or poll the request; return None when an attempt can start, else the shortage.

        An attempt can start when the grid's slots are held, or when the ready processes suffice. Call it
        until it returns None; each call blocks at most ``timeout_s`` seconds. Slots once held are kept.

        Raises:
            CapacityError: The cluster has too few slots, and no node can join it.
            ConfigError: The nodes have too little memory for the job's snapshots.
        """

    def start(self, spec: AttemptSpec) -> None:
        """Begin an attempt on the reserved slots. Never blocks: ``poll`` returns what happens."""

    def members(self) -> Mapping[int, WorkerLocation]:
        """Return the location of each rank; empty until all workers have reported theirs. Never blocks."""

    def poll(self, timeout_s: float) -> list[Report | WorkerStatus]:
        """Return reports in order of arrival, when the first arrives; none after ``timeout_s`` seconds.

        A process that is gone is reported as WorkerDied, once. A live one gives a sign of life every second
        or two.

        Raises:
            ConfigError: A node failed its preflight check; no worker has trained yet.
        """

    def request(self, requests: Requests) -> None:
        """Tell every worker what to do at its next step boundary. Never blocks."""

    def probe(self, silent: Collection[int]) -> None:
        """Request the ThreadStatus of all ranks and the ProcessStatus of ``silent`` ones.

        ``poll`` returns the answers. Never blocks.
        """

    def release(self, *, keep_warm: bool) -> None:
        """End the attempt, if there is one; blocks for a few seconds at most.

        With ``keep_warm``, slots are kept, and processes whose training thread ended in time. Without it,
        everything is released, snapshots included.
        """
