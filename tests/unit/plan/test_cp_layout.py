"""Tokens of context-parallel ranks: each once, two equal chunks, equal work; rules of heads and tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymega.plan.cp_layout import gathered_parts, rank_ranges, ring_parts, segments
from raymega.plan.validation.context_parallel import (
    exchange_faults,
    position_faults,
    weight_dropout_faults,
)

degrees = st.sampled_from([1, 2, 3, 4, 8])
counts = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def test_ranks_hold_an_early_and_a_late_chunk():
    held = [rank_ranges((16,), cp=4, cp_rank=rank) for rank in range(4)]
    assert held[0] == (range(2), range(14, 16)) and held[3] == (range(6, 8), range(8, 10))
    assert rank_ranges((5, 7), cp=1, cp_rank=0) == (range(5), range(5, 12))


@given(cp=degrees, counts=counts)
def test_every_token_is_held_once_and_every_rank_holds_as_many(cp, counts):
    lengths = [2 * cp * count for count in counts]
    held = [
        [i for part in rank_ranges(lengths, cp=cp, cp_rank=rank) for i in part]
        for rank in range(cp)
    ]
    assert sorted(i for own in held for i in own) == list(range(sum(lengths)))
    assert {len(own) for own in held} == {sum(lengths) // cp}


@given(cp=degrees, counts=counts, is_causal=st.booleans())
def test_blocks_of_the_ring_are_all_pairs_that_see_each_other(cp, counts, is_causal):
    lengths = [2 * cp * count for count in counts]
    held = [
        [i for part in rank_ranges(lengths, cp=cp, cp_rank=rank) for i in part]
        for rank in range(cp)
    ]
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    document = [sum(i >= end for end in ends) for i in range(sum(lengths))]
    wanted = {
        (i, j)
        for i in range(sum(lengths))
        for j in range(sum(lengths))
        if document[i] == document[j] and (j <= i or not is_causal)
    }
    pairs, work = [], []
    for here in range(cp):
        mine = []
        for source in range(cp):
            for segment in segments((lengths,), cp=cp):
                for part in ring_parts(segment, here=here, source=source, is_causal=is_causal):
                    mine += _pairs(part, held[here], held[source])
        pairs += mine
        work.append(len(mine))
    assert len(pairs) == len(wanted) and set(pairs) == wanted
    assert len(set(work)) == 1, "ranks have unequal work"


@given(cp=st.sampled_from([2, 3, 4]), counts=counts, is_causal=st.booleans())
def test_gathered_blocks_are_what_the_ring_sees_of_others(cp, counts, is_causal):
    lengths = [2 * cp * count for count in counts]
    held = [
        [i for part in rank_ranges(lengths, cp=cp, cp_rank=rank) for i in part]
        for rank in range(cp)
    ]
    whole = list(range(sum(lengths)))
    for here in range(cp):
        ring, gathered = [], []
        for segment in segments((lengths,), cp=cp):
            for part in gathered_parts(segment, here=here, num_places=cp, is_causal=is_causal):
                gathered += _pairs(part, held[here], whole)
            for source in set(range(cp)) - {here}:
                for part in ring_parts(segment, here=here, source=source, is_causal=is_causal):
                    ring += _pairs(part, held[here], held[source])
        assert sorted(ring) == sorted(gathered)


def _pairs(part, queries, keys):
    return [
        (i, j)
        for at, i in enumerate(queries[part.queries])
        for to, j in enumerate(keys[part.keys])
        if not part.is_causal or to <= at
    ]


def test_sequence_that_the_chunks_do_not_divide_is_refused():
    (fault,) = position_faults(1, 3, 32, False)
    assert str(fault) == (
        "parallel.cp=3; a sequence is cut into 2 * cp = 6 chunks, two a rank, so that must divide "
        "data.seq_len=32 (remainder 2); set data.seq_len=30, or another parallel.cp"
    )
    (fault,) = position_faults(3, 2, 32, True)
    assert "data.seq_len=32 / parallel.cp=2 = 16 (remainder 1)" in str(fault)
    assert "set data.seq_len=24" in fault.remedy
    assert position_faults(4, 4, 32, True) == [] == position_faults(3, 1, 32, False)


@pytest.mark.parametrize("method, inner, tp, heads, kv_heads, text", [
    ("all_to_all", 2, 1, 6, 6, "it must divide model.num_heads=6 / parallel.tp=1 = 6 (remainder 2)"),
    ("all_to_all", 2, 2, 8, 6, "the 3 that model.num_kv_heads=6 leaves each of parallel.tp=2 ranks"),
    ("hybrid", 3, 1, 8, 8, "it must divide parallel.cp=4 and be neither 1 nor cp; use one of 2"),
    ("hybrid", 4, 1, 8, 8, "use one of 2"),
    ("hybrid", 2, 8, 8, 8, "parallel.hierarchical_cp_size=2 with parallel.cp_method=hybrid; ranks exchange whole"),
])  # fmt: skip
def test_heads_that_ranks_cannot_exchange_are_refused(method, inner, tp, heads, kv_heads, text):
    (fault,) = exchange_faults(4, method, inner, tp, heads, kv_heads)
    assert text in str(fault)


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1, "num_heads"])
def test_heads_that_ranks_can_exchange_are_not_refused(kv_heads):
    assert exchange_faults(4, "all_to_all", 2, 1, 8, kv_heads) == []
    assert exchange_faults(4, "ring", 2, 1, 7, 7) == []


def test_weights_are_dropped_on_whole_rows_only():
    assert (
        weight_dropout_faults(0.1, 2, "all_to_all") == weight_dropout_faults(0.1, 1, "ring") == []
    )
    (fault,) = weight_dropout_faults(0.1, 2, "ring")
    assert "parallel.cp_method=all_to_all" in fault.remedy
