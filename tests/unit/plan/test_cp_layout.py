"""Tokens of context-parallel ranks: each once, two equal chunks, equal work."""

from hypothesis import given
from hypothesis import strategies as st

from raymega.plan.cp_layout import gathered_parts, rank_ranges, ring_parts, segments

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
