"""Finds near duplicates: MinHash and bands for pairs (Broder 1997; Leskovec et al., chapter 3), then their true similarity.

It owns signatures, pairs and which document of verified pairs goes. Every removal has a kept
document whose shingles have at least the threshold's Jaccard similarity with its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import cast

import numpy as np
import numpy.typing as npt

from raymega.curate.document import CuratedDocument
from raymega.curate.duplicates.keys import REMOVAL, id_numbers, order_of, part_of
from raymega.curate.duplicates.shingle_sets import SortedSet, shingle_portions, similarity
from raymega.curate.options import Near
from raymega.curate.plan import Stage
from raymega.curate.recipe import StepSpec
from raymega.curate.spool import SetSpool
from raymega.curate.state import (
    PORTION_NUMBERS,
    Arrays,
    Rows,
    State,
    get_keys,
    get_parts,
    put_table,
    runs,
)
from raymega.curate.tokens import Hashes, mix

BAND = np.dtype(
    [("band", "<u8"), ("high", "<u8"), ("low", "<u8"), ("group", "<u4"), ("row", "<u4")]
)
# The document with the larger id, which may be removed, and the other.
PAIR = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("group", "<u4"), ("row", "<u4"),
     ("other_high", "<u8"), ("other_low", "<u8"), ("other_group", "<u4"), ("other_row", "<u4"), ("score", "<f8")]
)  # fmt: skip
NEIGHBOURS = 64
"""Number of documents of one bucket that each is compared with, and the smallest id."""
HASHED_AT_ONCE = 1024
PAIRS_AT_ONCE = 1 << 16


def signature(found: Hashes, options: Near) -> npt.NDArray[np.uint32]:
    """Return the MinHashes of a set, [bands * rows]."""
    factors, terms = _permutations(options.bands * options.rows, options.seed)
    smallest = np.full(len(factors), 0xFFFFFFFF, dtype=np.uint32)
    for start in range(0, len(found), HASHED_AT_ONCE):
        block = found[None, start : start + HASHED_AT_ONCE]
        values = ((block * factors[:, None] + terms[:, None]) >> np.uint64(32)).astype(np.uint32)
        np.minimum(smallest, values.min(axis=1), out=smallest)
    return smallest


def band_keys(minima: npt.NDArray[np.uint32], options: Near) -> Hashes:
    """Return a key for each band of a signature, [bands]; equal bands have equal keys."""
    keys = mix(np.arange(options.bands, dtype=np.uint64))
    for column in minima.reshape(options.bands, options.rows).T:
        keys = mix(keys + column)
    return keys


class BandCollector:
    """Bands and shingles of the documents of a group."""

    def __init__(self, spec: StepSpec, num_parts: int) -> None:
        self._options, self._num_parts = cast(Near, spec.options), num_parts
        self._rows, self._sets = list[Rows](), SetSpool()

    def add(self, document: CuratedDocument, row: int) -> None:
        """Take a document, which is the one with number ``row`` of the group; one without words has no bands."""
        smallest = signature(np.zeros(0, dtype=np.uint64), self._options)
        is_empty = True

        def counted() -> Iterator[Hashes]:
            nonlocal is_empty
            for portion in shingle_portions(document.text, self._options):
                is_empty = is_empty and not len(portion)
                np.minimum(smallest, signature(portion, self._options), out=smallest)
                yield portion

        self._sets.add(counted())
        if is_empty:
            return
        rows = np.zeros(self._options.bands, dtype=BAND)
        rows["band"] = band_keys(smallest, self._options)
        rows["high"], rows["low"] = id_numbers(document)
        rows["row"] = row
        self._rows.append(rows)

    def write(self, state: State, folder: str, name: str) -> None:
        """Write ``FOLDER/sets/NAME`` and the table ``FOLDER/keys/NAME``."""
        self._sets.write(state, f"{folder}/sets/{name}")
        rows = np.concatenate(self._rows) if self._rows else np.zeros(0, dtype=BAND)
        parts = part_of(rows["band"], self._num_parts)
        put_table(state, f"{folder}/keys/{name}", rows, parts, self._num_parts)


def find_pairs(rows: Rows) -> Rows:
    """Return the pairs of documents that share a band, each once, in order.

    In a bucket of more than 64 documents each is paired with the 64 before it and the first, by id.
    """
    rows = rows[order_of(rows, "band", "high", "low")]
    rank, first = runs(rows["band"])
    lasts, others = [], []
    for distance in range(1, min(int(rank.max(initial=0)), NEIGHBOURS) + 1):
        at = np.flatnonzero(rank >= distance)
        lasts.append(at)
        others.append(at - distance)
    far = np.flatnonzero(rank > NEIGHBOURS)
    last, other = np.concatenate([*lasts, far]), np.concatenate([*others, first[far]])
    pairs = np.zeros(len(last), dtype=PAIR)
    for name in ("high", "low", "group", "row"):
        pairs[name], pairs[f"other_{name}"] = rows[name][last], rows[name][other]
    return np.unique(pairs)


def write_pairs(
    part: int, *, state: State, stage: Stage, names: Sequence[str], num_parts: int
) -> None:
    """Find the pairs of one part of all tables, and write ``pairs/PART`` by the larger id's group."""
    rows = get_keys(state, stage.folder, names, part, num_parts, BAND)
    pairs = find_pairs(rows)
    put_table(state, f"{stage.whole_folder}/pairs/{part:05d}", pairs, pairs["group"], len(names))


