"""Overhead of raymega on one rank: its training step against a bare loop over the same modules.

Machinery is all that a layout needs and one rank does not: schedule, buckets, masters, global norm, data
order, totals. The bare loop has the same model, tokens, micro-batches, clipping and torch's AdamW.

    python -m benchmarks.machinery [--quick] [--threads 1]
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.measure import interleave, report, set_threads
from benchmarks.one_rank import CPU, OneRank, make_one_rank_plan
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.comm.process_groups import build_groups
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel

MODEL = {
    "family": "llama", "num_layers": 6, "hidden_size": 320, "num_heads": 5, "ffn_hidden_size": 864,
    "vocab_size": 4096,
}  # fmt: skip
SMALL = {**MODEL, "num_layers": 2, "hidden_size": 128, "num_heads": 4, "ffn_hidden_size": 352}


class Bare:
    """The shortest loop that trains the same model."""

    def __init__(self, ours: OneRank) -> None:
        plan = ours.parts.plan
        groups = build_groups(plan.grid, 0, timeout_s=60.0)
        self.module = StageModule(
            plan.job.model,
            plan.stages[0],
            sp=SequenceParallel(tp=groups.tp, is_sequence_parallel=False),
            dtype=torch.float32,
            device=CPU,
            seed=plan.job.run.seed,
        )
        params = list(self.module.parameters())
        matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]
        groups_of_params = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups_of_params, lr=1e-4, betas=(0.9, 0.95), fused=True)
        # Made before the clock runs: reading data is part of our side only.
        batch = plan.batch
        steps = range(0, 8 * batch.global_batch_size, batch.global_batch_size)
        self.data = [ours.parts.loader.micro_batches(batch, first) for first in steps]
        self.num_calls = 0

    def __call__(self) -> None:
        micro_batches = self.data[self.num_calls % len(self.data)]
        self.num_calls += 1
        count = sum(micro.mask.numel() for micro in micro_batches)
        for micro in micro_batches:
            loss = self.module(micro.tokens, micro.labels, micro.mask, None)
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small shape and few rounds")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()
    set_threads(options.threads)
    plan = make_one_rank_plan(
        SMALL if options.quick else MODEL, seq_len=64 if options.quick else 256,
        batch=options.micro_batches, micro_batch=1, dtype="float32",
    )  # fmt: skip
    ours = OneRank(plan)
    bare = Bare(ours)
    pairs = interleave(ours, bare, rounds=options.rounds or (7 if options.quick else 41))
    report("machinery over a bare loop", pairs, threads=options.threads)
    overheads = sorted(a.cpu_s / b.cpu_s - 1 for a, b in pairs)
    cheapest = [min(side.cpu_s for side in sides) for sides in zip(*pairs, strict=True)]
    print(
        f"overhead in CPU seconds: median {100 * overheads[len(overheads) // 2]:.2f} %, "
        f"of the cheapest steps {100 * (cheapest[0] / cheapest[1] - 1):.2f} %"
    )


if __name__ == "__main__":
    main()
