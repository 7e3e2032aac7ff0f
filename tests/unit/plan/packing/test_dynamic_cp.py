"""The scheduler of dynamic context parallelism, for random documents."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.errors import PlanError
from raymega.plan.packing.cost import PackCost, pairs_in
from raymega.plan.packing.dynamic_cp import (
    PackLimits,
    finish_seconds,
    imbalance,
    least_size,
    padded_length,
    schedule_documents,
)

COST = PackCost(
    token_s=1e-6, pair_s=2e-10, near_s=1e-7, far_s=1e-6, hop_s=1e-5, start_s=1e-5, ranks_per_node=4
)
CASES = st.tuples(
    st.lists(st.integers(1, 4096), min_size=1, max_size=60),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([512, 1000, 2048, 4096]),
    st.sampled_from([1, 2, 4]),
)


def _limits(lengths: list[int], num_ranks: int, max_tokens: int, multiple: int) -> PackLimits:
    """Widened until the longest document fits, as a job's rules demand."""
    needed = -(-max(lengths) // num_ranks)
    return PackLimits(
        num_ranks=num_ranks, max_tokens=max(max_tokens, needed + 2 * multiple), multiple=multiple
    )


@settings(deadline=None, max_examples=200)
@given(CASES)
def test_every_document_is_in_one_pack(case: tuple[list[int], int, int, int]) -> None:
    lengths, *rest = case
    rounds = schedule_documents(lengths, _limits(lengths, *rest), COST)
    found = [document for packs in rounds for pack in packs for document in pack.documents]
    assert sorted(found) == list(range(len(lengths)))


@settings(deadline=None, max_examples=200)
@given(CASES)
def test_groups_are_aligned_powers_of_two_that_cover_the_ranks(
    case: tuple[list[int], int, int, int],
) -> None:
    lengths, *rest = case
    limits = _limits(lengths, *rest)
    for packs in schedule_documents(lengths, limits, COST):
        starts = accumulate((pack.size for pack in packs), initial=0)
        assert [pack.first_rank for pack in packs] == list(starts)[:-1]
        assert sum(pack.size for pack in packs) == limits.num_ranks
        for pack in packs:
            assert pack.size & (pack.size - 1) == 0
            assert pack.first_rank % pack.size == 0


@settings(deadline=None, max_examples=200)
@given(CASES)
def test_no_rank_holds_more_than_it_may(case: tuple[list[int], int, int, int]) -> None:
    lengths, *rest = case
    limits = _limits(lengths, *rest)
    for pack in (pack for packs in schedule_documents(lengths, limits, COST) for pack in packs):
        assert pack.tokens <= limits.max_tokens
        assert pack.tokens % limits.multiple == 0
        held = sum(padded_length(lengths[i], pack.size) for i in pack.documents)
        assert held <= pack.tokens * pack.size
        # What is left is cut like a document.
        assert (pack.tokens * pack.size - held) % (2 * pack.size) == 0 or pack.size == 1


@settings(deadline=None, max_examples=100)
@given(CASES)
def test_packs_say_what_they_cost(case: tuple[list[int], int, int, int]) -> None:
    lengths, *rest = case
    for pack in (
        pack
        for packs in schedule_documents(lengths, _limits(lengths, *rest), COST)
        for pack in packs
    ):
        if pack.documents:
            pairs = pairs_in(lengths[i] for i in pack.documents)
            seconds = COST.seconds(tokens=pack.tokens, pairs=pairs, size=pack.size)
            assert pack.seconds == pytest.approx(seconds)


@settings(deadline=None, max_examples=50)
@given(CASES)
def test_the_same_documents_give_the_same_schedule(case: tuple[list[int], int, int, int]) -> None:
    lengths, *rest = case
    limits = _limits(lengths, *rest)
    assert schedule_documents(lengths, limits, COST) == schedule_documents(lengths, limits, COST)


@settings(deadline=None, max_examples=100)
@given(CASES)
def test_ranks_that_run_their_lists_never_wait_for_ever(
    case: tuple[list[int], int, int, int],
) -> None:
    """A rank enters a pack when it is through with the one before: all come to the end."""
    lengths, *rest = case
    limits = _limits(lengths, *rest)
    rounds = schedule_documents(lengths, limits, COST)
    at = [0] * limits.num_ranks
    while min(at) < len(rounds):
        ready = [
            pack
            for pack in rounds[min(at)]
            if {at[r] for r in range(pack.first_rank, pack.first_rank + pack.size)} == {min(at)}
        ]
        assert ready
        for pack in ready:
            for rank in range(pack.first_rank, pack.first_rank + pack.size):
                at[rank] += 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_ranks", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("seed", range(4))
def test_work_is_even_when_there_are_documents_to_share_out(num_ranks: int, seed: int) -> None:
    random = Random(seed)
    lengths = [min(8192, int(random.lognormvariate(6.43, 1.0)) + 1) for _ in range(32 * num_ranks)]
    limits = PackLimits(num_ranks=num_ranks, max_tokens=2048)
    rounds = schedule_documents(lengths, limits, COST)
    assert imbalance(rounds, num_ranks) < 1.05
    least = sum(COST.token_s * n + COST.pair_s * n * (n + 1) / 2 for n in lengths) / num_ranks
    assert finish_seconds(rounds, num_ranks) < 1.25 * least


def test_a_short_document_stays_on_one_rank_and_a_long_one_does_not() -> None:
    limits = PackLimits(num_ranks=4, max_tokens=1024)
    (packs,) = schedule_documents([2048, 700, 600], limits, replace(COST, hop_s=1e-3))
    assert [(pack.size, pack.documents) for pack in packs] == [(2, (0,)), (1, (1,)), (1, (2,))]


def test_one_document_gets_the_ranks_that_nothing_else_needs() -> None:
    (packs,) = schedule_documents([4000], PackLimits(num_ranks=4, max_tokens=4096), COST)
    assert [pack.size for pack in packs] == [4]


def test_a_rank_without_documents_still_has_a_micro_batch() -> None:
    (packs,) = schedule_documents([3], PackLimits(num_ranks=4, max_tokens=8), COST)
    assert sum(pack.size for pack in packs) == 4
    assert all(pack.tokens >= 1 for pack in packs)


def test_least_size_is_what_memory_needs() -> None:
    limits = PackLimits(num_ranks=8, max_tokens=100, multiple=4)
    assert [least_size(n, limits) for n in (1, 100, 101, 401)] == [1, 1, 2, 8]


def test_a_document_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(PlanError, match=r"a document of 401 tokens.*hold 400"):
        schedule_documents([401], PackLimits(num_ranks=4, max_tokens=100), COST)
