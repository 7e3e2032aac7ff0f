"""Sets of hashed shingles as sorted numbers, of which a portion is in memory, and their true similarity.

It owns the portions of a set and what two sets have in common; signatures and pairs are in `near.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryFile

import numpy as np

from raymega.curate.options import Near
from raymega.curate.tokens import Hashes, shingles, token_blocks
from raymega.errors import InternalError
from raymega.prepare.readers.long_text import Text

PORTION_CHARACTERS = 1 << 22
"""Length of the text for each range of hashes: a portion of a set has at most this number, 32 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SortedSet:
    """Set of numbers.

    Attributes:
        size: Number of its numbers.
        portions: Function that yields them, in order, in sorted portions.
    """

    size: int
    portions: Callable[[], Iterator[Hashes]]


def set_of(found: Hashes) -> SortedSet:
    """Return the set of sorted numbers in memory."""
    return SortedSet(size=len(found), portions=lambda: iter((found,)))


def shingle_set(text: Text, options: Near) -> Hashes:
    """Return the hashes of the shingles of a text, each once, in order."""
    return np.concatenate([np.zeros(0, dtype=np.uint64), *shingle_portions(text, options)])


def shingle_portions(text: Text, options: Near) -> Iterator[Hashes]:
    """Yield the set of a text's shingles in portions; those of a long text are sorted by ranges in files."""
    num_ranges = -(-len(text) // PORTION_CHARACTERS)
    if num_ranges < 2:
        found = [np.zeros(0, dtype=np.uint64), *_block_sets(text, options)]
        yield np.unique(np.concatenate(found))
        return
    borders = [(number << 64) // num_ranges for number in range(1, num_ranges)]
    inner = np.array(borders, dtype=np.uint64)
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile()) for _ in range(num_ranges)]
        for block in _block_sets(text, options):
            places = [0, *np.searchsorted(block, inner).tolist(), len(block)]
            for number, file in enumerate(files):
                file.write(block[places[number] : places[number + 1]].tobytes())
        for file in files:
            file.seek(0)
            yield np.unique(np.frombuffer(file.read(), dtype=np.uint64))


def _block_sets(text: Text, options: Near) -> Iterator[Hashes]:
    """Yield the shingles of each block of a text, sorted."""
    is_long, hashes = False, np.zeros(0, dtype=np.uint64)
    for tokens, _ in token_blocks(text, kept=options.words - 1):
        hashes = tokens.hashes
        if len(hashes) >= options.words:
            is_long = True
            yield np.unique(shingles(hashes, options.words))
    # The whole of a text of fewer words is its one shingle.
    if not is_long:
        yield shingles(hashes, options.words)


def jaccard(first: Hashes, second: Hashes) -> float:
    """Return the share of the union of two sets that lies in both; sets are sorted."""
    return similarity(set_of(first), set_of(second))


def similarity(first: SortedSet, second: SortedSet) -> float:
    """Return the Jaccard similarity of two sets, of each of which a portion is in memory."""
    if not first.size or not second.size:
        return 0.0
    common = _count_common(first.portions(), second.portions())
    return common / (first.size + second.size - common)


def _count_common(firsts: Iterator[Hashes], seconds: Iterator[Hashes]) -> int:
    """Return how many numbers two sets share.

    Raises:
        InternalError: A set is not sorted.
    """
    nothing, common = np.zeros(0, dtype=np.uint64), 0
    first = second = nothing
    while True:
        first = first if len(first) else next(filter(len, firsts), nothing)
        second = second if len(second) else next(filter(len, seconds), nothing)
        if not len(first) or not len(second):
            return common
        # What both have up to the smaller of the last numbers.
        last = min(first[-1], second[-1])
        ends = [int(np.searchsorted(each, last, side="right")) for each in (first, second)]
        if not any(ends):
            raise InternalError(
                fact=f"of two sets of shingles none has a number up to {last}, the end of one of their portions",
                rule="portions of a set are sorted, or their comparison would not end",
                remedy="report this as a bug, with the recipe",
            )
        small, large = sorted((first[: ends[0]], second[: ends[1]]), key=len)
        if len(small):
            places = np.minimum(np.searchsorted(large, small), len(large) - 1)
            common += int(np.count_nonzero(large[places] == small))
        first, second = first[ends[0] :], second[ends[1] :]
