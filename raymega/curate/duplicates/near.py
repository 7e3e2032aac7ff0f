"""Finds near duplicates: MinHash and bands for pairs (Broder 1997; Leskovec et al., chapter 3), then their true similarity.

It owns signatures, pairs and which document of verified pairs goes. Every removal has a kept
document whose shingles have at least the threshold's Jaccard similarity with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import cast

import numpy as np
import numpy.typing as npt

from raymega.curate.document import CuratedDocument
from raymega.curate.duplicates.keys import REMOVAL, id_numbers, order_of, part_of
from raymega.curate.options import Near
from raymega.curate.plan import Stage
from raymega.curate.recipe import StepSpec
from raymega.curate.state import (
    Arrays,
    Rows,
    State,
    get_keys,
    get_parts,
    put_arrays,
    put_table,
    runs,
)
from raymega.curate.tokens import Hashes, mix, shingles, token_blocks

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


def shingle_set(text: str, options: Near) -> Hashes:
    """Return the hashes of the shingles of a text, each once, in order."""
    found, hashes = list[Hashes](), np.zeros(0, dtype=np.uint64)
    for tokens, _ in token_blocks(text, kept=options.words - 1):
        hashes = tokens.hashes
        if len(hashes) >= options.words:
            found.append(np.unique(shingles(hashes, options.words)))
    # The whole of a text of fewer words is its one shingle.
    if len(found) < 2:
        return found[0] if found else shingles(hashes, options.words)
    whole = np.concatenate(found)
    found.clear()
    # In place, as a document may be large.
    whole.sort()
    return whole[np.concatenate([[True], whole[1:] != whole[:-1]])]


def jaccard(first: Hashes, second: Hashes) -> float:
    """Return the share of the union of two sets that lies in both; sets are sorted."""
    if not len(first) or not len(second):
        return 0.0
    small, large = sorted((first, second), key=len)
    places = np.minimum(np.searchsorted(large, small), len(large) - 1)
    common = int(np.count_nonzero(large[places] == small))
    return common / (len(first) + len(second) - common)


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

    def __init__(self, spec: StepSpec) -> None:
        self._options = cast(Near, spec.options)
        self._rows, self._sets = list[Rows](), list[Hashes]()

    def add(self, document: CuratedDocument, row: int) -> None:
        """Take a document, which is the one with number ``row`` of the group; one without words has no bands."""
        found = shingle_set(document.text, self._options)
        self._sets.append(found)
        if not len(found):
            return
        rows = np.zeros(self._options.bands, dtype=BAND)
        rows["band"] = band_keys(signature(found, self._options), self._options)
        rows["high"], rows["low"] = id_numbers(document)
        rows["row"] = row
        self._rows.append(rows)

    def write(self, state: State, folder: str, name: str, num_parts: int) -> None:
        """Write ``FOLDER/sets/NAME`` and the table ``FOLDER/keys/NAME``."""
        put_arrays(state, f"{folder}/sets/{name}", self._sets)
        rows = np.concatenate(self._rows) if self._rows else np.zeros(0, dtype=BAND)
        put_table(state, f"{folder}/keys/{name}", rows, part_of(rows["band"], num_parts), num_parts)


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

    # Each other document is read once; those of this group are few.
    pairs, other, before = pairs[order_of(pairs, "other_group", "other_row")], None, None
    for pair in pairs:
        place = int(pair["other_group"]), int(pair["other_row"])
        if other is None or place != before:
            other, before = arrays(place[0])[place[1]], place
        pair["score"] = jaccard(arrays(group)[int(pair["row"])], other)
    verified = pairs[pairs["score"] >= options.threshold]
    state.put(f"{stage.whole_folder}/verified/{names[group]}", verified.tobytes())


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
