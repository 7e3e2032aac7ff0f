"""Estimate the cost of a step of packed documents: attention that is saved, and ranks that wait.

Lengths of documents come from the caller. ``raymega.plan.packing.dynamic_cp`` places documents on
ranks, and ``raymega.plan.packing.cost`` prices a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raymega.plan.hardware.lookup import ROUND_H100
from raymega.plan.packing.cost import PackCost, make_pack_cost, pairs_in, pairs_of
from raymega.plan.packing.dynamic_cp import (
    PackLimits,
    finish_seconds,
    imbalance,
    schedule_documents,
)
from raymega.plan.run_plan import RunPlan

MOST_RANKS = 128
"""Most dp * cp ranks for which a schedule is made while somebody waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStep:
    """Estimate of one step on the fullest stage, by the cost model of an H100 cluster.

    Attributes:
        num_documents: Number of documents in all rows.
        efficiency: Tokens of documents over all tokens of the rows.
        attention_share: Pairs of a query and a key that it sees, over those of rows without
            documents.
        static_s: Seconds until the busiest rank is done, with each row on cp ranks.
        static_imbalance: Largest over mean work of the ranks, with each row on cp ranks.
        dynamic: Estimate with parallel.dynamic_cp; None when it is off, or would take long to find.
    """

    num_documents: int
    efficiency: float
    attention_share: float
    static_s: float
    static_imbalance: float
    dynamic: DynamicStep | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicStep:
    """Estimate of a step whose documents are placed by dynamic context parallelism.

    Attributes:
        seconds: Seconds until the last rank is done.
        imbalance: Largest over mean work of the ranks.
        num_micro_batches: Number of micro-batches on every rank.
        mean_ranks: Number of ranks that hold a token's pack, as the mean over tokens.
        most_ranks: Largest number of ranks of any pack.
    """

    seconds: float
    imbalance: float
    num_micro_batches: int
    mean_ranks: float
    most_ranks: int


def step_limits(plan: RunPlan) -> PackLimits:
    """Return the limits that schedules of this run's documents keep."""
    job = plan.job
    is_cut = job.parallel.sequence_parallel or job.model.moe.num_experts > 0
    return PackLimits(
        num_ranks=plan.grid.replicas,
        max_tokens=job.data.seq_len // job.parallel.cp,
        multiple=job.parallel.tp if is_cut else 1,
    )


def step_cost(plan: RunPlan) -> PackCost:
    """Return the cost model that decides between these schedules, that of the fullest stage."""
    layers = max(stage.num_layers for stage in plan.stages)
    return make_pack_cost(plan.job.model, ROUND_H100, layers=layers, tp=plan.job.parallel.tp)


def packed_step(plan: RunPlan, rows: Sequence[Sequence[int]]) -> PackedStep:
    """Return the estimate of a step with these rows.

    A row has the lengths of its documents. Rows are in the order of the samples.
    """
    seq_len, cost = plan.job.data.seq_len, step_cost(plan)
    lengths = [length for row in rows for length in row]
    # rows as they are, on cp ranks each; then packs, if the job asks for them
    work = _static_work(plan, rows, cost)
    is_asked = plan.job.parallel.dynamic_cp and plan.grid.replicas <= MOST_RANKS
    return PackedStep(
        num_documents=len(lengths),
        efficiency=sum(lengths) / (len(rows) * seq_len),
        attention_share=pairs_in(lengths) / (len(rows) * pairs_of(seq_len)),
        static_s=max(work),
        static_imbalance=max(work) * len(work) / sum(work),
        dynamic=_dynamic_step(plan, lengths, cost) if is_asked else None,
    )


def _static_work(plan: RunPlan, rows: Sequence[Sequence[int]], cost: PackCost) -> list[float]:
    """Return the seconds of each data-parallel rank; its tp and cp ranks work alike."""
    batch, cp = plan.batch, plan.job.parallel.cp
    tokens = batch.micro_batch_size * plan.job.data.seq_len // cp
    work = [0.0] * batch.dp
    for dp_rank in range(batch.dp):
        for index in range(batch.num_micro_batches):
            # Masked slots cost tokens and no pairs.
            samples = [at for at in batch.samples(index, dp_rank, 0) if at >= 0]
            pairs = sum(pairs_in(rows[at]) for at in samples)
            work[dp_rank] += cost.seconds(tokens=tokens, pairs=pairs, size=cp)
    return work


def _dynamic_step(plan: RunPlan, lengths: Sequence[int], cost: PackCost) -> DynamicStep:
    limits = step_limits(plan)
    rounds = schedule_documents(lengths, limits, cost)
    packs = [pack for packs in rounds for pack in packs if pack.documents]
    tokens = sum(pack.tokens * pack.size for pack in packs)
    return DynamicStep(
        seconds=finish_seconds(rounds, limits.num_ranks),
        imbalance=imbalance(rounds, limits.num_ranks),
        num_micro_batches=len(rounds),
        mean_ranks=sum(pack.tokens * pack.size**2 for pack in packs) / tokens,
        most_ranks=max(pack.size for pack in packs),
    )
