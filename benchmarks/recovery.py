"""Downtime of a run after the loss of a worker or a node, by phase and number of ranks.

Workers are real processes on a real Ray of several nodes on this machine, and faults are SIGKILLs and SIGSTOPs.
Detection is from the fault to the driver's notice; the other parts are those that the driver reports for each recovery.
Where a node is lost, and in waiting-kill, ranks wait for each micro-batch in place of an accelerator (waiting_entry.py, a
mock), so that the cores have time for the control plane, as those of hosts with accelerators have.
Ray Train's TorchTrainer with a FailureConfig trains the same model and meets the same kill (recovery_ray_train.py).

    python -m benchmarks.recovery [--quick] [--parts kill replica waiting-kill stop node frozen-node ray-train] [--ranks 2 4 8 16] [--kills 3]
        [--corpus s3]
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.corpus_on_s3 import corpus_on_s3
from benchmarks.recovery_ray_train import kills_under_ray_train
from raymega.chaos.sandbox import Sandbox, sandbox
from raymega.config.load import parse_job
from raymega.data.samples import known_datasets
from raymega.errors import PreemptedError
from raymega.events import (
    AttemptFailed,
    AttemptStarted,
    Recovered,
    RunEvent,
    StepFinished,
    WorkersStarted,
)
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.driver.controller import Controller
from raymega.orchestrate.driver.hang_detector import NUM_STEPS
from raymega.orchestrate.driver.recovery_log import PHASES
from raymega.orchestrate.driver.run_context import RunContext
from raymega.orchestrate.run_store.lease import Lease, hold_lease
from raymega.orchestrate.run_store.lease_holder import this_process
from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup
from raymega.orchestrate.workers.snapshot_holders import SnapshotServers
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.session import close_session, open_session
from raymega.storage.registry import open_store

JOB = Path(__file__).parents[1] / "jobs" / "verify.yaml"
CONTROL = ("detect", "abort", "find", "reserve", "rendezvous")
"""Phases of a recovery that the control plane takes; the rest are the model's."""
NODES = 2
CALM_STEPS = 5
"""Least steps between a recovery and the next fault."""
PARTS = ("kill", "replica", "waiting-kill", "stop", "node", "frozen-node", "ray-train")
ENTRY, WAITING_ENTRY = "raymega.train.entry", "benchmarks.waiting_entry"
GRIDS = {"dp2": (1, 1, 2), "dp4": (1, 1, 4), "tp2 pp2 dp2": (2, 2, 2)}
"""Degrees of tensor, pipeline and data parallelism of runs that lose a replica."""
FEW_SAMPLES = "data.global_batch_size=8"
"""Setting of runs in which each micro-batch waits as for an accelerator."""


@dataclass
class Killer:
    """A sink that sends signals to workers and measures."""

    kills: int
    spares: int
    ranks: int = 0
    number: int = signal.SIGKILL
    stop: object = None
    pids: dict[int, int] = field(default_factory=dict)
    killed_s: float = 0.0
    detect_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    recovered: list[dict[str, float]] = field(default_factory=list)
    calm: int = 0

    def emit(self, event: RunEvent) -> None:
        match event:
            case AttemptStarted():
                self.calm = 0
            case WorkersStarted():
                self.pids = dict(event.pids)
            # the first notice counts; other ranks fail after it
            case AttemptFailed() if not self.detect_s:
                self.detect_s = time.monotonic() - self.killed_s
            case Recovered():
                lost = {
                    "lost_steps": float(event.lost_steps),
                    "total": time.monotonic() - self.killed_s,
                    # the bar for a stopped process: three steps and two seconds
                    "limit": 3 * statistics.median(self.steps_s[-NUM_STEPS:]) + 2,
                }
                self.recovered.append({"detect": self.detect_s, **event.phases, **lost})
            case StepFinished():
                # steps under way between the signal and its notice are not ordinary steps
                if self.calm >= 0:
                    self.steps_s.append(event.metrics["train/step_time_s"])
                self._step(num_spares=round(event.metrics["run/spares"]))

    def _step(self, *, num_spares: int) -> None:
        """Kill or stop, when the run has been well for some steps and its spares are loaded."""
        self.calm += 1
        is_small = len(self.pids) < self.ranks  # a lost replica has not joined again yet
        if self.calm < CALM_STEPS or num_spares < self.spares or is_small:
            return
        # all faults are injected, and the run is well again: stop it
        if len(self.recovered) == self.kills:
            self.stop()
            return
        # no other fault until an attempt starts, which sets calm to 0
        self.calm, self.detect_s = -(10**9), 0.0
        self.killed_s = time.monotonic()
        # victims in turn, beginning with rank 1: rank 0 is not the only case
        victims = sorted(self.pids)
        os.kill(self.pids[victims[(len(self.recovered) + 1) % len(victims)]], self.number)

    def close(self, timeout_s: float) -> None:
        """Nothing to flush."""


