"""Documents of single ranks change places until ranks end together."""

from __future__ import annotations

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.plan.packing.cost import PackCost, pairs_in
from raymega.plan.packing.rebalance import Rebalancer

COST = PackCost(token_s=1.0, pair_s=1e-3, start_s=5.0)


def _seconds(tokens: int, pairs: int) -> float:
    return COST.seconds(tokens=tokens, pairs=pairs, size=1)


def _end(start: float, packs: list[list[int]], lengths: list[int]) -> float:
    held = [[lengths[i] for i in pack] for pack in packs]
    return start + sum(_seconds(sum(pack), pairs_in(pack)) for pack in held)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[float], list[list[list[int]]], list[int]]:
    """Ranks with 0 to 3 micro-batches of 0 to 4 documents each."""
    shape = draw(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6))
    number = iter(range(sum(map(sum, shape))))
    held = [[[next(number) for _ in range(n)] for n in rank] for rank in shape]
    lengths = draw(
        st.lists(st.integers(1, 25), min_size=sum(map(sum, shape)), max_size=sum(map(sum, shape)))
    )
    starts = draw(st.lists(st.floats(0, 50), min_size=len(shape), max_size=len(shape)))
    return starts, held, lengths


@settings(deadline=None, max_examples=200)
@given(_cases())
def test_every_document_stays_somewhere_and_no_rank_ends_later(case) -> None:
    starts, held, lengths = case
    found = Rebalancer(starts, held, lengths, room=100, seconds=_seconds).run()
    assert sorted(chain(*chain(*found))) == list(range(len(lengths)))
    assert [len(rank) for rank in found] == [len(rank) for rank in held]
    assert all(sum(lengths[i] for i in pack) <= 100 for pack in chain(*found))
    before = [_end(s, rank, lengths) for s, rank in zip(starts, held, strict=True)]
    after = [_end(s, rank, lengths) for s, rank in zip(starts, found, strict=True)]
    assert max(after) <= max(before) + 1e-9


def test_a_rank_that_begins_late_gives_work_away() -> None:
    lengths = [10] * 12
    held = [[list(range(6))], [list(range(6, 12))]]
    found = Rebalancer([40.0, 0.0], held, lengths, room=100, seconds=_seconds).run()
    assert [len(pack) for (pack,) in found] == [4, 8]


def test_two_documents_change_places_where_there_is_no_room_for_one() -> None:
    lengths = [60, 39, 50, 40]
    found = Rebalancer([12.0, 0.0], [[[0, 1]], [[2, 3]]], lengths, room=100, seconds=_seconds).run()
    assert [sorted(pack) for (pack,) in found] == [[1, 2], [0, 3]]


def test_what_is_exchanged_does_not_depend_on_anything_but_its_arguments() -> None:
    lengths = [(7 * i) % 23 + 1 for i in range(40)]
    held = [[list(range(10 * r, 10 * r + 10))] for r in range(4)]
    runs = [
        Rebalancer([0.0] * 4, held, lengths, room=200, seconds=_seconds).run() for _ in range(2)
    ]
    assert runs[0] == runs[1]
