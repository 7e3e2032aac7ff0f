"""Cost of in-memory snapshots per step: two gloo ranks on two nodes, with a snapshot each step and without.

A snapshot server is a process of its own, as on a cluster. A pair is some steps with a snapshot after each, and as many
without; CPU seconds are those of ranks and snapshot servers together. Host memory is held against what the planner states.

    python -m benchmarks.snapshots [--quick] [--tokens 4096]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.measure import Sample, report
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.checkpoint.snapshots.writer import SnapshotWriter
from raymega.config.load import parse_mapping
from raymega.messages import Replicas, Requests
from raymega.orchestrate.workers.worker_actor import ReportQueue
from raymega.parallel.comm.process_groups import build_groups
from raymega.parallel.comm.world import open_world
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.plan.snapshot_replicas import snapshot_cost
from raymega.storage.memory_server import MemoryStoreServer, give_memory_back
from raymega.train.build import build_parts
from raymega.train.save_schedule import SaveScheduler
from raymega.train.state import first_state
from raymega.train.step import train_step
from tests.support.memory_store import MemoryStore

RANKS = 2
TOKEN = "benchmark"
CPU = torch.device("cpu")
MODEL = {
    "family": "llama", "num_layers": 4, "hidden_size": 256, "num_heads": 4, "ffn_hidden_size": 704,
    "vocab_size": 4096,
}  # fmt: skip
SMALL = {**MODEL, "num_layers": 2, "hidden_size": 128, "num_heads": 2, "ffn_hidden_size": 352}
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def plan_for(model: dict[str, object], tokens: int, steps: int) -> RunPlan:
    """dp=2; ``tokens`` of a step on each rank."""
    job = parse_mapping(
        {
            "run": {"name": "benchmark", "steps": 10**6, "eval_samples": 0},
            "model": {"max_positions": 256, **model},
            "data": {
                "path": "synthetic", "seq_len": 256, "global_batch_size": RANKS * tokens // 256,
            },
            "parallel": {"dp": RANKS},
            "schedule": {"micro_batch_size": 4},
            "optimizer": {"lr": 1e-4, "lr_schedule": "constant"},
            "precision": {"dtype": "float32"},
            "checkpoint": {"every": 0},
            "elastic": {"snapshot_every": 1},
        }
    ).job()  # fmt: skip
    assert steps > 0
    return make_plan(job)


def keep(addresses) -> None:
    """The process of a snapshot server."""
    give_memory_back()
    server = MemoryStoreServer("127.0.0.1", TOKEN)
    addresses.put((os.getpid(), server.uri))
    server.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    # user and system ticks are fields 14 and 15; a name may hold spaces, so split behind it
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def peak_bytes(pid: int) -> int:
    """Largest resident size of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class Trainer:
    """Training steps of one rank, with or without snapshots."""

    def __init__(self, plan: RunPlan, rank: int, addresses: list[str]) -> None:
        groups = build_groups(plan.grid, rank, timeout_s=120.0)
        self.parts = build_parts(plan, rank=rank, groups=groups, device=CPU)
        self.state = first_state(plan.job.precision)
        # two copies: one in the own node's memory, one in the partner's
        own, partner = addresses[rank], addresses[1 - rank]
        replicas = Replicas(
            token=TOKEN, write_to=(own, partner), num_copies=2, home=own, tidies=(own,)
        )
        self.snapshots = SnapshotWriter(plan, rank=rank, attempt=1, replicas=replicas)
        writer = CheckpointWriter(MemoryStore(), rank=rank, attempt=1, report=print)
        self.save_scheduler = SaveScheduler(
            self.parts, channel=ReportQueue(), writer=writer, snapshots=self.snapshots, rank=rank
        )  # fmt: skip
        self.stalls_s: list[float] = []

    def step(self, *, with_snapshot: bool) -> None:
        outcome = train_step(
            self.parts, self.state, Requests(), is_recording=False, extra_reductions=self.save_scheduler.extra_reductions()
        )  # fmt: skip
        self.state = outcome.state
        if with_snapshot:
            metrics = self.save_scheduler.observe(outcome)
            self.stalls_s.append(metrics.get("checkpoint/snapshot_stall_s", 0.0))
            self.save_scheduler.save_what_is_due(outcome, is_last=False)