@dataclass
class NodeKiller:
    """A sink that takes a node away and gives one back."""

    box: Sandbox
    is_frozen: bool
    stop: object = None
    nodes: dict[int, str] = field(default_factory=dict)
    calm: int = 0
    since_s: dict[str, float] = field(default_factory=dict)

    def emit(self, event: RunEvent) -> None:
        match event:
            case AttemptStarted():
                self.calm = 0
            case WorkersStarted():
                self.nodes = dict(event.nodes)
            case AttemptFailed() if "lost" in self.since_s:
                self.since_s.setdefault("detected", time.monotonic())
            case StepFinished():
                self._step()

    def _step(self) -> None:
        self.calm += 1
        number = len(self.nodes)
        # first step of a grid of this size
        if self.calm == 1:
            self.since_s[f"{number} ranks"] = time.monotonic()
        if self.calm != CALM_STEPS:
            return
        # three stages: take a node, give one back, stop on the full grid
        if "lost" not in self.since_s:
            self.since_s["lost"] = time.monotonic()
            (self.box.freeze if self.is_frozen else self.box.kill)(self.nodes[0])
        elif "returned" not in self.since_s:
            self.box.fill(NODES)
            self.since_s["returned"] = time.monotonic()
        else:
            self.stop()

    def close(self, timeout_s: float) -> None:
        """Nothing to flush."""

    def show(self, ranks: int) -> None:
        """Print the times from the loss of the node, and from its return, to the first step on the new grid."""
        at, how = self.since_s, "frozen" if self.is_frozen else "killed"
        print(
            f"{ranks} ranks, a node {how}: noticed after {at['detected'] - at['lost']:.2f} s, first step on "
            f"{ranks // 2} ranks {at[f'{ranks // 2} ranks'] - at['detected']:.2f} s later; on {ranks} again "
            f"{at[f'{ranks} ranks'] - at['returned']:.2f} s after a node came back",
            flush=True,
        )


