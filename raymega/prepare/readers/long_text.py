"""Text of many megabytes as UTF-8, of which a portion at a time is decoded.

As a string of Python such a text takes up to four bytes a character, and each list of its lines or words
several times that. It owns portions, sections and the building of a changed text; it knows no documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

LONG_BYTES = 16 << 20
"""Size in UTF-8 from which on a text is a :class:`LongText`."""
PORTION_BYTES = 1 << 20
"""Size of what is decoded at once."""
_CONTINUED, _MASK = 0x80, 0xC0
LINE_END = re.compile("\n")


class LongText:
    """Text that is indexed like a string, by slices of characters; a portion at a time is decoded."""

    def __init__(self, content: bytes | bytearray | memoryview) -> None:
        """Take over bytes of UTF-8, in which lone surrogates have three bytes each; they are not copied."""
        self.content = memoryview(content).cast("B")

    @property
    def num_bytes(self) -> int:
        """Size in UTF-8."""
        return len(self.content)

    def __len__(self) -> int:
        return int(self._characters[-1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LongText) or self.num_bytes != other.num_bytes:
            return False
        at = range(0, self.num_bytes, PORTION_BYTES)
        return all(
            bytes(self.content[start : start + PORTION_BYTES])
            == bytes(other.content[start : start + PORTION_BYTES])
            for start in at
        )

    __hash__ = None  # type: ignore[assignment]  # as of a list: a digest would read the whole

    def __getitem__(self, place: slice) -> str:
        start, end, step = place.indices(len(self))
        assert step == 1, "a text is cut, not thinned"
        if start >= end:
            return ""
        # The portions that hold the characters from the first to the last.
        first = int(np.searchsorted(self._characters, start, side="right")) - 1
        last = int(np.searchsorted(self._characters, end, side="left"))
        text = self._decoded(int(self._starts[first]), int(self._starts[last]))
        before = int(self._characters[first])
        return text[start - before : end - before]

    def portions(self) -> Iterator[str]:
        """Yield the text in strings of about a megabyte."""
        for start, end in zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True):
            yield self._decoded(start, end)

    def sections(self) -> Iterator[str]:
        """Yield strings which joined are the text; each but the last ends with a line end.

        A section has about a megabyte, or one line that is longer.
        """
        waiting = list[str]()
        for portion in self.portions():
            whole, end, rest = portion.rpartition("\n")
            if end:
                yield "".join([*waiting, whole, end])
                waiting = []
            waiting.append(rest)
        yield "".join(waiting)

    def is_valid(self) -> bool:
        """Return whether the bytes are UTF-8, without lone surrogates."""
        try:
            for start, end in zip(
                self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True
            ):
                str(self.content[start:end], "utf-8")
        except UnicodeDecodeError:
            return False
        return True

    def stripped(self) -> LongText:
        """Return the text without white space at its ends."""
        start, end = 0, self.num_bytes
        for portion in self.portions():
            left = portion.lstrip()
            start += _num_bytes(portion) - _num_bytes(left)
            if left:
                break
        for first in reversed(self._starts[:-1].tolist()):
            portion = self._decoded(max(first, start), end) if end > max(first, start) else ""
            left = portion.rstrip()
            end -= _num_bytes(portion) - _num_bytes(left)
            if left:
                break
        return LongText(self.content[start : max(start, end)])

    def _decoded(self, start: int, end: int) -> str:
        return str(self.content[start:end], "utf-8", "surrogatepass")

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        """First byte of each portion, and the size of the text; no character is cut."""
        starts = [0]
        while (at := starts[-1] + PORTION_BYTES) < self.num_bytes:
            while at > starts[-1] + 1 and self.content[at] & _MASK == _CONTINUED:
                at -= 1
            starts.append(at)
        return np.array([*starts, self.num_bytes] if self.num_bytes else [0], dtype=np.int64)

    @cached_property
    def _characters(self) -> npt.NDArray[np.int64]:
        """Number of characters before each portion, and of all."""
        counts, whole = [0], np.frombuffer(self.content, dtype=np.uint8)
        for start, end in zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True):
            counts.append(int(np.count_nonzero(whole[start:end] & _MASK != _CONTINUED)))
        return np.cumsum(counts, dtype=np.int64)


Text = str | LongText
"""Text of a document: a string, or a long one."""


class TextBuilder:
    """Text that is put together from pieces; it is a long one as soon as it is too large for a string."""

    def __init__(self) -> None:
        self._pieces, self._size, self._content = list[str](), 0, bytearray()

    def add(self, piece: str) -> None:
        """Append a piece."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size >= PORTION_BYTES:
            self._pack()

    def add_slice(self, text: Text, start: int, end: int) -> None:
        """Append the characters from ``start`` to ``end`` of a text, a portion at a time."""
        for at in range(start, end, PORTION_BYTES):
            self.add(text[at : min(at + PORTION_BYTES, end)])

    def build(self) -> Text:
        """Return the text, and be empty."""
        if not self._content:
            text = "".join(self._pieces)
            self._pieces, self._size = [], 0
            return text
        self._pack()
        content, self._content = self._content, bytearray()
        return long_or_short(content)

    def _pack(self) -> None:
        self._content += "".join(self._pieces).encode("utf-8", "surrogatepass")
        self._pieces, self._size = [], 0


def long_or_short(content: bytes | bytearray | memoryview) -> Text:
    """Return the text of UTF-8: a string if it is small."""
    text = LongText(content)
    return text if text.num_bytes > LONG_BYTES else text[:]


def utf8_bytes(text: Text) -> int:
    """Return the size of a text in UTF-8.

    Raises:
        UnicodeEncodeError: A string has lone surrogates.
    """
    if isinstance(text, LongText):
        return text.num_bytes
    if text.isascii():
        return len(text)
    parts = range(0, len(text), PORTION_BYTES)
    return sum(len(text[at : at + PORTION_BYTES].encode()) for at in parts)


def _num_bytes(portion: str) -> int:
    """Return the size of a portion in a :class:`LongText`, which may have lone surrogates."""
    return len(portion.encode("utf-8", "surrogatepass"))


def portions_of(text: Text) -> Iterable[str]:
    """Return strings which joined are the text."""
    return text.portions() if isinstance(text, LongText) else (text,)


def split_text(text: Text, pattern: re.Pattern[str] = LINE_END) -> Iterator[str]:
    """Yield what ``pattern.split`` returns; of a long text a piece at a time.

    Args:
        text: The text.
        pattern: Pattern without groups, whose matches depend on what they match alone.
    """
    if isinstance(text, str):
        yield from pattern.split(text)
        return
    buffer, waiting, size = "", list[str](), 0
    for portion in text.portions():
        waiting.append(portion)
        size += len(portion)
        # Of a piece that is longer than a portion twice as much is looked at each time.
        if size < len(buffer):
            continue
        buffer, start = "".join([buffer, *waiting]), 0
        waiting, size = [], 0
        for found in pattern.finditer(buffer):
            # It may continue in the next portion.
            if found.end() == len(buffer):
                break
            yield buffer[start : found.start()]
            start = found.end()
        buffer = buffer[start:]
    yield from pattern.split("".join([buffer, *waiting]))


def split_lines(text: Text) -> Iterator[str]:
    """Yield what ``splitlines`` returns; of a long text a section at a time."""
    for section in (text,) if isinstance(text, str) else text.sections():
        yield from section.splitlines()


def stripped(text: Text) -> Text:
    """Return a text without white space at its ends."""
    return text.strip() if isinstance(text, str) else text.stripped()
