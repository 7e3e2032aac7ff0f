"""Reads JSON: one object a line, and arrays or sequences of objects.

It owns which line belongs to which piece of a file, and what is wrong with a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from json.decoder import WHITESPACE  # type: ignore[attr-defined]  # the decoder's own pattern
from typing import Any

from raymega.prepare.chat.rows import conversation_text
from raymega.prepare.readers.entries import DamagedError, Entry, Opened
from raymega.prepare.readers.formats import told_by_magic

BOM = b"\xef\xbb\xbf"
MAX_VALUE_CHARACTERS = 1 << 28


def read_json_lines(opened: Opened) -> Iterator[Entry]:
    """Yield a row for each line of the piece; a blank line is an empty row.

    Lines belong to the piece in which they begin; one that begins exactly where a piece ends
    belongs to that piece.
    """
    for row, (offset, line) in enumerate(_lines(opened)):
        text, why = "", ""
        if not row and not opened.piece.start:
            line = line.removeprefix(BOM)
        if line.strip():
            text, why = _line_text(line, opened)
        yield Entry(row=row, place=opened.place_of(offset), text=text, why=why)


def read_json(opened: Opened) -> Iterator[Entry]:
    """Yield a row for each object of an array, or of objects that follow each other.

    Raises:
        DamagedError: The file is not JSON from some byte on, or not UTF-8.
    """
    for row, (offset, value) in enumerate(_Values(opened)):
        text, why = text_of(value, opened)
        yield Entry(row=row, place=offset, text=text, why=why)


def text_of(value: Any, opened: Opened) -> tuple[str, str]:
    """Return the text of a row of a file and, if it has none, the reason."""
    text_key = opened.text_key
    if not isinstance(value, dict):
        return "", f"it is a {type(value).__name__}, not an object"
    if text_key not in value:
        keys = ", ".join(list(value)[:8])
        return (
            "",
            f"it has no {text_key!r}; its keys are {keys or 'none'}; choose one with --text-key",
        )
    if opened.row_format != "text":
        return conversation_text(value, opened.row_format, text_key)
    text = value[text_key]
    # A null is an empty document, as in a column of a table.
    if text is None or isinstance(text, str):
        return text or "", ""
    return "", f"its {text_key!r} is a {type(text).__name__}, not a string"


def _line_text(line: bytes, opened: Opened) -> tuple[str, str]:
    try:
        return text_of(json.loads(line.decode()), opened)
    except UnicodeDecodeError as error:
        return "", f"byte {error.start} of the line is not UTF-8{told_by_magic(line)}"
    except (ValueError, RecursionError) as error:
        return "", f"{type(error).__name__}: {error}"


def _lines(opened: Opened) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of the piece, each with the offset of its first byte."""
    # A line that began before the piece, or where it starts, belongs to the piece before.
    is_skipping = opened.piece.start > 0
    offset, parts = 0, list[bytes]()
    for block in opened.blocks():
        first, *others = block.split(b"\n")
        parts.append(first)
        for other in others:
            line = b"".join(parts)
            if not is_skipping:
                yield offset, line
            is_skipping = False
            offset += len(line) + 1
            parts = [other]
    if is_skipping:
        return
    # The last line may end behind the piece.
    newline = b""
    for block in opened.blocks_beyond():
        head, newline, _ = block.partition(b"\n")
        parts.append(head)
        if newline:
            break
    line = b"".join(parts)
    if line or newline:
        yield offset, line


class _Values:
    """Iterator over the JSON values of a file and their first bytes.

    Memory is bounded by the largest value.
    """

    def __init__(self, opened: Opened) -> None:
        self._blocks, self._decoder = opened.blocks(), json.JSONDecoder()
        # Decoded text, the next character in it, and whether the file ends with it.
        self._text, self._at, self._is_end = "", 0, False
        # A character of the text and its byte in the file: bytes are counted from there.
        self._mark, self._mark_byte = 0, 0
        # Bytes after the text: the first ones of a character that is not whole yet.
        self._tail, self._num_bytes = b"", 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        is_array = self._next_character() == "["
        self._at += is_array
        while (character := self._next_character()) and character != "]":
            place = self._byte(self._at)
            yield place, self._value()
            if is_array:
                self._pass_comma()
        if is_array and not character:
            raise DamagedError(self._byte(self._at), "the array does not end")
        # Nothing may come after an array, and no bracket without one.
        self._at += bool(character)
        if character and (not is_array or self._next_character()):
            raise DamagedError(self._byte(self._at), "there is more after the end")

    def _pass_comma(self) -> None:
        character = self._next_character()
        if character == ",":
            self._at += 1
            if self._next_character() in ("", "]"):
                raise DamagedError(self._byte(self._at), "a value must follow the comma")
        elif character not in ("", "]"):
            raise DamagedError(self._byte(self._at), "a comma must follow the value")

    def _value(self) -> Any:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                # Unfinished, or wrong: more text decides.
                size = len(self._text) - self._at
                if size > MAX_VALUE_CHARACTERS or not self._read(size):
                    place = self._byte(getattr(error, "pos", self._at))
                    raise DamagedError(place, f"{type(error).__name__}: {error}") from error
                continue
            # A number at the end of a block may be continued in the next one.
            if end == len(self._text) and self._read(1):
                continue
            self._at = end
            return value

    def _next_character(self) -> str:
        """Move to the next character that is not white space; return it, or '' at the end."""
        while True:
            self._at = WHITESPACE.match(self._text, self._at).end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read(1):
                return ""

    def _read(self, num_characters: int) -> bool:
        """Add at least ``num_characters`` to the text; return False when the file has ended."""
        if self._is_end:
            return False
        self._mark_byte, self._mark = self._byte(self._at), 0
        parts = [self._text[self._at :]]
        self._text, self._at = "", 0
        while num_characters > 0 and not self._is_end:
            parts.append(self._decode(next(self._blocks, b"")))
            num_characters -= len(parts[-1])
        self._text = "".join(parts)
        return True

    def _decode(self, block: bytes) -> str:
        raw = self._tail + block
        if not self._num_bytes and raw.startswith(BOM):
            raw, self._num_bytes, self._mark_byte = raw[len(BOM) :], len(BOM), len(BOM)
        self._is_end = not block
        # Up to three bytes of a character may be completed by the next block.
        whole = len(raw)
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            if self._is_end or error.reason != "unexpected end of data":
                why = f"byte 0x{raw[error.start]:02x} is not UTF-8{told_by_magic(raw)}"
                raise DamagedError(self._num_bytes + error.start, why) from error
            whole = error.start
            text = raw[:whole].decode()
        self._tail = raw[whole:]
        self._num_bytes += whole
        return text

    def _byte(self, at: int) -> int:
        """Return the byte of a character of the text; counts on from the last one."""
        if at < self._mark:
            return self._mark_byte
        self._mark_byte += len(self._text[self._mark : at].encode())
        self._mark = at
        return self._mark_byte
