"""Compute the capacity of an expert: the most tokens of a micro-batch that it takes.

The router drops and pads by it, and the planner prices by it. The router chooses which tokens an
expert keeps.
"""

from __future__ import annotations

from math import ceil

from raymega.config.moe import MoeSection


def capacity_share(moe: MoeSection) -> float:
    """Return the largest share of a micro-batch's tokens that one expert takes.

    It is the share of an even load times the capacity factor.
    """
    return moe.capacity_factor * moe.top_k / moe.num_experts


def reserved_rows(moe: MoeSection, *, num_tokens: int, num_ranks: int) -> int:
    """Return the rows that an expert, padded to its capacity, computes for one rank's tokens.

    All that it takes of the micro-batch may come from one rank. Each rank therefore reserves the
    whole capacity, or a row for each of its tokens where that is less.

    Args:
        moe: Section ``model.moe`` of the job, with capacity_factor, top_k and num_experts.
        num_tokens: Number of tokens on the rank.
        num_ranks: Number of ranks that share the micro-batch, with as many tokens each: tp * cp.
    """
    return ceil(min(num_tokens * num_ranks * capacity_share(moe), num_tokens))
