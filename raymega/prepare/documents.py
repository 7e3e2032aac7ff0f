"""Reads the documents of a group of files, whatever their format and compression.

It owns what a document is, bad lines, and which reader reads which format. The readers are in
`raymega.prepare.readers`; it makes no tokens.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyarrow import fs

from raymega.errors import ConfigError, Fault, first_few
from raymega.prepare.readers.entries import DamagedError, Entry, Opened
from raymega.prepare.readers.formats import Format, told_by_magic
from raymega.prepare.readers.lines import read_json, read_json_lines
from raymega.prepare.readers.long_text import LONG_BYTES, LongText, utf8_bytes
from raymega.prepare.readers.pieces import FilePiece, ShardGroup, open_root
from raymega.prepare.readers.tables import read_arrow, read_parquet
from raymega.prepare.readers.web import read_html, read_warc

REPLACEMENT = "\ufffd"
MAGIC_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Document of the corpus.

    Attributes:
        name: Path of its file and, after ``@``, its place there: a byte or a row number.
        text: Text of the document; in results of :func:`read_documents` it is empty only beside a long text.
        num_bytes: Size in bytes of the encoded text.
        num_replaced: Number of replacement characters inserted for lone surrogates of JSON.
        piece: Index of its piece in the group.
        row: Number of its row in the piece.
        url: Address of the page, where the archive or row names one; else empty.
        long_text: Text that is too long for a string, where the reader was asked for such.
    """

    name: str
    text: str
    num_bytes: int
    num_replaced: int
    piece: int = 0
    row: int = 0
    url: str = ""
    long_text: LongText | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BadLine:
    """Line, row or text file without a document; ``name`` is its file and place."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} has no document ({self.why})"


class Documents:
    """Iterator of a group's non-empty documents, in order; it counts what it has passed.

    Attributes:
        num_rows: Number of rows of each piece that was read, with documents or without.
        bad: Bad lines so far.
    """

    def __init__(self, group: ShardGroup, *, max_bad_lines: int, may_be_long: bool) -> None:
        self.num_rows: list[int] = []
        self.bad: list[BadLine] = []
        self._group, self._max_bad_lines, self._may_be_long = group, max_bad_lines, may_be_long

    def __iter__(self) -> Iterator[Document]:
        # One file system for each input, as opening one may mean a login.
        systems: dict[str, fs.FileSystem] = {}
        for index, piece in enumerate(self._group.pieces):
            system = systems.setdefault(piece.file.root, open_root(piece.file.root))
            self.num_rows.append(0)
            entries = _entries(system, piece, self._group, may_be_long=self._may_be_long)
            # No name refers to a document that is given away: a large one is freed as soon as can be.
            yield from filter(None, map(partial(self._document, piece, index), entries))

    def _document(self, piece: FilePiece, index: int, entry: Entry) -> Document | None:
        self.num_rows[-1] = entry.row + 1
        if entry.why:
            self.refuse(f"{piece.file.label}@{entry.place}", entry.why)
            return None
        return _document(piece, entry, index) if entry.text or entry.long_text else None

    def refuse(self, name: str, why: str) -> None:
        """Count a bad line.

        Raises:
            ConfigError: It is one more than ``max_bad_lines``.
        """
        self.bad.append(BadLine(name=name, why=why))
        if len(self.bad) > self._max_bad_lines:
            raise ConfigError(too_many_bad(self.bad, self._max_bad_lines))


def read_documents(
    group: ShardGroup, *, max_bad_lines: int = 0, may_be_long: bool = False
) -> Documents:
    """Return the non-empty documents of a group, to iterate over once.

    Memory is bounded by the largest document, and by 1,024 rows of a table. With ``may_be_long`` the text of a
    large text file stays in UTF-8.

    Raises:
        ConfigError: While iterating: a file is damaged, has no text, or the group has more than
            ``max_bad_lines`` bad lines. The message has the file and the byte.
    """
    return Documents(group, max_bad_lines=max_bad_lines, may_be_long=may_be_long)


def too_many_bad(bad: list[BadLine], most: int) -> Fault:
    """Return the fault of more bad lines than ``--max-bad-lines`` allows."""
    return Fault(
        fact=first_few([str(line) for line in bad]),
        rule=f"--max-bad-lines allows {most}; a document is UTF-8 text, a line of JSON an object with its text as a "
        "string",
        remedy=f"repair the file, leave it out with --exclude, or skip such lines with --max-bad-lines {len(bad)}",
    )


def _entries(
    system: fs.FileSystem, piece: FilePiece, group: ShardGroup, *, may_be_long: bool
) -> Iterator[Entry]:
    """Yield the rows of a piece; whatever is wrong with the file becomes an error with its place."""
    file = piece.file
    opened = Opened(piece, group.text_key, group.row_format, may_be_long=may_be_long)
    try:
        with system.open_input_file(file.path) as stream:
            yield from READERS[file.form.format](opened.over(stream))
    except DamagedError as error:
        raise ConfigError(_damaged(f"{file.label}@{error.place}", error.why)) from error
    # OSError and ArrowException of reading, decompressing and decoding
    except (OSError, pa.ArrowException, EOFError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}"
        raise ConfigError(_damaged(f"{file.label}@{opened.place}", why)) from error


def _read_text(opened: Opened) -> Iterator[Entry]:
    # No name refers to what is given away.
    yield _text_entry(opened)


def _text_entry(opened: Opened) -> Entry:
    # One document, in memory as a whole: a tokenizer takes no less.
    raw = opened.gather()
    text, place, why = "", 0, ""
    if opened.may_be_long and len(raw) > LONG_BYTES and b"\0" not in raw:
        long_text = LongText(memoryview(raw)[3 if raw.startswith(BOM_UTF8) else 0 :])
        if long_text.is_valid():
            return Entry(row=0, place=0, long_text=long_text)
    nul = raw.find(b"\0")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place, why = (
            error.start,
            f"byte 0x{raw[error.start]:02x} is not UTF-8{told_by_magic(bytes(raw[:MAGIC_BYTES]))}",
        )
    if nul >= 0:
        place, why = nul, f"a NUL byte: it is no text{told_by_magic(bytes(raw[:MAGIC_BYTES]))}"
    return Entry(row=0, place=place, text=text, why=why)


def _document(piece: FilePiece, entry: Entry, index: int) -> Document:
    text, num_replaced = entry.text, 0
    try:
        num_bytes = utf8_bytes(entry.long_text or text)
    except UnicodeEncodeError:
        # JSON can hold lone surrogates (\ud800), which become replacement characters.
        raw = entry.text.encode("utf-8", "surrogatepass")
        text = raw.decode("utf-8", "replace")
        num_replaced = text.count(REPLACEMENT) - entry.text.count(REPLACEMENT)
        num_bytes = len(raw)
    return Document(
        name=f"{piece.file.label}@{entry.place}",
        text=text,
        num_bytes=num_bytes,
        num_replaced=num_replaced,
        piece=index,
        row=entry.row,
        url=entry.url,
        long_text=entry.long_text,
    )


def _damaged(where: str, why: str) -> Fault:
    return Fault(
        fact=f"{where} cannot be read ({why})",
        rule="a file must be whole, and every node must be able to read it",
        remedy="repair the file, or leave it out with --exclude",
    )


READERS: dict[Format, Callable[[Opened], Iterator[Entry]]] = {
    "text": _read_text,
    "lines": read_json_lines,
    "json": read_json,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "html": read_html,
    "warc": read_warc,
}
