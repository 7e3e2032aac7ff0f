"""Dynamic against static context parallelism on 4 gloo ranks: real transfers, compute slept.

`python -m benchmarks.dynamic_cp_ranks`: each rank runs its packs of a step, forward and backward.
Linear layers and attention are sleeps of what the cost model says; keys and values really go round,
behind attention's sleeps as in the ring. First the transfers of a full micro-batch are timed here, and
the sleeps are scaled to them: compute is slower than an H100's by the factor by which gloo is slower than its network.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.dynamic_cp import batches, cases
from benchmarks.measure import median
from raymega.plan.packing.cost import PackCost, pairs_in
from raymega.plan.packing.dynamic_cp import (
    PackLimits,
    Round,
    finish_seconds,
    imbalance,
    schedule_documents,
)

RANKS = 4
BYTES = 2048
"""Bytes of one token's keys and values in this benchmark."""
TRIALS = 15
LARGE = next(case for case in cases() if case.name == "log-normal, large")


def emulated(hop_s: float) -> PackCost:
    """The large case's costs, all longer alike, so that a micro-batch's hop takes ``hop_s``."""
    cost = LARGE.cost
    messages = 3  # forward's, and twice as much in backward
    scale = messages * hop_s / (cost.far_s * LARGE.max_tokens)
    return PackCost(
        token_s=cost.token_s * scale,
        pair_s=cost.pair_s * scale,
        near_s=cost.far_s * scale,
        hop_s=cost.hop_s * scale,
        ranks_per_node=RANKS,
    )


class Rank:
    """Process of the benchmark, with its groups by size and the work of a pack."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.groups = {
            size: [dist.new_group(list(range(at, at + size))) for at in range(0, RANKS, size)][
                rank // size
            ]
            for size in (2, 4)
        }

        self.cost = emulated(self._time_hop())

    def _time_hop(self) -> float:
        """Seconds in which all ranks pass on a full micro-batch; equal on all."""
        trials = []
        for _ in range(TRIALS):
            dist.barrier()
            began = time.perf_counter()
            for work in self._shift(0, RANKS, LARGE.max_tokens):
                work.wait()
            trials.append(time.perf_counter() - began)
        # the slowest rank's, and the same number on all, as schedules are made from it
        slowest = torch.tensor(median(trials).value, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def run(self, rounds: Sequence[Sequence[tuple[int, int, int, int]]]) -> float:
        """Seconds of a step: packs are (first rank, size, tokens a rank, pairs)."""
        dist.barrier()
        began = time.perf_counter()
        for packs in rounds:
            # the pack that this rank is a member of
            own = next(p for p in packs if p[0] <= self.rank < p[0] + p[1])
            # backward is twice the work of forward, with gradients beside the keys and values
            self._pass(own, share=1 / 3, messages=1)
            self._pass(own, share=2 / 3, messages=2)
        dist.barrier()
        return time.perf_counter() - began

    def _pass(self, pack: tuple[int, int, int, int], *, share: float, messages: int) -> None:
        first, size, tokens, pairs = pack
        # linear layers: nothing to overlap with
        time.sleep(share * self.cost.token_s * tokens)
        block = share * self.cost.pair_s * pairs / size / size
        for hop in range(size):
            # the ring: pass on while attending, and wait when the block is done
            works = self._shift(first, size, tokens * messages) if hop < size - 1 else []
            time.sleep(block)
            for work in works:
                work.wait()

    def _shift(self, first: int, size: int, tokens: int) -> list[dist.Work]:
        group = self.groups[size]
        there = first + (self.rank - first + 1) % size
        back = first + (self.rank - first - 1) % size
        out, into = (torch.empty(tokens * BYTES, dtype=torch.uint8) for _ in range(2))
        return [dist.isend(out, there, group=group), dist.irecv(into, back, group=group)]


def _static(rows: Sequence[Sequence[int]], seq_len: int) -> list[list[tuple[int, int, int, int]]]:
    return [[(0, RANKS, seq_len // RANKS, pairs_in(row))] for row in rows]


def _dynamic(
    rounds: Sequence[Round], lengths: Sequence[int]
) -> list[list[tuple[int, int, int, int]]]:
    return [
        [(p.first_rank, p.size, p.tokens, pairs_in(lengths[i] for i in p.documents)) for p in packs]
        for packs in rounds
    ]


def _work(rank: int, store: str, steps: int, rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    case, me, found = LARGE, Rank(rank), []
    limits = PackLimits(num_ranks=RANKS, max_tokens=case.max_tokens)
    for number, rows in enumerate(batches(case, rounds, steps + 1)):
        lengths = [n for row in rows for n in row]
        schedule = schedule_documents(lengths, limits, me.cost)
        sides = {"static": _static(rows, case.seq_len), "dynamic": _dynamic(schedule, lengths)}
        # sides in turn, each first in every second step
        names = sorted(sides, reverse=bool(number % 2))
        seconds = {name: me.run(sides[name]) for name in names}
        static = sum(
            me.cost.seconds(tokens=case.seq_len // RANKS, pairs=pairs_in(row), size=RANKS)
            for row in rows
        )
        predicted = static / finish_seconds(schedule, RANKS)
        if number:  # the first step warms up
            slept = me.cost.token_s * case.max_tokens
            found.append((seconds, imbalance(schedule, RANKS), predicted, slept))
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two steps of few rows")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    args = parser.parse_args()
    steps, rows = (2, 4) if args.quick else (args.steps, args.rows)
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/found.json"
        mp.start_processes(
            _work, (f"{folder}/store", steps, rows, out), nprocs=RANKS, start_method="spawn"
        )
        found = json.loads(Path(out).read_text())
    ratios = [seconds["static"] / seconds["dynamic"] for seconds, *_ in found]
    print(
        json.dumps(
            {
                "ranks": RANKS,
                "steps": steps,
                "rows": rows,
                "linear_s_of_a_micro_batch": found[0][3],
                "static_s": median([seconds["static"] for seconds, *_ in found]).value,
                "dynamic_s": median([seconds["dynamic"] for seconds, *_ in found]).value,
                "static_over_dynamic": str(median(ratios)),
                "predicted": median([predicted for _, _, predicted, _ in found]).value,
                "balance": max(balance for _, balance, _, _ in found),
            }
        )
    )


if __name__ == "__main__":
    main()
