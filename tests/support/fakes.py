"""Fakes of what the controller works with: a group on lists, a clock by hand, a sink that keeps.

None of them starts a process, touches a disk or waits.
"""

from concurrent.futures import Executor, Future
from datetime import UTC, datetime, timedelta

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.keys import data_file, folder_of
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.snapshots.snapshot import Snapshot
from raymega.events import StepFinished
from raymega.messages import (
    Entered,
    Progress,
    ShardSaved,
    SnapshotHolders,
    WorkerDied,
    WorkerFailed,
    WorkerFinished,
)
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.worker_group_api import NoSnapshots

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class FakeClock:
    """Clock whose time changes only by ``advance``."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s

    def timestamp(self):
        return (BEGIN + timedelta(seconds=self.now_s)).isoformat()

    def advance(self, seconds):
        self.now_s += seconds


class MemorySink:
    """Keeps every event."""

    def __init__(self):
        self.events = []
        self.is_closed = False

    def emit(self, event):
        self.events.append(event)

    def close(self, timeout_s):
        self.is_closed = True

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


class InlineExecutor(Executor):
    """Runs what is submitted at once, in the caller's thread."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class PatientExecutor(InlineExecutor):
    """Holds what is submitted back until :meth:`let_go`, as a slow store does."""

    def __init__(self):
        self._waiting = []

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self._waiting.append((future, fn, args, kwargs))
        return future

    def let_go(self):
        # what is submitted meanwhile waits for the next time
        waiting, self._waiting = self._waiting, []
        for future, fn, args, kwargs in waiting:
            future.set_result(fn(*args, **kwargs))


class FakeWorkerGroup:
    """WorkerGroup whose workers follow a script: each attempt is a list of polls.

    ``script`` holds, for each attempt, the lists of reports that successive polls return. A poll
    beyond the script returns nothing and advances ``clock`` by the whole timeout. ``lacking`` is what
    successive reserves return before the slots are available.
    """

    def __init__(self, clock, store, *, world_size, script, lacking=(), snapshot_manager=None):
        self.snapshot_manager = snapshot_manager or NoSnapshots()
        self.clock, self.store, self.world_size = clock, store, world_size
        self.script = [list(polls) for polls in script]
        self.lacking = list(lacking)
        self.orders, self.requested, self.releases, self.plans = [], [], [], []
        self.locations, self.drains, self.looks = [], [], []
        self.homes, self.held_steps = [], {}
        self.loads = False
        self._polls = []

    @property
    def is_released(self):
        return bool(self.releases) and not self.releases[-1]

    def use(self, plan, homes=None):
        self.plans.append(plan)
        self.homes.append(homes)
        self.world_size = plan.grid.world_size

    def held(self):
        return dict(self.held_steps)

    def ready(self):
        return tuple(self.locations)

    def is_loading(self):
        return self.loads

    def drain(self):
        return self.drains.pop(0) if self.drains else None

    def reserve(self, timeout_s):
        if not self.lacking:
            return None
        self.clock.advance(timeout_s)
        # an exception stands for a reserve that fails
        lack = self.lacking.pop(0)
        if isinstance(lack, Exception):
            raise lack
        return lack

    def start(self, order):
        self.orders.append(order)
        # each attempt has a script of its own
        self._polls = self.script.pop(0) if self.script else []

    def members(self):
        return {
            rank: WorkerLocation(node_id=f"node{rank // 2}", address="10.0.0.1", pid=1000 + rank)
            for rank in range(self.world_size if self.orders else 0)
        }

    def poll(self, timeout_s):
        if self._polls:
            reports = list(self._polls.pop(0))
            self.write_files(reports)
            return reports
        self.clock.advance(timeout_s)
        return []

    def request(self, requests):
        self.requested.append(requests)

    def probe(self, silent):
        self.looks.append(silent)

    def release(self, *, keep_warm):
        self.releases.append(keep_warm)
        self._polls = []

    def write_files(self, reports):
        """A manifest is whole only when its files are there."""
        for report in reports:
            if isinstance(report, ShardSaved) and not report.error:
                key = folder_of(report.step) + report.boxes[0].file
                self.store.put(key, [b"12345678"], overwrite=True)


class FakeKeeping:
    """SnapshotManager on a list of whole snapshots; empty at a driver's first look, as in life."""

    def __init__(self):
        self.snapshots, self.num_settles, self.is_begun = [], 0, False

    def take(self, step, *, attempt=1):
        """A snapshot is whole now; it has no tensors."""
        manifest = Manifest(
            step=step, attempt=attempt, created="", state={"step": step}, job={}, grid={}, boxes=()
        )  # fmt: skip
        self.snapshots.append(
            Snapshot(
                manifest=manifest,
                holders=SnapshotHolders(servers=("snapshot server",), by_rank=((0,),)),
            )
        )

    def find(self, *, skip):
        # snapshots that an earlier driver left are not known at the first look
        is_begun, self.is_begun = self.is_begun, True
        left = [each for each in self.snapshots if is_begun and each.manifest.key not in skip]
        return max(left, key=lambda each: each.id, default=None)

    def settle(self):
        self.num_settles += 1


class FakeWorkers:
    """The reports that real workers of one attempt would send, as polls for a FakeWorkerGroup."""

    def __init__(self, world_size, *, step=0, attempt=1):
        self.ranks, self.step, self.attempt = range(world_size), step, attempt

    def enter(self):
        phases = ("rendezvous", "built", "restored")
        return [[Entered(rank=r, phase=p, seconds=0.1) for p in phases for r in self.ranks]]

    def steps(self, count, *, seconds=1.0):
        return [poll for _ in range(count) for poll in self._one_step(seconds)]

    def save(self, *, errors=()):
        """Every rank's part; ``errors`` are ranks that could not write theirs."""
        return [[self.shard(r, error="disk full" if r in errors else "") for r in self.ranks]]

    def finish(self, *, stopped=False):
        return [[WorkerFinished(rank=r, step=self.step, stopped=stopped) for r in self.ranks]]

    def die(self, rank):
        return [[WorkerDied(rank=rank, cause="SIGKILL")]]

    def fail(self, rank, error="ValueError", *, is_secondary=False, exit_code=1, message=""):
        return [
            [
                WorkerFailed(
                    rank=rank,
                    step=self.step,
                    error=error,
                    message=message or f"{error} happened",
                    traceback="Traceback ...",
                    is_secondary=is_secondary,
                    exit_code=exit_code,
                )
            ]
        ]

    def shard(self, rank, *, error=""):
        box = SavedBox(
            tensor="model/weight",
            dtype="float64",
            global_shape=(len(self.ranks),),
            box=Box(offset=(rank,), shape=(1,)),
            file=data_file(attempt=self.attempt, rank=rank),
            start=0,
            num_bytes=8,
            crc32=0,
        )
        return ShardSaved(
            rank=rank,
            step=self.step,
            boxes=() if error else (box,),
            state={"step": self.step, "samples": 0, "tokens": 0},
            stall_s=0.5,
            write_s=1.0,
            num_bytes=8,
            error=error,
        )

    def _one_step(self, seconds):
        self.step += 1
        metrics = {"train/loss": 1.0, "train/step_time_s": seconds}
        # rank 0 tells of the step, the others of their progress
        others = [Progress(rank=r, step=self.step) for r in self.ranks if r]
        return [[StepFinished(step=self.step, metrics=metrics), *others]]
