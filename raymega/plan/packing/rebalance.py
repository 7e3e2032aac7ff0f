"""Exchange documents that single ranks hold, so that ranks end together.

A greedy rule leaves some ranks with more to do than others. What a rank holds by itself after the
last pack that it shares can be exchanged, and no other rank waits for it.
``raymega.plan.packing.dynamic_cp`` makes the packs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raymega.plan.packing.cost import pairs_of

MOST_EXCHANGES = 16
"""Most exchanges for each rank, as the mean; fewer when no exchange helps any more."""
MOST_PARTNERS = 4
"""Number of ranks, those that end first, with which the last one tries an exchange."""


@dataclass(slots=True)
class _Held:
    """Documents of one rank in one micro-batch, their tokens, and query-key pairs."""

    documents: list[int]
    tokens: int
    pairs: int


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Move of document ``out`` to another pack, in return for ``back`` unless that is None."""

    source: _Held
    target: _Held
    out: int
    back: int | None


class Rebalancer:
    """Ranks that even out what they hold alone."""

    def __init__(
        self,
        starts: Sequence[float],
        held: Sequence[Sequence[Sequence[int]]],
        lengths: Sequence[int],
        *,
        room: int,
        seconds: Callable[[int, int], float],
    ) -> None:
        """Take what the ranks hold before anything moves.

        Args:
            starts: Seconds after which each rank is done with the packs that it shares.
            held: Documents of each rank after that, by micro-batch.
            lengths: Number of tokens of each document.
            room: Most tokens of a rank in one micro-batch.
            seconds: Function of the tokens and pairs that one rank holds in one micro-batch.
        """
        self._lengths, self._room, self._seconds = lengths, room, seconds
        self._starts = starts
        self._held = [[self._of(documents) for documents in mine] for mine in held]
        self._work = {n: seconds(n, pairs_of(n)) - seconds(0, 0) for n in sorted(set(lengths))}
        self._ends = [self._end(rank) for rank in range(len(starts))]

    def run(self) -> list[list[list[int]]]:
        """Return the documents of each rank by micro-batch; the last rank ends no later than before."""
        # Each exchange relieves the rank that ends last.
        for _ in range(MOST_EXCHANGES * len(self._starts)):
            last = max(range(len(self._ends)), key=lambda rank: (self._ends[rank], -rank))
            if not self._relieve(last):
                break
        return [[pack.documents for pack in mine] for mine in self._held]

    def _relieve(self, last: int) -> bool:
        """Move work from the last rank to one that ends early; return False when none can take it."""
        by_end = sorted(range(len(self._ends)), key=lambda rank: (self._ends[rank], rank))
        for other in by_end[:MOST_PARTNERS]:
            found = self._best(last, other)
            if found is not None and self._try(found, last, other):
                return True
        return False

    def _best(self, last: int, other: int) -> _Exchange | None:
        """Return the exchange after which the two ranks end most nearly together, or None."""
        # Moving half of the gap lets both end together.
        gap = self._ends[last] - self._ends[other]
        best, best_off = None, gap / 2
        for source in self._held[last]:
            for target in self._held[other]:
                for out in source.documents:
                    for back in (None, *target.documents):
                        moved = self._work_of(out) - self._work_of(back)
                        off = abs(moved - gap / 2)
                        if off < best_off and self._fits(source, target, out, back):
                            best, best_off = _Exchange(source, target, out, back), off
        return best

    def _work_of(self, document: int | None) -> float:
        return 0.0 if document is None else self._work[self._lengths[document]]

    def _fits(self, source: _Held, target: _Held, out: int, back: int | None) -> bool:
        # Both ranks must have room after the exchange.
        more = self._lengths[out] - (0 if back is None else self._lengths[back])
        return target.tokens + more <= self._room and source.tokens - more <= self._room

    def _try(self, found: _Exchange, last: int, other: int) -> bool:
        """Make the exchange, unless tokens that are rounded up spoil it."""
        before = self._ends[last]
        self._move(found.source, found.target, found.out, found.back)
        ends = self._end(last), self._end(other)
        # Undo the exchange.
        if max(ends) >= before:
            self._move(found.target, found.source, found.out, found.back)
            return False
        self._ends[last], self._ends[other] = ends
        return True

    def _move(self, source: _Held, target: _Held, out: int, back: int | None) -> None:
        for document, here, there in ((out, source, target), (back, target, source)):
            if document is not None:
                here.documents.remove(document)
                there.documents.append(document)
        for pack in (source, target):
            pack.tokens, pack.pairs = self._sums(pack.documents)

    def _of(self, documents: Sequence[int]) -> _Held:
        return _Held(list(documents), *self._sums(documents))

    def _sums(self, documents: Sequence[int]) -> tuple[int, int]:
        lengths = [self._lengths[document] for document in documents]
        return sum(lengths), sum(map(pairs_of, lengths))

    def _end(self, rank: int) -> float:
        mine = self._held[rank]
        return self._starts[rank] + sum(self._seconds(pack.tokens, pack.pairs) for pack in mine)
