"""Dynamic against static context parallelism on ragged documents, by the cost model.

`python -m benchmarks.dynamic_cp` simulates a step on 4 to 64 ranks of an H100 cluster: rows of S
tokens packed best fit, each on as few ranks as its memory needs (static), on one rank (packing
only, which needs S / T times that memory), or the documents of the same rows placed by
plan.dynamic_cp. No step time includes the optimizer or the gradients' all-reduce: equal on all sides.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np

from raymega.config.schema import ModelSection
from raymega.data.packing import best_fit, cut_documents
from raymega.plan.hardware.lookup import ROUND_H100
from raymega.plan.packing.cost import PackCost, make_pack_cost, pairs_in
from raymega.plan.packing.dynamic_cp import (
    PackLimits,
    finish_seconds,
    imbalance,
    schedule_documents,
)

SIGMA = 1.1
BYTES_PER_TOKEN = 3.0
"""Bytes per token of Python source under a byte-level BPE of 2,048 tokens, rounded."""
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A distribution of lengths, the longest document S, the tokens T that a rank holds, a model."""

    name: str
    draw: Callable[[Random], int]
    seq_len: int
    max_tokens: int
    model: ModelSection
    layers: int
    tp: int = 1

    @property
    def cost(self) -> PackCost:
        return make_pack_cost(self.model, ROUND_H100, layers=self.layers, tp=self.tp)


def _lognormal(random: Random) -> int:
    """Mean 1024 before the cut at 8192."""
    # of the logarithm, so that the mean of the lengths is 1024
    mu = np.log(1024) - SIGMA**2 / 2
    return min(8192, max(16, int(random.lognormvariate(mu, SIGMA))))


def _code(random: Random) -> int:
    """Most files short, a few of a whole repository's length: Pareto, index 1.1, from 256 up."""
    return min(131072, int(256 * random.paretovariate(1.1)))


def _stdlib() -> Callable[[Random], int]:
    folder = Path(sysconfig.get_path("stdlib"))
    # make demo trains on the same files
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    lengths = sorted(
        max(1, int(path.stat().st_size / BYTES_PER_TOKEN))
        for path in folder.rglob("*.py")
        if not skipped & set(path.relative_to(folder).parts)
    )
    return lambda random: random.choice(lengths)


def cases() -> list[Case]:
    """Small: the published example's 12 layers of width 2048, cp inside the node.

    Large: Llama-13B on tp=8, which fills a node, so that cp leaves it; one of 8 pipeline stages.
    """
    small = {"model": _model(layers=12, width=2048, heads=16), "layers": 12}
    large = {"model": _model(layers=40, width=5120, heads=40), "layers": 5, "tp": 8}
    return [
        Case(name="log-normal, small", draw=_lognormal, seq_len=8192, max_tokens=2048, **small),
        Case(name="log-normal, large", draw=_lognormal, seq_len=8192, max_tokens=2048, **large),
        Case(name="code-like, large", draw=_code, seq_len=131072, max_tokens=16384, **large),
        Case(name="demo corpus, small", draw=_stdlib(), seq_len=32768, max_tokens=4096, **small),
        Case(name="demo corpus, large", draw=_stdlib(), seq_len=32768, max_tokens=4096, **large),
    ]


def _model(*, layers: int, width: int, heads: int) -> ModelSection:
    return ModelSection(
        family="llama", num_layers=layers, hidden_size=width, num_heads=heads, ffn_hidden_size=width * 8 // 3,
        vocab_size=32768, max_positions=131072,
    )  # fmt: skip


def batches(case: Case, num_rows: int, steps: int) -> list[list[list[int]]]:
    """Steps of rows of documents' lengths, packed as the data path does it."""
    random = Random(SEED)
    # more documents than the rows need, so that packing finds a fit for each
    lengths = np.array([case.draw(random) for _ in range(40 * num_rows * steps)], dtype=np.int64)
    pieces = cut_documents(lengths, case.seq_len)
    lengths = pieces.length.tolist()
    # best fit in windows, as the data path packs
    windows = (lengths[first : first + 4096] for first in range(0, len(lengths), 4096))
    packed = [[each[i] for i in row] for each in windows for row in best_fit(each, case.seq_len)]
    # full rows come first from a window: shuffle, as a run does
    rows = iter(Random(SEED).sample(packed, len(packed)))
    return [list(islice(rows, num_rows)) for _ in range(steps)]


def static_seconds(
    rows: Sequence[Sequence[int]], case: Case, cost: PackCost, *, size: int, num_ranks: int
) -> list[float]:
    """Seconds of each group of ``size`` ranks: rows go round the groups."""
    groups = [0.0] * (num_ranks // size)
    for index, row in enumerate(rows):
        groups[index % len(groups)] += cost.seconds(
            tokens=case.seq_len // size, pairs=pairs_in(row), size=size
        )
    return groups


def simulate(case: Case, num_ranks: int, *, rounds: int, steps: int) -> dict[str, object]:
    """Mean seconds of a step on each side; ``rounds`` micro-batches of static on every rank."""
    size = case.seq_len // case.max_tokens
    cost = case.cost
    limits = PackLimits(num_ranks=num_ranks, max_tokens=case.max_tokens)
    static, alone, dynamic, balances, sizes = [], [], [], [], []
    for rows in batches(case, rounds * num_ranks // size, steps):
        # the slowest group ends the step, on all sides
        static.append(max(static_seconds(rows, case, cost, size=size, num_ranks=num_ranks)))
        alone.append(max(static_seconds(rows, case, cost, size=1, num_ranks=num_ranks)))
        found = schedule_documents([n for row in rows for n in row], limits, cost)
        dynamic.append(finish_seconds(found, num_ranks))
        balances.append(imbalance(found, num_ranks))
        sizes += [pack_.size for packs in found for pack_ in packs]
    return {
        "case": case.name,
        "ranks": num_ranks,
        "static_cp": size,
        "tokens_per_step": rounds * num_ranks * case.max_tokens,
        "static_ms": 1e3 * fmean(static),
        "packing_only_ms": 1e3 * fmean(alone),
        "dynamic_ms": 1e3 * fmean(dynamic),
        "static_over_dynamic": fmean(static) / fmean(dynamic),
        "packing_only_over_dynamic": fmean(alone) / fmean(dynamic),
        "balance": fmean(balances),
        "mean_size": fmean(sizes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one step and fewer ranks")
    parser.add_argument("--rounds", type=int, default=8, help="micro-batches of static cp")
    args = parser.parse_args()
    for case in cases():
        for num_ranks in (8, 16) if args.quick else (4, 8, 16, 32, 64):
            # too few ranks to hold the longest document
            if num_ranks * case.max_tokens < case.seq_len:
                continue
            row = simulate(case, num_ranks, rounds=args.rounds, steps=1 if args.quick else 4)
            print(json.dumps(row))


if __name__ == "__main__":
    main()
