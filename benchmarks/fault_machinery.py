"""Cost of fault tolerance in a run without failures: steps with it against steps of the same processes without.

A real driver on a real Ray of two nodes watches two gloo ranks, a core each. A pair is a block of ordinary steps (reports, requests
of the driver, progress, heartbeats, and in the second part a snapshot in memory after each step), and a block of as many
steps without reports and snapshots. The driver's CPU seconds are shown too: on a cluster it has cores of its own, here it
shares those of the ranks.

    python -m benchmarks.fault_machinery [--quick] [--parts off on] [--tokens 8192]
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.measure import Sample, report
from benchmarks.snapshots import MODEL, SMALL
from raymega.chaos.sandbox import sandbox
from raymega.config.load import parse_mapping
from raymega.events import RunEvent, StepFinished
from raymega.messages import Channel, Progress, RankMemory, Report, Requests, StartWorker, Working
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.driver.controller import Controller
from raymega.orchestrate.driver.run_context import RunContext
from raymega.orchestrate.run_store.lease import Lease, hold_lease
from raymega.orchestrate.run_store.lease_holder import this_process
from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup
from raymega.orchestrate.workers.snapshot_holders import SnapshotServers
from raymega.plan.run_plan import RunPlan, make_plan, read_plan
from raymega.session import close_session, open_session
from raymega.storage.registry import open_store
from raymega.train import entry
from raymega.train.save_schedule import SaveScheduler
from raymega.train.step import StepOutcome

RANKS = 2
WARMUP = 1
"""Pairs that do not count."""
OF_A_STEP = (StepFinished, Progress, Working, RankMemory)
TIMES = "pairs.json"

host_rendezvous, abort, warm_up = entry.host_rendezvous, entry.abort, entry.warm_up


def run_worker(start: StartWorker, channel: Channel, rendezvous: object) -> None:
    """Run the training entry with a channel that passes reports in every second block of steps only."""
    steps = read_plan(
        start.plan_json
    ).job.run.eval_every  # how long a block is; nothing is evaluated
    # the worker's process is this benchmark's alone: replace what saves
    entry.SaveScheduler = QuietSaving
    switch = Switch(channel, steps=steps)
    entry.run_worker(start, switch, rendezvous)
    if start.rank == 0:
        (Path(start.run_uri) / TIMES).write_text(json.dumps(switch.blocks))


class Switch:
    """Channel that forwards reports in every second block of steps only, and times each block."""

    def __init__(self, channel: Channel, *, steps: int) -> None:
        self._channel, self._steps, self._num = channel, steps, 0
        self.is_on, self._since = True, None
        self.blocks: list[list[float]] = []
        self.settle: Callable[[], None] = lambda: None

    def report(self, report: Report) -> None:
        """See Channel."""
        if self.is_on or not isinstance(report, OF_A_STEP):
            self._channel.report(report)

    def requests(self) -> Requests:
        """Return the driver's requests; the training loop calls this at the start of each step."""
        if self._num % self._steps == 0:
            self._next_block()
        self._num += 1
        return self._channel.requests() if self.is_on else Requests()

    def _next_block(self) -> None:
        now = time.perf_counter(), time.process_time()
        if self._since is not None:
            # the block that ends here, by both clocks
            wall_s, cpu_s = (b - a for a, b in zip(self._since, now, strict=True))
            self.blocks.append([self.is_on, wall_s, cpu_s])
        self.settle()  # the end of a block's last snapshot belongs to neither block
        number = len(self.blocks)
        self.is_on = (number % 2 == 0) != (
            number // 2 % 2 == 1
        )  # the order within a pair alternates
        self._since = time.perf_counter(), time.process_time()


class QuietSaving(SaveScheduler):
    """SaveScheduler that takes no snapshot while the switch is off."""

    _channel: Switch

    def save_what_is_due(self, outcome: StepOutcome, *, is_last: bool) -> None:
        """See SaveScheduler."""
        if self._snapshots:
            self._channel.settle = self._snapshots.wait
        if self._channel.is_on or is_last:
            super().save_what_is_due(outcome, is_last=is_last)


class Meter:
    """A sink that knows what the driver's process takes."""

    def __init__(self) -> None:
        self.steps, self.cpu_s = 0, 0.0
        self._first_s: float | None = None

    def emit(self, event: RunEvent) -> None:
        """See Sink."""
        if isinstance(event, StepFinished):
            now_s = time.process_time()
            # count from the first step on: start-up is not the machinery's steady cost
            self._first_s = now_s if self._first_s is None else self._first_s
            self.steps, self.cpu_s = event.step, now_s - self._first_s

    def close(self, timeout_s: float) -> None:
        """Nothing to flush."""