def measure(rank: int, folder: str, plan: RunPlan, snapshot_servers, options, results) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    open_world(
        rank=rank, world_size=RANKS, rendezvous="", store=store, timeout_s=120.0, device=CPU
    )  # fmt: skip
    trainer = Trainer(plan, rank, [address for _, address in snapshot_servers])
    pids = [os.getpid(), snapshot_servers[rank][0]]
    sides: dict[bool, list[Sample]] = {True: [], False: []}
    for number in range(options.rounds + 1):
        # sides in turn, each first in every second round
        for is_on in (True, False) if number % 2 else (False, True):
            trainer.snapshots.wait()
            dist.barrier()
            wall, cpu = time.perf_counter(), sum(map(cpu_s, pids))
            for _ in range(options.steps):
                trainer.step(with_snapshot=is_on)
            wall = time.perf_counter() - wall
            trainer.snapshots.wait()  # its CPU seconds belong to this side, its time does not
            sample = Sample(wall_s=wall, cpu_s=sum(map(cpu_s, pids)) - cpu)
            if number:
                sides[is_on].append(sample)
    results.put((rank, sides, trainer.stalls_s, peak_bytes(os.getpid())))
    dist.barrier()
    dist.destroy_process_group()


def run(plan: RunPlan, options) -> None:
    context = multiprocessing.get_context("spawn")
    results, addresses = context.Queue(), context.Queue()
    servers = [context.Process(target=keep, args=(addresses,), daemon=True) for _ in range(RANKS)]
    for server in servers:
        server.start()
    snapshot_servers = [addresses.get(timeout=120) for _ in servers]
    # what an empty server takes is not the snapshots'
    before = [peak_bytes(pid) for pid, _ in snapshot_servers]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=measure, args=(rank, folder, plan, snapshot_servers, options, results)
            )
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        rows = sorted(results.get(timeout=3000) for _ in ranks)
        for rank in ranks:
            rank.join()
    kept = [
        peak_bytes(pid) - first for (pid, _), first in zip(snapshot_servers, before, strict=True)
    ]
    for server in servers:
        server.terminate()
        server.join()
    both = {
        is_on: [
            Sample(wall_s=max(a.wall_s, b.wall_s), cpu_s=a.cpu_s + b.cpu_s)
            for a, b in zip(rows[0][1][is_on], rows[1][1][is_on], strict=True)
        ]
        for is_on in (True, False)
    }
    cost = snapshot_cost(plan, 0)
    pairs = list(zip(both[False], both[True], strict=True))
    step_s = statistics.median(a.wall_s for a, _ in pairs) / options.steps
    report(
        "steps without, theirs with", pairs, step_s=step_s, tokens=options.tokens,
        share_bytes=cost.share_bytes,
    )  # fmt: skip
    # the first round allocates the copies
    stalls_s = rows[0][2][options.steps :]
    overheads = sorted(b.cpu_s / a.cpu_s - 1 for a, b in pairs)
    facts = {
        "overhead_cpu_percent": 100 * overheads[len(overheads) // 2],
        "stall_ms": 1e3 * statistics.median(stalls_s),
        "stall_percent": 100 * statistics.median(stalls_s) / step_s,
        "server_peak_bytes": max(kept),
        "server_planned_bytes": cost.server_bytes,
    }
    print(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2, help="of one side of a pair")
    parser.add_argument("--tokens", type=int, default=0, help="of a step, on each rank")
    options = parser.parse_args()
    options.rounds = options.rounds or (5 if options.quick else 15)
    options.tokens = options.tokens or (2048 if options.quick else 8192)
    run(plan_for(SMALL if options.quick else MODEL, options.tokens, options.steps), options)


if __name__ == "__main__":
    main()
