"""Cuts files into pieces and divides the pieces into groups, one a task.

It owns where files are cut. Groups say who reads what; the dataset does not depend on them, as
`raymega.prepare.assembly` joins what they wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate, pairwise

import pyarrow as pa
from pyarrow import fs

from raymega.prepare.chat.rows import RowFormat
from raymega.prepare.readers.frames import frame_starts
from raymega.prepare.readers.pieces import FilePiece, ShardGroup, SourceFile, open_root
from raymega.prepare.readers.tables import num_record_batches, row_groups
from raymega.prepare.sources import identity_of

# Bounds of a group in bytes; between these bounds a corpus has about ENOUGH_GROUPS groups.
MIN_GROUP_BYTES, MAX_GROUP_BYTES, ENOUGH_GROUPS = 1 << 20, 64 << 20, 64
FILES_IN_FLIGHT = 16
# Part of a group's key: raise it when the files of finished groups change.
GROUPS_VERSION = 2


def make_groups(
    files: Sequence[SourceFile], *, text_key: str = "text", row_format: RowFormat = "text"
) -> list[ShardGroup]:
    """Divide files, in order, into groups of about equal size in storage.

    A group has about 1/64 of the corpus, but at least 1 MiB and at most 64 MiB; powers of two, so
    that a changed file moves few borders. A larger file that cannot be cut makes its group larger.

    Raises:
        OSError: A large file cannot be opened.
    """
    # Cut.
    total = sum(file.num_bytes for file in files)
    target = min(max(total // ENOUGH_GROUPS, MIN_GROUP_BYTES), MAX_GROUP_BYTES)
    target = 1 << (target.bit_length() - 1)
    # Large files are opened, several at a time, as they tell where they can be cut.
    large = [file for file in files if file.num_bytes > target]
    with ThreadPoolExecutor(FILES_IN_FLIGHT, thread_name_prefix="cut") as pool:
        borders = dict(zip(large, pool.map(partial(_borders, target=target), large), strict=True))
    pieces = [piece for file in files for piece in _cut(file, borders.get(file, []))]
    # A piece belongs to the group in whose byte range it ends.
    ends = accumulate(piece.num_bytes for piece in pieces)
    members: dict[int, list[FilePiece]] = {}
    for piece, end in zip(pieces, ends, strict=True):
        members.setdefault((end - 1) // target, []).append(piece)
    return [
        ShardGroup(index=index, pieces=tuple(group), text_key=text_key, row_format=row_format)
        for index, group in enumerate(members.values())
    ]


def with_keys(groups: Sequence[ShardGroup], recipe: dict[str, str]) -> list[ShardGroup]:
    """Return the groups with keys, which name what a preparation keeps of them.

    Args:
        groups: Groups of one corpus.
        recipe: All that tokens depend on beside the files, such as the tokenizer's checksum.
    """
    common = f"{GROUPS_VERSION}\n" + "".join(f"{key}\0{recipe[key]}\n" for key in sorted(recipe))

    def key(group: ShardGroup) -> str:
        # the label is in what a curation writes of each document
        pieces = (
            f"{p.file.root}\0{p.file.label}\0{identity_of(p.file)}{p.start}\0{p.end}\n"
            for p in group.pieces
        )
        text = f"{common}{group.text_key}\n{''.join(pieces)}"
        return blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()

    return [replace(group, key=key(group)) for group in groups]


def _borders(file: SourceFile, target: int) -> list[int]:
    """Return the borders of pieces of about ``target`` bytes; none if the file cannot be cut."""
    cutter = CUTTERS.get((file.form.format, bool(file.form.compression)))
    return cutter(file, target) if cutter else []


def _cut(file: SourceFile, borders: Sequence[int]) -> Iterator[FilePiece]:
    """Yield the pieces of a file between ``borders``; the whole if there are none inside."""
    kind, compression = file.form.format, file.form.compression
    is_text = kind in ("text", "lines", "json", "html") and not compression
    # An empty text is no document; an empty table or archive is a fault, which its reader tells.
    if not file.num_bytes and is_text:
        return
    if len(borders) <= 2:
        yield FilePiece(file=file, start=0, end=file.num_bytes, num_bytes=file.num_bytes)
        return
    # Sizes in storage are those of bytes, or for tables equal parts of the file.
    is_bytes = borders[-1] == file.num_bytes and kind == "lines"
    for start, end in pairwise(borders):
        size = end - start if is_bytes else file.num_bytes * (end - start) // borders[-1]
        yield FilePiece(file=file, start=start, end=end, num_bytes=max(size, 1), is_cut=True)


def _cut_lines(file: SourceFile, target: int) -> list[int]:
    # Any byte: the reader finds the next line.
    return [*range(0, file.num_bytes, target), file.num_bytes]


def _cut_frames(file: SourceFile, target: int) -> list[int]:
    system = open_root(file.root)
    # Frames are found by reading a few bytes at each block: in a store that is a request each.
    if not isinstance(system, fs.LocalFileSystem):
        return []
    with system.open_input_file(file.path) as stream:
        starts = frame_starts(stream, file.num_bytes, file.form.compression)
    sizes = [end - start for start, end in pairwise([*starts, file.num_bytes])]
    return [[*starts, file.num_bytes][index] for index in _joined(sizes, target)]


def _cut_row_groups(file: SourceFile, target: int) -> list[int]:
    try:
        with open_root(file.root).open_input_file(file.path) as stream:
            return _joined(row_groups(stream), target)
    except pa.ArrowInvalid:
        return []  # The reader of the whole file tells what is wrong with it.


def _cut_record_batches(file: SourceFile, target: int) -> list[int]:
    try:
        with open_root(file.root).open_input_file(file.path) as stream:
            num_batches = num_record_batches(stream)
    except pa.ArrowInvalid:
        return []
    return _joined([file.num_bytes // max(num_batches, 1)] * num_batches, target)


def _joined(sizes: Sequence[int], target: int) -> list[int]:
    """Return the borders that join neighbours into ranges of at least ``target``, but the last."""
    borders, size = [0], 0
    for index, each in enumerate(sizes, start=1):
        size += each
        if size >= target or index == len(sizes):
            borders.append(index)
            size = 0
    return borders


Cutter = Callable[[SourceFile, int], list[int]]
CUTTERS: dict[tuple[str, bool], Cutter] = {
    ("lines", False): _cut_lines,
    ("lines", True): _cut_frames,
    ("parquet", False): _cut_row_groups,
    ("arrow", False): _cut_record_batches,
}