def plan_for(options: argparse.Namespace, folder: str, *, snapshot_every: int) -> RunPlan:
    """dp=2; ``tokens`` of a step on each rank."""
    steps = options.steps * 2 * (options.rounds + WARMUP) + 1
    return make_plan(
        parse_mapping(
            {
                "run": {
                    "name": f"every{snapshot_every}", "steps": steps, "eval_samples": 0,
                    "eval_every": options.steps,
                },
                "model": {"max_positions": 256, **(SMALL if options.quick else MODEL)},
                "data": {
                    "path": "synthetic", "seq_len": 256,
                    "global_batch_size": RANKS * options.tokens // 256,
                },
                "parallel": {"dp": RANKS},
                "schedule": {"micro_batch_size": 4},
                "optimizer": {"lr": 1e-4, "lr_schedule": "constant"},
                "precision": {"dtype": "float32"},
                "checkpoint": {"every": 0, "uri": folder},
                "elastic": {"snapshot_every": snapshot_every},
                "tracking": {"mlflow_uri": "off"},
                "cluster": {"device": "cpu", "cpus_per_worker": 1.0},
            }
        ).job()
    )  # fmt: skip


def measure(plan: RunPlan, folder: str) -> tuple[list[tuple[Sample, Sample]], Meter]:
    """Pairs without and with, and the driver's meter."""
    clock, meter = SystemClock(), Meter()
    store = open_store(f"{folder}/{plan.job.run.name}")
    lease = Lease(store, holder=this_process(), duration_s=30.0, clock=clock)
    with hold_lease(lease), ThreadPoolExecutor(1) as executor:
        group = RayWorkerGroup(
            plan, log_dir=Path(folder), can_grow=True, entry="benchmarks.fault_machinery",
            snapshot_servers=SnapshotServers(plan, clock=clock) if plan.job.elastic.snapshot_every else None,
        )  # fmt: skip
        Controller(
            RunContext(plan, lease=lease, group=group, sink=meter, clock=clock, executor=executor)
        ).run()
    blocks = json.loads((Path(folder) / plan.job.run.name / TIMES).read_text())
    # two blocks make a pair; sorting puts the one without reports first
    halves = [blocks[at : at + 2] for at in range(2 * WARMUP, len(blocks) - 1, 2)]
    return [tuple(Sample(wall_s=w, cpu_s=c) for _, w, c in sorted(half)) for half in halves], meter


def show(plan: RunPlan, pairs: list[tuple[Sample, Sample]], meter: Meter) -> None:
    """The figures of one part."""
    steps = plan.job.run.eval_every
    every = plan.job.elastic.snapshot_every
    # seconds of a step without the machinery, for scale
    wall_s = sorted(off.wall_s / steps for off, _ in pairs)
    row = report(
        f"steps without, theirs with (snapshot every {every})", pairs,
        step_s=wall_s[len(wall_s) // 2], driver_ms_per_step=1e3 * meter.cpu_s / max(1, meter.steps),
    )  # fmt: skip
    for clock in ("wall_s", "cpu_s"):
        ratios = row[clock]
        print(
            f"{clock}: {100 * (ratios['ratio'] - 1):+.2f} % "
            f"[{100 * (ratios['low'] - 1):+.2f}, {100 * (ratios['high'] - 1):+.2f}]",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds")
    parser.add_argument("--parts", nargs="+", choices=("off", "on"), default=("off", "on"))
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3, help="of one side of a pair")
    parser.add_argument("--tokens", type=int, default=0, help="of a step, on each rank")
    options = parser.parse_args()
    options.rounds = options.rounds or (5 if options.quick else 15)
    options.tokens = options.tokens or (2048 if options.quick else 8192)
    logging.basicConfig(level=logging.ERROR)
    with (
        tempfile.TemporaryDirectory() as folder,
        sandbox(num_nodes=RANKS, cpus_per_node=1) as box,
    ):
        open_session(box.address)
        try:
            for part in options.parts:
                plan = plan_for(options, folder, snapshot_every=int(part == "on"))
                show(plan, *measure(plan, folder))
        finally:
            close_session()


if __name__ == "__main__":
    main()
