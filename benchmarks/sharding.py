"""A step at each level of sharding against FSDP2: the same model, samples and micro-batches, four gloo ranks.

FSDP2 wraps the modules of our own model, each block and the whole as a unit, with torch's AdamW on its DTensors.
With reshard_after_forward it matches level parameters; without it, it keeps weights between forward and backward,
as level gradients does. Losses of both are compared first. Then come interleaved pairs of steps, then one step of
each whose tensors and messages are counted.

    python -m benchmarks.sharding [--quick] [--rounds N] [--only parameters]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measure import Sample, interleave, report
from raymega.config.load import parse_mapping
from raymega.messages import Requests
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.comm.process_groups import alone, build_groups
from raymega.parallel.comm.world import open_world
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.train.build import build_parts
from raymega.train.state import first_state
from raymega.train.step import train_step

RANKS = 4
CPU = torch.device("cpu")
TIMEOUT_S = 120.0
LET_GO_S = 0.5
"""Threads of gloo let go of tensors by then: told of memory after its end, the profiler of torch crashes."""
LEVELS = ("optimizer", "gradients", "parameters")
SMALL = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_heads": 4,
    "ffn_hidden_size": 352,
    "vocab_size": 512,
}
LARGE = {
    "num_layers": 6,
    "hidden_size": 320,
    "num_heads": 5,
    "ffn_hidden_size": 864,
    "vocab_size": 2048,
}
LR = 1e-4


class SentBytes(TorchDispatchMode):
    """Bytes that a rank of a ring sends for the collectives of this thread, whoever starts them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            # the larger of a collective's tensors is the whole; a ring sends all parts of it but one
            leaves = tree_leaves((args, kwargs))
            most = max((x.nbytes for x in leaves if isinstance(x, torch.Tensor)), default=0)
            # an all-reduce is a reduce-scatter and an all-gather
            turns = 2 if "allreduce" in str(func) else 1
            self.total += turns * most * (RANKS - 1) / RANKS
        return func(*args, **(kwargs or {}))


def make_bench_plan(
    model: dict[str, int], level: str, *, seq_len: int, micro_batches: int
) -> RunPlan:
    job = parse_mapping(
        {
            "run": {"name": "benchmark", "steps": 10**6, "eval_samples": 0},
            "model": {"family": "llama", "max_positions": seq_len, "tie_word_embeddings": False, **model},
            "data": {
                "path": "synthetic", "seq_len": seq_len, "global_batch_size": RANKS * micro_batches,
            },
            "parallel": {"dp": RANKS, "sharding": level},
            "cluster": {"num_workers": RANKS},
            "optimizer": {"lr": LR, "lr_schedule": "constant"},
            "precision": {"dtype": "float32"},
        }
    ).job()  # fmt: skip
    return make_plan(job)


class Ours:
    """A whole training step at a call."""

    def __init__(self, plan: RunPlan, rank: int) -> None:
        groups = build_groups(plan.grid, rank, timeout_s=TIMEOUT_S)
        self.parts = build_parts(plan, rank=rank, groups=groups, device=CPU)
        self.state = first_state(plan.job.precision)

    def __call__(self) -> float:
        outcome = train_step(self.parts, self.state, Requests(), is_recording=False)
        self.state = outcome.state
        return outcome.loss

    def wait(self) -> None:
        """Wait for the weights that are being gathered for the next step."""
        self.parts.weights.wait_for_all()


class Theirs:
    """The same by FSDP2: sums of losses, divided by the count of all tokens before backward."""

    def __init__(self, ours: Ours, rank: int, *, level: str) -> None:
        plan = ours.parts.plan
        self.loader, self.batch = ours.parts.loader, plan.batch
        self.module = StageModule(
            plan.job.model, plan.stages[0], sp=SequenceParallel(tp=alone(rank)), dtype=torch.float32,
            device=CPU, seed=plan.job.run.seed,
        )  # fmt: skip
        # FSDP2's settings for each ZeRO level: ZeRO-2 keeps gathered weights, ZeRO-1 also whole gradients
        is_resharded = level == "parameters"
        for block in self.module.layers.values():
            fully_shard(block, reshard_after_forward=is_resharded, mesh=_mesh())
        fully_shard(self.module, reshard_after_forward=is_resharded, mesh=_mesh())
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(level != "optimizer")
        matrices = [p for p in self.module.parameters() if p.ndim > 1]
        vectors = [p for p in self.module.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=LR, betas=(0.9, 0.95), fused=True,
        )  # fmt: skip
        self.syncs_last_only = level == "optimizer"
        self.samples = 0

    def __call__(self) -> float:
        micro_batches = self.loader.micro_batches(self.batch, self.samples)
        self.samples += self.batch.global_batch_size
        totals = torch.zeros(2, dtype=torch.float64)
        # synthetic rows are all full, so that every rank has as many tokens
        count = sum(float(micro.mask.sum()) for micro in micro_batches) * RANKS
        for number, micro in enumerate(micro_batches):
            if self.syncs_last_only:
                self.module.set_requires_gradient_sync(number == len(micro_batches) - 1)
            loss = self.module(micro.tokens, micro.labels, micro.mask, None)
            (loss / count * RANKS).backward()  # FSDP2 takes the mean over ranks
            totals += torch.tensor(
                [float(loss.detach()), float(micro.mask.sum())], dtype=torch.float64
            )
        dist.all_reduce(totals)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(totals[0] / totals[1])

    def wait(self) -> None:
        """Return at once: FSDP2's step leaves nothing pending."""