def plan_for(ranks: int, *, spares: int, name: str, folder: str, extra: list[str]) -> RunPlan:
    """Return a plan with tp2 and pp2 as far as there are ranks, dp for the rest, and a snapshot after every step."""
    tp, pp = min(2, ranks), 2 if ranks >= 4 else 1
    settings = [
        f"run.name={name}", "run.steps=1000000", "run.eval_samples=0", "checkpoint.every=0",
        "optimizer.lr_warmup_steps=0", "optimizer.lr_decay_steps=100", "tracking.mlflow_uri=off",
        f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.dp={ranks // tp // pp}",
        "data.global_batch_size=32", "cluster.cpus_per_worker=1.0", f"checkpoint.uri={folder}",
        "elastic.snapshot_every=1", f"elastic.spares={spares * tp}", "elastic.max_failures=1000",
        *extra,
    ]  # fmt: skip
    plan = make_plan(parse_job(JOB, settings).job())
    return replace(plan, datasets=known_datasets(plan.job))


def run(plan: RunPlan, folder: str, killer: Killer | NodeKiller, entry: str = ENTRY) -> None:
    """Run one driver until the killer has injected all its faults."""
    clock, store = SystemClock(), open_store(f"{folder}/{plan.job.run.name}")
    duration_s = plan.job.elastic.lease_s
    lease = Lease(store, holder=this_process(), duration_s=duration_s, clock=clock)
    with hold_lease(lease), ThreadPoolExecutor(1) as executor:
        controller = Controller(RunContext(
            plan,
            lease=lease,
            group=RayWorkerGroup(
                plan, log_dir=Path(folder), can_grow=True, snapshot_servers=SnapshotServers(plan, clock=clock), entry=entry
            ),
            sink=killer, clock=clock, executor=executor,
        ))  # fmt: skip
        killer.stop = controller.request_stop
        # a stop on request ends a run as a preemption does
        with suppress(PreemptedError):
            controller.run()


def show(name: str, rows: list[dict[str, float]]) -> float:
    """Print the median of each phase, and return the median total in seconds."""
    parts = ("detect", *PHASES)
    middle = {part: statistics.median(row[part] for row in rows) for part in (*parts, "total")}
    # a median of sums: medians of phases need not add up
    control = statistics.median(sum(row[part] for part in CONTROL) for row in rows)
    worst = max(row["total"] for row in rows)
    lost = max(row["lost_steps"] for row in rows)
    cells = " ".join(f"{part} {middle[part]:.2f}" for part in parts)
    print(
        f"{name}: {middle['total']:.2f} s (worst of {len(rows)}: {worst:.2f}), control {control:.2f}; "
        f"{cells}; steps lost {lost:.0f} at most; load {os.getloadavg()[0]:.0f}",
        flush=True,
    )
    return middle["total"]


def show_stops(ranks: int, rows: list[dict[str, float]]) -> None:
    """Print the detection time of each stopped process beside its limit."""
    found = ", ".join(f"{row['detect']:.2f} s (bar {row['limit']:.2f})" for row in rows)
    print(
        f"{ranks} ranks, one stopped: found after {found}; load {os.getloadavg()[0]:.0f}",
        flush=True,
    )


@dataclass
class Bench:
    """Benchmark with one cluster after the other, and one folder for all runs."""

    folder: str
    kills: int
    extra: list[str]

    @contextmanager
    def cluster(self, slots: int):
        """NODES nodes with ``slots`` each, and this process connected to them."""
        with sandbox(num_nodes=NODES, cpus_per_node=slots) as box:
            open_session(box.address)
            try:
                yield box
            finally:
                close_session()

    def faults(
        self,
        ranks: int,
        *,
        spares: int,
        name: str,
        number: int = signal.SIGKILL,
        entry: str = ENTRY,
    ):
        """Return the recoveries that the driver reported after ``kills`` signals."""
        plan = plan_for(ranks, spares=spares, name=name, folder=self.folder, extra=self.extra)
        killer = Killer(kills=self.kills, spares=plan.job.elastic.spares, number=number)
        run(plan, self.folder, killer, entry)
        return killer.recovered

    def kill(self, ranks: list[int], spares: list[int], *, entry: str = ENTRY) -> None:
        slots = (max(ranks) + 2 * max(spares) + NODES - 1) // NODES
        with self.cluster(slots + slots % 2):
            for number in ranks:
                for each in spares:
                    name = f"{number} ranks, {'a warm spare' if each else 'no spare'}"
                    if entry == WAITING_ENTRY:
                        name += ", that wait"
                    rows = self.faults(number, spares=each, name=f"r{number}s{each}", entry=entry)
                    show(name, rows)

    def replica(self) -> None:
        """Kill a rank of several replicas that hold the same state; no snapshots and no spares."""
        for name, (tp, pp, dp) in GRIDS.items():
            ranks = tp * pp * dp
            extra = [
                f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.dp={dp}",
                "elastic.snapshot_every=0", "elastic.on_replica_loss=continue",
                "elastic.scale_up_horizon_s=1e6", *self.extra,
            ]  # fmt: skip
            plan = plan_for(
                ranks, spares=0, name=name.replace(" ", ""), folder=self.folder, extra=extra
            )
            killer = Killer(kills=self.kills, spares=0, ranks=ranks)
            with self.cluster(ranks):
                run(plan, self.folder, killer)
            show(f"{name}, a replica lost", killer.recovered)

    def stop(self, ranks: int) -> None:
        with self.cluster(ranks):
            show_stops(ranks, self.faults(ranks, spares=1, name="stopped", number=signal.SIGSTOP))

    def node(self, ranks: int, *, is_frozen: bool) -> None:
        with self.cluster(ranks // NODES) as box:
            name = "frozen" if is_frozen else "lost"
            # few samples, as every micro-batch waits for a mock accelerator
            extra = [FEW_SAMPLES, *self.extra]
            plan = plan_for(ranks, spares=0, name=name, folder=self.folder, extra=extra)
            killer = NodeKiller(box=box, is_frozen=is_frozen)
            run(plan, self.folder, killer, WAITING_ENTRY)
            killer.show(ranks)

    def ray_train(self, ranks: int, spares: list[int]) -> None:
        """The same ranks of dp, whose state is a checkpoint of every step there and a snapshot here."""
        extra = [*self.extra, "parallel.tp=1", "parallel.pp=1", f"parallel.dp={ranks}"]
        with self.cluster(ranks):
            ours = Bench(self.folder, self.kills, extra)
            seconds = {}
            for each in spares:
                name = "a warm spare" if each else "no spare"
                rows = ours.faults(ranks, spares=each, name=f"t{each}")
                seconds[name] = show(f"{ranks} ranks of dp, {name}", rows)
            plan = plan_for(ranks, spares=0, name="train", folder=self.folder, extra=extra)
            theirs = []
            for value in kills_under_ray_train(plan, self.folder, kills=self.kills):
                print(f"{ranks} ranks of dp, Ray Train: {value:.2f} s", flush=True)
                theirs.append(value)
        for name, value in seconds.items():
            print(f"Ray Train over {name}: {statistics.median(theirs) / value:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="2 ranks, one kill each, no node")
    parser.add_argument("--set", action="append", default=[], help="a field of the job")
    parser.add_argument("--spares", type=int, nargs="*", default=[1, 0])
    parser.add_argument("--corpus", choices=("synthetic", "s3"), default="synthetic")
    options = parser.parse_args()
    ranks, parts = ([2], ("kill",)) if options.quick else (options.ranks, options.parts)
    most = min(8, max(ranks))
    logging.basicConfig(level=logging.ERROR)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {NODES} Ray nodes", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        settings = stack.enter_context(corpus_on_s3()) if options.corpus == "s3" else []
        bench = Bench(folder, 1 if options.quick else options.kills, [*settings, *options.set])
        if "kill" in parts:
            bench.kill(ranks, options.spares)
        if "replica" in parts:
            bench.replica()
        if "waiting-kill" in parts:
            few = Bench(folder, bench.kills, [FEW_SAMPLES, *bench.extra])
            few.kill(ranks, [1], entry=WAITING_ENTRY)
        if "stop" in parts:
            bench.stop(most)
        for part in ("node", "frozen-node"):
            if part in parts:
                bench.node(most, is_frozen=part == "frozen-node")
        if "ray-train" in parts:
            bench.ray_train(most, options.spares)


if __name__ == "__main__":
    main()
