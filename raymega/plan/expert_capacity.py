"""Capacity: how many of a micro-batch's tokens one expert takes, and the rows kept for them.

The router drops and pads by it, the planner prices by it; which tokens an expert keeps is the router's.
"""

from __future__ import annotations

from math import ceil

from raymega.config.moe import MoeSection


def capacity_share(moe: MoeSection) -> float:
    """Of the tokens of a micro-batch those that an expert takes, at most: an even load's times the factor."""
    return moe.capacity_factor * moe.top_k / moe.num_experts


def reserved_rows(moe: MoeSection, *, num_tokens: int, num_ranks: int) -> int:
    """Rows that an expert computes for one rank's tokens where it is padded to its capacity.

    All that it takes of the micro-batch may come from one rank, so each reserves the whole capacity, or
    a row for each of its tokens where that is less.

    Args:
        moe: Of which it reads capacity_factor, top_k and num_experts.
        num_tokens: Of the rank.
        num_ranks: That share the micro-batch, with as many tokens each: tp * cp.
    """
    return ceil(min(num_tokens * num_ranks * capacity_share(moe), num_tokens))