def _mesh():
    return dist.device_mesh.init_device_mesh("cpu", (RANKS,))


def _counted(call: Ours | Theirs) -> tuple[int, float]:
    """Return the peak bytes that one call allocated, and the bytes it sent."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
        call.wait()
        time.sleep(LET_GO_S)
    held = [0, *_allocated(watched.profiler.kineto_results.experimental_event_tree())]
    # bytes are counted in another call, as the dispatch mode allocates too
    sent = SentBytes()
    with sent:
        call()
    return max(held), sent.total


def _allocated(events: Any) -> Iterator[int]:
    """Yield the bytes that this thread's tensors held after each allocation and release."""
    for event in events:
        if event.name == "[memory]":
            yield event.extra_fields.total_allocated
        yield from _allocated(event.children)


def measure(rank: int, folder: str, plan_json: str, rounds: int, results) -> None:
    from raymega.plan.run_plan import read_plan

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    open_world(
        rank=rank, world_size=RANKS, rendezvous="", store=store, timeout_s=TIMEOUT_S, device=CPU
    )
    plan = read_plan(plan_json)
    ours = Ours(plan, rank)
    theirs = Theirs(ours, rank, level=plan.job.parallel.sharding)
    for _ in range(3):
        # three steps with equal losses: both sides train the same run
        torch.testing.assert_close(ours(), theirs(), rtol=1e-5, atol=0)
    pairs = interleave(ours, theirs, rounds=rounds)
    counted = [_counted(side) for side in (ours, theirs)]
    results.put((rank, [[(s.wall_s, s.cpu_s) for s in pair] for pair in pairs], counted))
    dist.barrier()
    dist.destroy_process_group()


def compare(
    level: str, model: dict[str, int], *, seq_len: int, micro_batches: int, rounds: int
) -> None:
    plan = make_bench_plan(model, level, seq_len=seq_len, micro_batches=micro_batches)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (folder, plan.to_json(), rounds, results)
        ranks = [context.Process(target=measure, args=(rank, *args)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        rows = sorted(results.get(timeout=900) for _ in ranks)
        for rank in ranks:
            rank.join()
    # A step is over when the slowest rank is; CPU seconds are those of all.
    pairs = [
        tuple(
            Sample(wall_s=max(wall for wall, _ in side), cpu_s=sum(cpu for _, cpu in side))
            for side in zip(*both, strict=True)
        )
        for both in zip(*(pairs for _, pairs, _ in rows), strict=True)
    ]
    (peak_ours, sent_ours), (peak_theirs, sent_theirs) = rows[0][2]
    report(f"{level} vs FSDP2", pairs, ranks=RANKS, micro_batches=micro_batches)
    print(
        f"  made and held at a time, MiB: ours {peak_ours / 2**20:.1f}, theirs {peak_theirs / 2**20:.1f}; "
        f"sent by a rank, MiB a step: ours {sent_ours / 2**20:.1f}, theirs {sent_theirs / 2**20:.1f}"
    )
    facts = {"peak_bytes": [peak_ours, peak_theirs], "sent_bytes": [sent_ours, sent_theirs]}
    print(json.dumps({"name": level, **facts, "load": os.getloadavg()[0]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--only", default="", help=f"one of {', '.join(LEVELS)}")
    options = parser.parse_args()
    model, seq_len = (SMALL, 64) if options.quick else (LARGE, 256)
    for level in LEVELS:
        if options.only in ("", level):
            compare(
                level, model, seq_len=seq_len, micro_batches=2,
                rounds=options.rounds or (7 if options.quick else 25),
            )  # fmt: skip


if __name__ == "__main__":
    main()
