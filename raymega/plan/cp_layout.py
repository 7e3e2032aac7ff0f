"""Which tokens of a row each context-parallel rank holds, and which blocks of attention that makes.

Pure: positions as ranges, blocks as slices. It moves nothing and multiplies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raymega.config.parallel import ParallelSection


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPart:
    """One block of attention: some of a rank's queries against some keys, both as local indices.

    ``is_causal`` masks what lies above the diagonal of a square block; without it all is seen.
    """

    queries: slice
    keys: slice
    is_causal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One document of one row, or of all rows alike, as each rank holds it: two equal halves.

    ``rows`` selects rows of the micro-batch; ``start`` and ``size`` are tokens of a rank.
    """

    rows: slice
    start: int
    size: int

    @property
    def all(self) -> slice:
        """The rank's tokens of it."""
        return slice(self.start, self.start + self.size)

    @property
    def early(self) -> slice:
        """Those of the chunk nearer to the document's begin."""
        return slice(self.start, self.start + self.size // 2)

    @property
    def late(self) -> slice:
        """Those of the chunk nearer to its end."""
        return slice(self.start + self.size // 2, self.start + self.size)


def inner_ranks(parallel: ParallelSection) -> int:
    """How many neighbours on the cp axis exchange heads."""
    return {"all_to_all": parallel.cp, "hybrid": parallel.hierarchical_cp_size}.get(
        parallel.cp_method, 1
    )


def rank_ranges(lengths: Sequence[int], *, cp: int, cp_rank: int) -> tuple[range, ...]:
    """Positions of a row that a rank holds, in the order in which it holds them.

    A document is cut into 2 cp chunks, of which rank r holds numbers r and 2 cp - 1 - r: one early
    and one late, so that under a causal mask all ranks have equal work.

    Args:
        lengths: Of the row's documents, each a multiple of 2 cp unless cp is 1.
        cp: Context-parallel degree.
        cp_rank: Coordinate on that axis.
    """
    ranges: list[range] = []
    begin = 0
    for length in lengths:
        if cp == 1:
            ranges.append(range(begin, begin + length))
        else:
            size = length // (2 * cp)
            firsts = (begin + chunk * size for chunk in (cp_rank, 2 * cp - 1 - cp_rank))
            ranges += (range(first, first + size) for first in firsts)
        begin += length
    return tuple(ranges)


def segments(rows: Sequence[Sequence[int]], *, cp: int) -> tuple[Segment, ...]:
    """How each of ``cp`` ranks holds the documents of a micro-batch.

    Args:
        rows: Lengths of each row's documents; a single entry stands for all rows.
        cp: Ranks that share the tokens out.
    """
    found = []
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            where = slice(None) if len(rows) == 1 else slice(row, row + 1)
            found.append(Segment(rows=where, start=start, size=length // cp))
            start += length // cp
    return tuple(found)


def ring_parts(
    segment: Segment, *, here: int, source: int, is_causal: bool
) -> tuple[AttentionPart, ...]:
    """Blocks of place ``here``'s queries against the keys of place ``source`` on a ring.

    Chunk r comes before chunk 2 n - 1 - r. So a rank's own block is an ordinary causal one; of a
    rank before it the early keys come before all its queries, and the late ones after; its late
    queries come after all keys of a rank behind it, and its early ones before. Each block of two
    ranks is half a square, and none needs a mask.
    """
    if source == here or not is_causal:
        return (AttentionPart(queries=segment.all, keys=segment.all, is_causal=is_causal),)
    if source < here:
        return (AttentionPart(queries=segment.all, keys=segment.early, is_causal=False),)
    return (AttentionPart(queries=segment.late, keys=segment.all, is_causal=False),)


def gathered_parts(
    segment: Segment, *, here: int, num_places: int, is_causal: bool
) -> tuple[AttentionPart, ...]:
    """Blocks of place ``here``'s queries against all keys that are not its own.

    Keys are those of the whole row in order, where the segment begins at ``num_places`` times its
    local start. Own keys are another block: :func:`ring_parts` with ``here`` as the source.
    """
    chunk, begin = segment.size // 2, segment.start * num_places
    mine = (here, 2 * num_places - 1 - here)

    def between(first: int, last: int) -> slice:
        return slice(begin + first * chunk, begin + last * chunk)

    before, inside = between(0, mine[0]), between(mine[0] + 1, mine[1])
    behind = between(mine[1] + 1, 2 * num_places)
    inner = segment.late if is_causal else segment.all
    parts = [
        AttentionPart(queries=segment.all, keys=before, is_causal=False),
        AttentionPart(queries=inner, keys=inside, is_causal=False),
    ]
    if not is_causal:
        parts.append(AttentionPart(queries=segment.all, keys=behind, is_causal=False))
    return tuple(part for part in parts if part.keys.start < part.keys.stop)
