"""Counts the rows that packing makes, all windows at once, without laying any out.

Best fit puts a piece into a row with the least room that suffices. Which of several equal rows it takes does
not change the room that is left, so the number of rows follows from how many rows have each room. Those
numbers are kept for many windows side by side, with a tree of bits to find the least room that suffices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]
ALL, ONE = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(1)
LEVELS = 3
LONGEST_ROW = (1 << 6 * LEVELS) - 64
"""Most tokens of a row that the tree of bits reaches."""
COUNTER_BYTES = 1 << 25
"""Memory of the counters of the windows that are counted side by side."""


def windows_at_once(seq_len: int) -> int:
    """Return how many windows are counted side by side."""
    return max(1, COUNTER_BYTES // (4 * (seq_len + 1)))


def count_rows(lengths: Ints, seq_len: int) -> Ints:
    """Return the rows of each window by best fit decreasing, [W].

    Args:
        lengths: Tokens of each window's pieces, at most ``seq_len``, and 0 where it has fewer, [W, P].
        seq_len: Number of tokens of a row, at most LONGEST_ROW.
    """
    # windows with most pieces first: those that have one more are a prefix
    longest = -np.sort(-lengths, axis=1)
    sizes = np.count_nonzero(longest, axis=1)
    order = np.argsort(-sizes, kind="stable")
    longest, sizes = np.ascontiguousarray(longest[order].T), sizes[order]
    room = _Room(len(lengths), seq_len)
    rows = np.zeros(len(lengths), dtype=np.int64)
    active = np.searchsorted(-sizes, -np.arange(len(longest)), side="left")
    for piece, count in enumerate(active.tolist()):
        if not count:
            break
        rows[:count] += room.place(longest[piece, :count])
    found = np.empty_like(rows)
    found[order] = rows
    return found


class _Room:
    """Room left in the rows of many windows: how many rows have each, and which rooms there are."""

    def __init__(self, num_windows: int, seq_len: int) -> None:
        self._seq_len = seq_len
        self._num_rows = np.zeros((num_windows, seq_len + 1), dtype=np.int32)
        # bit b of level 0 is set if a row has room b; bit w of the next level if word w has a bit
        self._levels, words = list[Bits](), seq_len + 1
        for _ in range(LEVELS):
            words = (words >> 6) + 1
            self._levels.append(np.zeros((num_windows, words), dtype=np.uint64))

    def place(self, lengths: Ints) -> npt.NDArray[np.bool_]:
        """Place a piece in each of the first windows, [n]; return which of them took a new row."""
        windows = np.arange(len(lengths))
        found = self._least(windows, lengths)
        is_new = found < 0
        old = windows[~is_new]
        self._remove(old, found[old])
        left = np.where(is_new, self._seq_len, found) - lengths
        held = windows[left > 0]
        self._add(held, left[held])
        return is_new

    def _least(self, windows: Ints, lengths: Ints) -> Ints:
        """Return the least room of at least ``lengths`` in each window, -1 where there is none."""
        found = np.full(len(windows), -1, dtype=np.int64)
        # up: the first level that has a bit at or after the place
        waiting, place = windows, lengths
        for level, bits in enumerate(self._levels):
            word = place >> 6
            seen = bits[waiting, word] & (ALL << (place & 63).astype(np.uint64))
            is_there = seen != 0
            if is_there.any():
                at = (word[is_there] << 6) + _lowest(seen[is_there])
                found[waiting[is_there]] = self._descend(waiting[is_there], at, level)
            waiting, place = waiting[~is_there], word[~is_there] + 1
            inside = place >> 6 < self._levels[min(level + 1, LEVELS - 1)].shape[1]
            waiting, place = waiting[inside], place[inside]
            if not len(waiting):
                break
        return found

    def _descend(self, windows: Ints, at: Ints, level: int) -> Ints:
        """Return the lowest room below bit ``at`` of a level."""
        for bits in self._levels[:level][::-1]:
            at = (at << 6) + _lowest(bits[windows, at])
        return at

    def _add(self, windows: Ints, room: Ints) -> None:
        self._num_rows[windows, room] += 1
        for bits in self._levels:
            bits[windows, room >> 6] |= ONE << (room & 63).astype(np.uint64)
            room = room >> 6

    def _remove(self, windows: Ints, room: Ints) -> None:
        self._num_rows[windows, room] -= 1
        # clear upwards while a word becomes empty
        is_empty = self._num_rows[windows, room] == 0
        for bits in self._levels:
            windows, room = windows[is_empty], room[is_empty]
            if not len(windows):
                return
            word = room >> 6
            bits[windows, word] &= ~(ONE << (room & 63).astype(np.uint64))
            is_empty, room = bits[windows, word] == 0, word


def _lowest(words: Bits) -> Ints:
    """Return the number of the lowest set bit of each word, which is not 0."""
    return np.bitwise_count((words & (~words + ONE)) - ONE).astype(np.int64)
