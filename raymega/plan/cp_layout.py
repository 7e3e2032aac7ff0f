"""Compute the tokens of a row that each context-parallel rank holds, and its blocks of attention.

Positions are ranges and blocks are slices. The module moves nothing and multiplies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymega.config.parallel import ParallelSection

TILE = 512
"""Most queries of a block of attention with a window or a cap, whose scores are written out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPart:
    """Block of attention: some of a rank's queries against some keys, both as local indices.

    ``is_causal`` masks what is above the diagonal of a square block; without it everything is seen.
    ``distance`` is the position of the first query less that of the first key. Where it is not 0 the
    diagonal lies there, and the block need not be square.
    """

    queries: slice
    keys: slice
    is_causal: bool
    distance: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Tokens that each rank holds of one document, as two equal halves.

    ``rows`` selects rows of the micro-batch: one, or all where they are alike. ``start`` and
    ``size`` count tokens of a rank.
    """

    rows: slice
    start: int
    size: int

    @property
    def all(self) -> slice:
        """Slice of all the rank's tokens of the document."""
        return slice(self.start, self.start + self.size)

    @property
    def early(self) -> slice:
        """Slice of the chunk that is nearer to the document's start."""
        return slice(self.start, self.start + self.size // 2)

    @property
    def late(self) -> slice:
        """Slice of the chunk that is nearer to the document's end."""
        return slice(self.start + self.size // 2, self.start + self.size)


def inner_ranks(parallel: ParallelSection, method: str = "") -> int:
    """Return the number of neighbours on the cp axis that exchange heads; 1 if none do.

    ``method`` is another one than the job's own ``parallel.cp_method``; empty for that one.
    """
    sizes = {"all_to_all": parallel.cp, "hybrid": parallel.hierarchical_cp_size}
    return sizes.get(method or parallel.cp_method, 1)


def rank_ranges(lengths: Sequence[int], *, cp: int, cp_rank: int) -> tuple[range, ...]:
    """Return the positions of a row that a rank holds, in the order in which it holds them.

    A document is cut into 2 cp chunks, of which rank r holds numbers r and 2 cp - 1 - r: one early
    and one late. Under a causal mask all ranks then have equal work.

    Args:
        lengths: Lengths of the row's documents, each a multiple of 2 cp unless cp is 1.
        cp: Degree of context parallelism.
        cp_rank: Coordinate of the rank on the cp axis.
    """
    ranges: list[range] = []
    begin = 0
    for length in lengths:
        if cp == 1:
            ranges.append(range(begin, begin + length))
        else:
            # zigzag: chunk r with chunk 2 cp - 1 - r
            size = length // (2 * cp)
            firsts = (begin + chunk * size for chunk in (cp_rank, 2 * cp - 1 - cp_rank))
            ranges += (range(first, first + size) for first in firsts)
        begin += length
    return tuple(ranges)


def segments(rows: Sequence[Sequence[int]], *, cp: int) -> tuple[Segment, ...]:
    """Return the segments of a micro-batch's documents, as each of ``cp`` ranks holds them.

    Args:
        rows: Lengths of each row's documents; a single entry stands for all rows.
        cp: Number of ranks that share the tokens.
    """
    found = []
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            # Alike rows are one segment for all.
            where = slice(None) if len(rows) == 1 else slice(row, row + 1)
            found.append(Segment(rows=where, start=start, size=length // cp))
            start += length // cp
    return tuple(found)


def ring_parts(
    segment: Segment, *, here: int, source: int, is_causal: bool
) -> tuple[AttentionPart, ...]:
    """Return the blocks of place ``here``'s queries against the keys of place ``source`` on a ring.

    Chunk r comes before chunk 2 n - 1 - r. A rank's own block is therefore an ordinary causal one.
    Of a lower rank the early keys come before all queries here, and the late ones after. The late
    queries here come after all keys of a higher rank, and the early ones before. Each block of two
    ranks is half a square, and none needs a mask.
    """
    # own keys; then a lower rank's; then a higher rank's
    if source == here or not is_causal:
        return (AttentionPart(queries=segment.all, keys=segment.all, is_causal=is_causal),)
    if source < here:
        return (AttentionPart(queries=segment.all, keys=segment.early, is_causal=False),)
    return (AttentionPart(queries=segment.late, keys=segment.all, is_causal=False),)


def gathered_parts(
    segment: Segment, *, here: int, num_places: int, is_causal: bool
) -> tuple[AttentionPart, ...]:
    """Return the blocks of place ``here``'s queries against all keys that are not its own.

    Keys are those of the whole row in order, where the segment begins at ``num_places`` times its
    local start. Own keys are another block: :func:`ring_parts` with ``here`` as the source.
    """
    chunk, begin = segment.size // 2, segment.start * num_places
    mine = (here, 2 * num_places - 1 - here)

    def between(first: int, last: int) -> slice:
        return slice(begin + first * chunk, begin + last * chunk)

    # The rank's two chunks cut the other keys into three stretches.
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


def tiled_parts(  # noqa: PLR0913  # what one block depends on
    segment: Segment,
    *,
    here: int,
    source: int,
    num_places: int,
    window: int = 0,
    chunk: int = 0,
    is_gathered: bool = False,
) -> Iterator[AttentionPart]:
    """Yield the blocks of place ``here``'s queries against the keys of place ``source`` that they see.

    They are causal and at most ``TILE`` queries high. Keys outside the windows of all queries of a block
    are left out.

    Args:
        segment: Tokens that each place holds of one document.
        here: Place of the queries.
        source: Place of the keys.
        num_places: Number of places that share the document.
        window: Number of tokens that a query sees, itself included; 0 is all earlier ones.
        chunk: Number of tokens of each of the document's chunks, in which a query sees the earlier ones; 0
            is no chunks. A block has queries of one chunk.
        is_gathered: Whether keys are those of the whole row in order, as in :func:`gathered_parts`.
    """
    size = segment.size if num_places == 1 else segment.size // 2
    for q_at, q_first in _chunks(segment, here, num_places):
        for k_at, k_first in _chunks(segment, source, num_places):
            # first index of the keys, less their first position in the document
            shift = segment.start * num_places if is_gathered else k_at - k_first
            for first, last in _tiles(q_first, size, chunk):
                oldest = q_first + first - window + 1 if window else 0
                if chunk:
                    oldest = (q_first + first) // chunk * chunk
                begin, end = max(k_first, oldest), min(k_first + size, q_first + last + 1)
                if begin >= end:
                    continue
                yield AttentionPart(
                    queries=slice(q_at + first, q_at + last + 1),
                    keys=slice(shift + begin, shift + end),
                    is_causal=end - 1 > q_first + first,
                    distance=q_first + first - begin,
                )


def _tiles(q_first: int, size: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last query of each tile, from 0; ``q_first`` is the position of query 0."""
    first = 0
    while first < size:
        border = chunk - (q_first + first) % chunk if chunk else TILE
        end = min(first + min(TILE, border), size)
        yield first, end - 1
        first = end


def _chunks(segment: Segment, place: int, num_places: int) -> Iterator[tuple[int, int]]:
    """Yield the local index and the position in the document of the first token of each chunk."""
    if num_places == 1:
        yield segment.start, 0
        return
    chunk = segment.size // 2
    yield segment.early.start, place * chunk
    yield segment.late.start, (2 * num_places - 1 - place) * chunk
