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
BIT = np.uint64(1) << np.arange(64, dtype=np.uint64)
"""Word with bit b alone, [64]."""
FROM = np.uint64(0xFFFFFFFFFFFFFFFF) << np.arange(64, dtype=np.uint64)
"""Word with bit b and all above, [64]."""
LONGEST_ROW = 1 << 18
"""Most tokens of a row whose windows are counted side by side; the counters of longer rows take more memory than
the rows themselves."""
COUNTER_BYTES = 1 << 25
"""Memory of the counters of the windows that are counted side by side."""
MOST_PIECES = 1 << 22
"""Most pieces of the windows that are counted side by side; each takes 40 bytes meanwhile."""


def windows_at_once(seq_len: int, window: int) -> int:
    """Return how many windows of ``window`` pieces are counted side by side."""
    return max(1, min(COUNTER_BYTES // (4 * (seq_len + 1)), MOST_PIECES // window))


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
    """Room left in the rows of many windows: how many rows have each, and which rooms there are.

    Of a whole room, S, there are as many as a window takes: those are its new rows.
    """

    def __init__(self, num_windows: int, seq_len: int) -> None:
        self._seq_len, self._windows = seq_len, np.arange(num_windows)
        self._num_rows = np.zeros(num_windows * (seq_len + 1), dtype=np.int32)
        self._first = self._windows * (seq_len + 1)
        # bit b of level 0 is set if a row has room b; bit w of the next level if word w has a bit
        self._levels, words = list[tuple[Bits, Ints]](), seq_len + 1
        while words > 1 or not self._levels:
            words = -(-words >> 6)
            bits = np.zeros(num_windows * words, dtype=np.uint64)
            self._levels.append((bits, self._windows * words))
        whole = np.full(num_windows, seq_len)
        self._add(whole)
        self._num_rows[self._first + whole] = np.iinfo(np.int32).max

    def place(self, lengths: Ints) -> npt.NDArray[np.bool_]:
        """Place a piece in each of the first windows, [n]; return which of them took a new row."""
        found = self._least(0, self._windows[: len(lengths)], lengths)
        self._remove(found)
        self._add(found - lengths)
        return found == self._seq_len

    def _least(self, level: int, windows: Ints, place: Ints) -> Ints:
        """Return the lowest bit of a level from ``place`` on; there is one in each window."""
        bits, first = self._levels[level]
        word = place >> 6
        seen = bits[first[windows] + word] & FROM[place & 63]
        # where this word has none: the lowest later word that has
        far = np.flatnonzero(seen == 0)
        if len(far):
            word[far] = self._least(level + 1, windows[far], word[far] + 1)
            seen[far] = bits[first[windows[far]] + word[far]]
        return (word << 6) + np.bitwise_count(~seen & (seen - np.uint64(1)))

    def _add(self, room: Ints) -> None:
        """Count one row more of each window's ``room``, [n]."""
        self._num_rows[self._first[: len(room)] + room] += 1
        for bits, first in self._levels:
            bits[first[: len(room)] + (room >> 6)] |= BIT[room & 63]
            room = room >> 6

    def _remove(self, room: Ints) -> None:
        """Count one row less of each window's ``room``, [n]."""
        at = self._first[: len(room)] + room
        left = self._num_rows[at] - 1
        self._num_rows[at] = left
        windows = np.flatnonzero(left == 0)
        room = room[windows]
        # clear upwards while a word becomes empty
        for bits, first in self._levels:
            if not len(windows):
                return
            at = first[windows] + (room >> 6)
            word = bits[at] & ~BIT[room & 63]
            bits[at] = word
            is_empty = word == 0
            windows, room = windows[is_empty], room[is_empty] >> 6
