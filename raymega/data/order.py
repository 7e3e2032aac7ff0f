"""Computes the order of the data: the window of each global sample, by arithmetic alone.

It owns a keyed permutation per epoch. It reads no data and does not depend on the grid, so that
every layout gets the same windows for the same samples.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt

ROUNDS = 3


def sample_window(seed: int, num_windows: int, sample: int) -> int:
    """Return the window of global sample ``sample``.

    Every epoch of ``num_windows`` samples visits each window once, in its own order.

    Args:
        seed: Seed of the run's random numbers.
        num_windows: Number of windows of the split.
        sample: Index of the sample, counted from the start of the run over all ranks.
    """
    # a new permutation in every epoch
    epoch, index = divmod(sample, num_windows)
    return permute(index, num_windows, key=f"{seed}/{epoch}".encode())


def permute(index: int, size: int, *, key: bytes) -> int:
    """Apply a keyed permutation of range(size) to ``index``, in O(1) expected time and memory.

    The permutation is a generalised Feistel network (Black and Rogaway 2002, section 5) on the
    smallest near-square that contains range(size). Each round moves a row by a hash of the column,
    then a column by a hash of the row, so each round is a bijection. Results outside range(size)
    are permuted again until they are inside (cycle walking). That is rare, as the near-square has
    fewer than isqrt(size) + 1 extra places.
    """
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    # cycle walking ends: the permutation returns to the index inside range(size) at the latest
    while True:
        row, column = divmod(index, columns)
        for round_ in range(ROUNDS):
            row = (row + _hash(key, 2 * round_, column)) % rows
            column = (column + _hash(key, 2 * round_ + 1, row)) % columns
        index = row * columns + column
        if index < size:
            return index


def _hash(key: bytes, round_: int, value: int) -> int:
    digest = blake2b(b"%b/%d/%d" % (key, round_, value), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
