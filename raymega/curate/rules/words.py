"""Splits a text into words and marks for the published rules, and counts repetitions in it.

It owns the numbers that rules compare; limits are in the modules of the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

# Marks that come off the beginning and the end of what stands between spaces, one by one.
_OUTER = frozenset(",:;!?()[]{}<>_#*&\"'`\u00b4\u00a1\u00a7\u00ab\u00bb\u00bf\u2013\u2014\u2018\u2019\u201a\u201c\u201d"
                   "\u201e\u2026\u2039\u203a\u061f\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f$\u00a3\u20ac\u00a5")  # fmt: skip
_BEFORE, _AFTER = _OUTER | frozenset("%=+"), _OUTER
_ADDRESS = re.compile(r"(?:https?|ftp)://\S+[\w/]|www\.\S+[\w/]|[\w.+-]+@[\w-]+\.[\w.-]*\w")
_DOTTED = re.compile(
    r"(?:[A-Za-z]\.)+|(?:[Ee]\.g|[Ii]\.e|Mrs?|Ms|Dr|Prof|St|Jr|Sr|Inc|Ltd|Co|Corp|vs|Jan|Feb|Mar|Apr|Aug|Sept?|Oct"
    r"|Nov|Dec|Gen|Gov|Rep|Rev|Sen|Bros|Messrs|Adm|Mt|Ph\.D|[ap]\.m)\."
)
_ENDINGS = ("'s", "'S", "\u2019s", "\u2019S", "...", "\u2014", "\u2013")
_CONTRACTION = re.compile(r"(?i)(.+?)(n['\u2019]t|['\u2019](?:m|d|re|ve|ll))$")
# Marks between letters, at which a word is cut; a dash and its like between digits.
_INNER = re.compile(
    r"(\.{2,}|\u2026|(?<=[^\W_])(?:--+|[-\u2013\u2014~])(?=[^\W\d_])|(?<=[^\W_])[:<>=/](?=[^\W\d_])|(?<=[^\W\d_]),(?=[^\W\d_])"
    r"|(?<=[a-z'\"])\.(?=[A-Z'\"])|(?<=\d)[+*^-](?=[\d-]))"
)
# Longer chunks are not kept, and very long ones are split in parts: rows of marks, encoded pictures, packed scripts.
CACHED_CHARACTERS, LONGEST_CHUNK = 100, 4000


@lru_cache(maxsize=1 << 17)
def _split(chunk: str) -> tuple[str, ...]:
    """Return the words and marks of what stands between two spaces, as a parser of English cuts it."""
    before, after = list[str](), list[str]()
    while chunk and not _is_whole(chunk):
        if chunk[0] in _BEFORE or chunk.startswith("..."):
            mark = "..." if chunk.startswith("...") else chunk[0]
            before.append(mark)
            chunk = chunk[len(mark) :]
        elif ending := _ending(chunk):
            after.append(ending)
            chunk = chunk[: -len(ending)]
        else:
            break
    if not chunk or _is_whole(chunk):
        return (*before, *filter(None, (chunk,)), *reversed(after))
    found = _CONTRACTION.fullmatch(chunk)
    inner = found.groups() if found else filter(None, _INNER.split(chunk))
    return (*before, *inner, *reversed(after))


def _split_any(chunk: str) -> Sequence[str]:
    """Return the same of a chunk of any length: a very long one is cut, as time grows with its square."""
    if len(chunk) <= CACHED_CHARACTERS:
        return _split(chunk)
    cuts = range(0, len(chunk), LONGEST_CHUNK)
    parts = (_split.__wrapped__(chunk[at : at + LONGEST_CHUNK]) for at in cuts)
    return [word for part in parts for word in part]


def _is_whole(chunk: str) -> bool:
    if chunk.isalnum() or _DOTTED.fullmatch(chunk):
        return True
    # The pattern is slow on a row of underscores, and asked about each end of it.
    may_be_address = "@" in chunk or "://" in chunk or chunk.startswith("www.")
    return may_be_address and _ADDRESS.fullmatch(chunk) is not None


def _ending(chunk: str) -> str:
    """Return what comes off the end of a chunk, or nothing."""
    for each in _ENDINGS:
        if chunk.endswith(each):
            return each
    if chunk[-1] in _AFTER:
        return chunk[-1]
    # A full stop behind small letters, digits and marks, or two capitals.
    if chunk[-1] == "." and len(chunk) > 1:
        last = chunk[-2]
        if (
            last.islower()
            or last.isdigit()
            or last in "%+-\u00b2\u2019\u201d)]}'\""
            or chunk[-3:-1].isupper()
        ):
            return "."
    return ""


MARKS = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~\u00a1\u00ab\u00bb\u00b7\u00bf\u2010\u2011\u2012\u2013\u2014\u2015"
                  "\u2018\u2019\u201a\u201c\u201d\u201e\u2022\u2026\u2039\u203a\u3001\u3002\u300c\u300d\u3010\u3011"
                  "\uff01\uff08\uff09\uff0c\uff0e\uff1a\uff1b\uff1f\uff5e")  # fmt: skip


class Words:
    """Words of a text.

    Attributes:
        text: The text.
        words: Words and marks, in order.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        chunks = text.split()
        split = _split if max(map(len, chunks), default=0) <= CACHED_CHARACTERS else _split_any
        self.words: list[str] = list(chain.from_iterable(map(split, chunks)))

    @cached_property
    def proper(self) -> list[str]:
        """Words that are more than marks."""
        return [word for word in self.words if word not in MARKS and not MARKS.issuperset(word)]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of characters of each word, [N]."""
        return np.fromiter(map(len, self.words), dtype=np.int64, count=len(self.words))

    @cached_property
    def _numbers(self) -> npt.NDArray[np.int64]:
        # Equal words have equal numbers.
        numbers: dict[str, int] = {}
        found = (numbers.setdefault(word, len(numbers)) for word in self.words)
        return np.fromiter(found, dtype=np.int64, count=len(self.words))

    def runs(self, size: int) -> npt.NDArray[np.int64]:
        """Return a number for each run of ``size`` words, [N - size + 1]; equal runs have equal ones."""
        count = len(self.words) - size + 1
        numbers = self._numbers[: max(count, 0)]
        for offset in range(1, size if count > 0 else 1):
            pairs = numbers * (len(self.words) + 1) + self._numbers[offset : offset + count]
            _, numbers = np.unique(pairs, return_inverse=True)
        return numbers

    def run_lengths(self, size: int) -> npt.NDArray[np.int64]:
        """Return the number of characters in each run of ``size`` words, without spaces."""
        sums = np.concatenate([[0], np.cumsum(self.lengths)])
        return sums[size:] - sums[:-size]

    def top_share(self, size: int) -> float:
        """Return the share of the text's characters in the most frequent run of ``size`` words."""
        runs = self.runs(size)
        if not len(runs):
            return 0.0
        # The first of those that are equally frequent, as spaces between words count too.
        counts = np.bincount(runs)[runs]
        first = int(counts.argmax())
        length = int(self.run_lengths(size)[first]) + size - 1
        return length * int(counts[first]) / len(self.text)

    def repeated_share(self, runs: npt.NDArray[np.int64], size: int, limit: float) -> float:
        """Return the share of the text's characters in repeated runs, none counted twice.

        Below ``limit`` the result is an upper bound, which is faster.
        """
        lengths, most = self.run_lengths(size), len(self.text)
        _, first = np.unique(runs, return_index=True)
        is_repeated = np.ones(len(runs), dtype=bool)
        is_repeated[first] = False
        # Characters of all words in any repeated run are at least those of runs that do not overlap.
        marks = np.zeros(len(self.words) + 1, dtype=np.int64)
        starts = np.flatnonzero(is_repeated)
        np.add.at(marks, starts, 1)
        np.add.at(marks, starts + size, -1)
        bound = int(self.lengths[np.cumsum(marks)[:-1] > 0].sum()) / most
        return bound if bound <= limit else _walk(runs.tolist(), lengths, size) / most


def _walk(runs: Sequence[int], lengths: npt.NDArray[np.int64], size: int) -> int:
    seen, found, at = set[int](), 0, 0
    while at < len(runs):
        if runs[at] in seen:
            found += int(lengths[at])
            at += size
        else:
            seen.add(runs[at])
            at += 1
    return found


def repeats(parts: Iterable[str]) -> tuple[int, int]:
    """Return how many of the parts stood before, and the characters in these."""
    seen, number, characters = set[str](), 0, 0
    for part in parts:
        if part in seen:
            number += 1
            characters += len(part)
        else:
            seen.add(part)
    return number, characters
