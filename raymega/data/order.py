"""The order of the data: which window a global sample is, by arithmetic alone.

It owns a keyed permutation per epoch; it reads nothing and knows no grid, so that any layout that
asks for the same samples gets the same windows.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt

ROUNDS = 3


def sample_window(seed: int, num_windows: int, sample: int) -> int:
    """The window that global sample ``sample`` holds.

    Every epoch of ``num_windows`` samples visits each window once, in an order of its own.

    Args:
        seed: Of the run.
        num_windows: Windows of the split.
        sample: Counted from the start of the run, over all ranks.
    """
    epoch, index = divmod(sample, num_windows)
    return permute(index, num_windows, key=f"{seed}/{epoch}".encode())


def permute(index: int, size: int, *, key: bytes) -> int:
    """Where a keyed permutation of range(size) sends ``index``; O(1), nothing is stored.

    A generalised Feistel network (Black and Rogaway 2002, section 5) on the smallest near-square
    that holds range(size): each round moves a row by a hash of the column, then a column by a hash
    of the row, so each round is a bijection. Results outside range(size) walk on along their
    cycle, which at fewer than isqrt(size) + 1 places too many is rare.
    """
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
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
