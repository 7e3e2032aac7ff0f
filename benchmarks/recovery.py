"""How long a run stands still when a worker or a node is killed, part by part, and how that grows with ranks.

Workers are real processes on a real Ray of several nodes on this machine, and faults are SIGKILLs. Detection is
from the kill to the driver's notice; the other parts are those that the driver reports for each recovery.

    python benchmarks/recovery.py [--quick] [--ranks 2 4 8 16] [--kills 3] [--no-node]
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ray.cluster_utils import Cluster

from raymega.config.load import parse_job
from raymega.errors import PreemptedError
from raymega.orchestrate.clock import SystemClock
from raymega.orchestrate.controller import Controller
from raymega.orchestrate.holder import this_process
from raymega.orchestrate.keepers import Keepers
from raymega.orchestrate.lease import Lease, held
from raymega.orchestrate.outage import PHASES
from raymega.orchestrate.worker_group import RayWorkerGroup
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.session import close_session, open_session
from raymega.storage.open import open_store
from raymega.tracking.sink import (
    AttemptStarted,
    FailureSeen,
    Recovered,
    RunEvent,
    StepFinished,
    WorkersStarted,
)

JOB = Path(__file__).parents[1] / "jobs" / "verify.yaml"
CONTROL = ("detect", "abort", "find", "reserve", "rendezvous")
"""What the control plane takes; the rest is the model's."""
HEALTH = {  # a dead node is known after 1.5 s instead of 14
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
NODES = 2
CALM_STEPS = 5
"""Least steps between a recovery and the next kill."""


@dataclass
class Killer:
    """A sink that kills and measures."""

    kills: int
    spares: int
    stop: object = None
    pids: dict[int, int] = field(default_factory=dict)
    killed_s: float = 0.0
    detect_s: float = 0.0
    recovered: list[dict[str, float]] = field(default_factory=list)
    calm: int = 0

    def emit(self, event: RunEvent) -> None:
        match event:
            case AttemptStarted():
                self.calm = 0
            case WorkersStarted():
                self.pids = dict(event.pids)
            case FailureSeen() if not self.detect_s:
                self.detect_s = time.monotonic() - self.killed_s
            case Recovered():
                lost = {
                    "lost_steps": float(event.lost_steps),
                    "total": time.monotonic() - self.killed_s,
                }
                self.recovered.append({"detect": self.detect_s, **event.phases, **lost})
            case StepFinished():
                self._step(num_spares=round(event.metrics["run/spares"]))

    def _step(self, *, num_spares: int) -> None:
        """Kill or stop, when the run has been well for some steps and its spares are loaded."""
        self.calm += 1
        if self.calm < CALM_STEPS or num_spares < self.spares:
            return
        if len(self.recovered) == self.kills:
            self.stop()
            return
        self.calm, self.detect_s = -(10**9), 0.0
        self.killed_s = time.monotonic()
        victims = sorted(self.pids)
        os.kill(self.pids[victims[(len(self.recovered) + 1) % len(victims)]], signal.SIGKILL)

    def close(self, timeout_s: float) -> None:
        """Nothing to flush."""


@dataclass
class NodeKiller:
    """A sink that takes a node away and gives one back."""

    cluster: Cluster
    slots: int
    stop: object = None
    nodes: dict[int, str] = field(default_factory=dict)
    attempt: int = 0
    calm: int = 0
    since_s: dict[str, float] = field(default_factory=dict)

    def emit(self, event: RunEvent) -> None:
        match event:
            case AttemptStarted():
                self.attempt, self.calm = self.attempt + 1, 0
            case WorkersStarted():
                self.nodes = dict(event.nodes)
            case FailureSeen():
                self.since_s.setdefault("detected", time.monotonic())
            case StepFinished():
                self._step()

    def _step(self) -> None:
        self.calm += 1
        if self.calm == 1:
            self.since_s[f"attempt {self.attempt}"] = time.monotonic()
        if self.calm != CALM_STEPS:
            return
        if self.attempt == 1:
            node = next(n for n in self.cluster.list_all_nodes() if n.node_id == self.nodes[0])
            self.since_s["killed"] = time.monotonic()
            self.cluster.remove_node(node, allow_graceful=False)
        elif self.attempt == 2:
            self.cluster.add_node(num_cpus=self.slots)
            self.since_s["returned"] = time.monotonic()
        else:
            self.stop()

    def close(self, timeout_s: float) -> None:
        """Nothing to flush."""

    def show(self, ranks: int) -> None:
        """From the kill and from the return to the first step on the other grid."""
        at = self.since_s
        print(
            f"{ranks} ranks, a node lost: noticed after {at['detected'] - at['killed']:.2f} s, first step on "
            f"{ranks // 2} ranks {at['attempt 2'] - at['detected']:.2f} s later; on {ranks} again "
            f"{at['attempt 3'] - at['returned']:.2f} s after a node came back",
            flush=True,
        )


def plan_for(ranks: int, *, spares: int, name: str, folder: str, extra: list[str]) -> RunPlan:
    """tp2 and pp2 as far as there are ranks, dp for the rest; a snapshot after every step."""
    tp, pp = min(2, ranks), 2 if ranks >= 4 else 1
    settings = [
        f"run.name={name}", "run.steps=1000000", "run.eval_samples=0", "checkpoint.every=0",
        "optimizer.lr_warmup_steps=0", "optimizer.lr_decay_steps=100", "tracking.mlflow_uri=off",
        f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.dp={ranks // tp // pp}",
        "data.global_batch_size=32", "cluster.cpus_per_worker=1.0", f"checkpoint.uri={folder}",
        "elastic.snapshot_every=1", f"elastic.spares={spares * tp}", "elastic.max_failures=1000",
        *extra,
    ]  # fmt: skip
    return make_plan(parse_job(JOB, settings).job())


def run(plan: RunPlan, folder: str, killer: Killer | NodeKiller) -> None:
    """One driver, until the killer has had its kills."""
    clock, store = SystemClock(), open_store(f"{folder}/{plan.job.run.name}")
    duration_s = plan.job.elastic.lease_s
    lease = Lease(store, holder=this_process(), duration_s=duration_s, clock=clock)
    with held(lease), ThreadPoolExecutor(1) as executor:
        controller = Controller(
            plan,
            lease=lease,
            group=RayWorkerGroup(
                plan, log_dir=Path(folder), can_grow=True, keepers=Keepers(plan, clock=clock)
            ),
            sink=killer, clock=clock, executor=executor,
        )  # fmt: skip
        killer.stop = controller.request_stop
        with suppress(PreemptedError):
            controller.run()


def show(name: str, rows: list[dict[str, float]]) -> None:
    """Medians of each part, and of what they add up to."""
    parts = ("detect", *PHASES)
    middle = {part: statistics.median(row[part] for row in rows) for part in (*parts, "total")}
    control = statistics.median(sum(row[part] for part in CONTROL) for row in rows)
    worst = max(row["total"] for row in rows)
    lost = max(row["lost_steps"] for row in rows)
    cells = " ".join(f"{part} {middle[part]:.2f}" for part in parts)
    print(
        f"{name}: {middle['total']:.2f} s (worst of {len(rows)}: {worst:.2f}), control {control:.2f}; "
        f"{cells}; steps lost {lost:.0f} at most",
        flush=True,
    )


def lose_spare_room(cluster: Cluster) -> None:
    """Two nodes of four slots each are left."""
    old = [node for node in cluster.list_all_nodes() if not node.head]
    for _ in range(2):
        cluster.add_node(num_cpus=4)
    for node in old:
        cluster.remove_node(node, allow_graceful=True)
    cluster.wait_for_nodes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--no-node", action="store_true", help="leave out the loss of a node")
    parser.add_argument("--quick", action="store_true", help="2 ranks, one kill each")
    parser.add_argument("--set", action="append", default=[], help="a field of the job")
    parser.add_argument("--spares", type=int, nargs="+", default=[1, 0])
    options = parser.parse_args()
    ranks, kills = ([2], 1) if options.quick else (options.ranks, options.kills)
    logging.basicConfig(level=logging.ERROR)
    slots = (max(ranks) + 2 + NODES - 1) // NODES
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": HEALTH}
    )
    try:
        for _ in range(NODES):
            cluster.add_node(num_cpus=slots + slots % 2)
        cluster.wait_for_nodes()
        open_session(cluster.address)
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {NODES} Ray nodes")
        with tempfile.TemporaryDirectory() as folder:
            for number in ranks:
                for spares in options.spares:
                    name = f"{number} ranks, {'a warm spare' if spares else 'no spare'}"
                    plan = plan_for(
                        number, spares=spares, name=f"r{number}s{spares}", folder=folder,
                        extra=options.set,
                    )  # fmt: skip
                    killer = Killer(kills=kills, spares=plan.job.elastic.spares)
                    run(plan, folder, killer)
                    show(name, killer.recovered)
            if not options.no_node:
                plan = plan_for(8, spares=0, name="node", folder=folder, extra=options.set)
                node_killer = NodeKiller(cluster=cluster, slots=4)
                lose_spare_room(cluster)
                run(plan, folder, node_killer)
                node_killer.show(8)
        close_session()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
