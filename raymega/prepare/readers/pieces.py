"""Values that say which file, which part of it and which group of parts is read.

`raymega.prepare.sources` makes files, `raymega.prepare.groups` pieces and groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyarrow import fs

from raymega.prepare.chat.rows import RowFormat
from raymega.prepare.readers.formats import Form


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """File selected for reading.

    Attributes:
        root: URI of the input that it belongs to; determines the file system of ``path``.
        path: Path in the root's file system.
        name: Path relative to the root; its stem determines the order.
        label: Path for messages and for tracing: the input as given, and the name.
        num_bytes: Size of the file in bytes.
        modified_ns: Time of the last modification, in nanoseconds since the epoch.
        form: Format and compression, from the name.
    """

    root: str
    path: str
    name: str
    label: str
    num_bytes: int
    modified_ns: int
    form: Form


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePiece:
    """Part of a file that one task reads: the whole, or a range of it.

    Attributes:
        file: The file.
        start: Start of the range: a byte, or the number of a row group or record batch of a table.
        end: End of the range, in the same units.
        num_bytes: Size in bytes of the piece in storage.
        is_cut: Whether it is a part only.
    """

    file: SourceFile
    start: int
    end: int
    num_bytes: int
    is_cut: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardGroup:
    """Group of pieces that one task tokenises.

    Attributes:
        index: Number of the group in the order of the corpus.
        pieces: Pieces, in order.
        text_key: Key or column of the text.
        row_format: Form of a row: a text, or conversations.
        key: Digest of all that its tokens depend on; names its files.
    """

    index: int
    pieces: tuple[FilePiece, ...]
    text_key: str = "text"
    row_format: RowFormat = "text"
    key: str = ""


def open_root(root: str) -> fs.FileSystem:
    """Return the file system of an input's root URI."""
    return fs.FileSystem.from_uri(root)[0]