def verify_pairs(
    group: int, *, state: State, stage: Stage, names: Sequence[str], num_parts: int, options: Near
) -> None:
    """Compute the similarity of a group's pairs, and write those above the threshold to ``verified/NAME``."""
    tables = [f"{stage.whole_folder}/pairs/{part:05d}" for part in range(num_parts)]
    pairs = np.unique(get_parts(state, tables, group, len(names), PAIR))

    @lru_cache(maxsize=8)
    def arrays(number: int) -> Arrays:
        # Those of this group are asked for with every pair, and in a store each question is a request.
        name = f"{stage.folder}/sets/{names[number]}"
        return Arrays(state, name, is_whole=number == group)

    # Each other document is read once, unless it is large; those of this group are few.
    pairs, other, before = pairs[order_of(pairs, "other_group", "other_row")], None, None
    for pair in pairs:
        place = int(pair["other_group"]), int(pair["other_row"])
        if other is None or place != before:
            other, before = _sorted_set(arrays(place[0]), place[1]), place
        own = _sorted_set(arrays(group), int(pair["row"]))
        pair["score"] = similarity(own, other)
    verified = pairs[pairs["score"] >= options.threshold]
    state.put(f"{stage.whole_folder}/verified/{names[group]}", verified.tobytes())


def _sorted_set(arrays: Arrays, row: int) -> SortedSet:
    """Return a document's set; one of few numbers is read now, another a portion at a time."""
    size = arrays.size(row)
    found = list(arrays.portions(row)) if size <= PORTION_NUMBERS else None
    portions = partial(arrays.portions, row) if found is None else partial(iter, found)
    return SortedSet(size=size, portions=portions)


def choose_removals(pairs: Rows) -> tuple[Rows, Rows]:
    """Return what is removed, and the group of each.

    In the order of ids a document is removed if a kept one of a smaller id is similar to it.
    """
    pairs = pairs[order_of(pairs, "high", "low", "other_high", "other_low")]
    removed, found, groups = set[tuple[int, int]](), list[tuple[int | float, ...]](), list[int]()
    # Some at a time, as a row as a tuple of Python has seven times the size.
    blocks = (pairs[start : start + PAIRS_AT_ONCE] for start in range(0, len(pairs), PAIRS_AT_ONCE))
    for pair in chain.from_iterable(block.tolist() for block in blocks):
        high, low, group, row, other_high, other_low, _, _, score = pair
        if (high, low) in removed or (other_high, other_low) in removed:
            continue
        removed.add((high, low))
        found.append((row, 0, other_high, other_low, score))
        groups.append(group)
    return np.array(found, dtype=REMOVAL), np.array(groups, dtype=np.int64)


def write_removals(state: State, stage: Stage, names: Sequence[str]) -> None:
    """Choose among all verified pairs, and write the table ``removed/00000`` by group."""
    folder = stage.whole_folder
    contents = state.get_all([f"{folder}/verified/{name}" for name in names])
    pairs = np.concatenate([np.frombuffer(content, dtype=PAIR) for content in contents])
    found, groups = choose_removals(pairs)
    order = np.lexsort([found["row"], groups])
    put_table(state, f"{folder}/removed/00000", found[order], groups[order], len(names))


@lru_cache(maxsize=8)
def _permutations(count: int, seed: int) -> tuple[Hashes, Hashes]:
    numbers = mix(np.arange(2 * count, dtype=np.uint64) + np.uint64((seed << 20) % (1 << 64)))
    return numbers[:count] | np.uint64(1), numbers[count:]
