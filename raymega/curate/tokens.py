"""Splits text into words and hashes runs of them, many characters at a time.

It owns what a word is for duplicates, decontamination and the quality model: a run of letters, marks
and digits; in scripts without spaces each character. It knows nothing of documents.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from raymega.prepare.readers.long_text import Text

Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]

BLOCK_CHARACTERS = 1 << 20
"""Length of the texts that are hashed at once; a longer one is cut between words where it can be."""
# Scripts that write words without spaces: Thai, Lao, Tibetan, Myanmar, Khmer, kana, and Han.
UNSPACED = (
    (0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0xFF66, 0xFF9D),
    (0x1AFF0, 0x1B16F), (0x20000, 0x3FFFD),
)  # fmt: skip
SEPARATOR, LETTER, ALONE = 0, 1, 2

# Odd constants of splitmix64 (Steele, Lea, Flood 2014) and an odd base of the polynomial.
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN, _BASE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_BASE_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Words of a text.

    Attributes:
        hashes: Hash of each word in lower case, [N].
        starts: First character of each word, [N].
        ends: Character after each word, [N].
    """

    hashes: Hashes
    starts: Positions
    ends: Positions

    def since(self, first: int) -> Tokens:
        """Return the words from number ``first`` on."""
        return Tokens(
            hashes=self.hashes[first:], starts=self.starts[first:], ends=self.ends[first:]
        )


def tokenize(text: Text) -> Tokens:
    """Return the words of a text; memory beside the text is bounded by the number of words."""
    return _joined([tokens for tokens, _ in token_blocks(text)])


def token_blocks(text: Text, *, kept: int = 0) -> Iterator[tuple[Tokens, int]]:
    """Yield the words of a text a block at a time, so that memory is bounded by a block.

    Each block begins with the last ``kept`` words of those before it, whose number comes second. Runs of
    ``kept + 1`` words in the blocks are those of the text, each once.
    """
    last, at = _joined([]), 0
    while at < len(text):
        block = _block(text, at)
        tokens = _joined([last, _tokenize(_lower(block), at)])
        yield tokens, len(last.hashes)
        last = tokens.since(max(len(tokens.hashes) - kept, 0))
        at += len(block)


def _joined(parts: Sequence[Tokens]) -> Tokens:
    nothing = np.zeros(0, dtype=np.int64)
    return Tokens(
        hashes=np.concatenate([nothing.astype(np.uint64), *(part.hashes for part in parts)]),
        starts=np.concatenate([nothing, *(part.starts for part in parts)]),
        ends=np.concatenate([nothing, *(part.ends for part in parts)]),
    )


def shingles(hashes: Hashes, num_words: int) -> Hashes:
    """Return the hash of each run of ``num_words`` words, [N - num_words + 1], in order.

    A text of fewer words has one run, the whole; a text without words has none.
    """
    num_words = min(num_words, len(hashes))
    if not num_words:
        return hashes
    count = len(hashes) - num_words + 1
    found = np.zeros(count, dtype=np.uint64)
    for offset in range(num_words):
        found = mix(found * _M1 + hashes[offset : offset + count])
    return found


def mix(values: Hashes) -> Hashes:
    """Return splitmix64 of each value: a permutation of the 64-bit numbers that scatters them."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _M1
    values = (values ^ (values >> np.uint64(27))) * _M2
    return values ^ (values >> np.uint64(31))


def _block(text: Text, at: int) -> str:
    """Return the block from ``at``: up to behind a space in its last half, or any character if there is none."""
    block = text[at : at + BLOCK_CHARACTERS]
    if at + len(block) == len(text):
        return block
    space = max(block.rfind(" ", BLOCK_CHARACTERS // 2), block.rfind("\n", 1))
    return block[: space + 1] if space > 0 else block


def _lower(text: str) -> str:
    # Positions must stay: a few capitals become two characters in lower case.
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(small if len(small := each.lower()) == 1 else each for each in text)


def _tokenize(text: str, offset: int) -> Tokens:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    kinds = _kinds()[codes]
    # A word begins at a letter after no letter, and at every character that stands alone.
    before = np.concatenate([[SEPARATOR], kinds[:-1]])
    begins = (kinds == ALONE) | ((kinds == LETTER) & (before != LETTER))
    starts = np.flatnonzero(begins)
    after = np.concatenate([kinds[1:], [SEPARATOR]])
    ends = np.flatnonzero((kinds == ALONE) | ((kinds == LETTER) & (after != LETTER))) + 1
    # Hash of a word: the polynomial of its characters, as a difference of prefix sums modulo 2**64.
    up, down = _powers(len(codes) + 1)
    terms = mix(codes.astype(np.uint64)) * up[: len(codes)]
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])
    hashes = mix((sums[ends] - sums[starts]) * down[starts])
    return Tokens(hashes=hashes, starts=starts + offset, ends=ends + offset)


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """Return the kind of each code point, [0x110000]."""
    kinds = np.zeros(0x110000, dtype=np.uint8)
    # Letters, marks and digits; the planes above these hold none.
    for code in range(0x32000):
        kinds[code] = LETTER if unicodedata.category(chr(code))[0] in "LNM" else SEPARATOR
    for first, last in UNSPACED:
        part = kinds[first : last + 1]
        part[part == LETTER] = ALONE
    return kinds


@cache
def _powers_of(size: int) -> tuple[Hashes, Hashes]:
    ones = np.ones(size, dtype=np.uint64)
    ones[1:] = _BASE
    up = np.multiply.accumulate(ones)
    ones[1:] = _BASE_INVERSE
    return up, np.multiply.accumulate(ones)


def _powers(size: int) -> tuple[Hashes, Hashes]:
    # A few sizes, each made once in a process.
    return _powers_of(max(1 << 12, 1 << (size - 1).bit_length()))
