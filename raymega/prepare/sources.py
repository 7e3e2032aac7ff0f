"""Selects the files to read, divides them into groups, and chooses the held-out documents.

It owns selection, order and groups. All three depend on relative paths and sizes alone, so that the
same corpus gives the same shards on every machine. Files are read by `raymega.prepare.documents`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path, PurePosixPath

import pyarrow as pa
from pyarrow import fs

from raymega.errors import ConfigError, Fault

# Bounds of a group in bytes; between these bounds a corpus has about ENOUGH_GROUPS groups.
MIN_GROUP_BYTES, MAX_GROUP_BYTES, ENOUGH_GROUPS = 1 << 20, 64 << 20, 64
SPLITTABLE_SUFFIX = ".jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """File selected for reading.

    Attributes:
        root: URI of the input that it belongs to; determines the file system of ``path``.
        path: Path in the root's file system.
        name: Path relative to the root; determines order and split.
        num_bytes: Size of the file in bytes.
        modified_ns: Time of the last modification, in nanoseconds since the epoch.
    """

    root: str
    path: str
    name: str
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePiece:
    """Bytes [start, end) of a file: the whole file, or the lines that begin in that range."""

    file: SourceFile
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardGroup:
    """Group of pieces that one task converts to one shard of each split."""

    index: int
    pieces: tuple[FilePiece, ...]


def list_files(
    inputs: Sequence[str], *, include: Sequence[str], exclude: Sequence[str]
) -> list[SourceFile]:
    """Return the files of all inputs, each once, in order of input and name.

    A pattern without '/' is matched against every part of a file's path relative to its input. A
    pattern with '/' is matched against every leading part of that path. Excluding ``test``
    leaves out every folder of that name, excluding ``idlelib/idle_test`` only that one. A file that
    is itself an input is always read.

    Raises:
        ConfigError: An input is missing or of an unknown scheme, or no file is selected.
    """
    faults: list[Fault | str] = []
    files: dict[tuple[str, str], SourceFile] = {}
    # A file that two inputs hold is kept once, under the first. All faults are reported together.
    for name in inputs:
        try:
            for file in _list_input(name, include, exclude):
                files.setdefault((file.root.partition("://")[0], file.path), file)
        except ConfigError as error:
            faults += error.faults
    if not files and not faults:
        faults.append(_nothing_selected(inputs, include, exclude))
    if faults:
        raise ConfigError(*faults)
    return list(files.values())


def make_groups(files: Sequence[SourceFile]) -> list[ShardGroup]:
    """Divide files into groups of about equal size, each a random sample of the corpus.

    Pieces are ordered by a hash of their names. A group has about 1/64 of the corpus, but at least
    1 MiB and at most 64 MiB. A larger file that cannot be cut makes its group larger.
    """
    # Cut and shuffle.
    total = sum(file.num_bytes for file in files)
    target = min(max(total // ENOUGH_GROUPS, MIN_GROUP_BYTES), MAX_GROUP_BYTES)
    pieces = [piece for file in files for piece in _cut(file, target)]
    pieces.sort(key=lambda piece: _hash(f"{piece.file.name}@{piece.start}", "order"))
    # A piece belongs to the group in whose byte range it ends.
    ends = accumulate(piece.end - piece.start for piece in pieces)
    members: dict[int, list[FilePiece]] = {}
    for piece, end in zip(pieces, ends, strict=True):
        members.setdefault((end - 1) // target, []).append(piece)
    return [ShardGroup(index=i, pieces=tuple(group)) for i, group in enumerate(members.values())]


def split_of(document: str, valid_fraction: float) -> str:
    """Return ``train`` or ``valid``, by a hash of the document's name."""
    return "valid" if _hash(document, "split") < valid_fraction * 2**64 else "train"


def files_digest(files: Sequence[SourceFile]) -> str:
    """Return a digest of the files' names, sizes and modification times; reads no content."""
    digest = blake2b(digest_size=16)
    # Sorted, so that the order of the inputs does not matter.
    for line in sorted(f"{f.name}\0{f.num_bytes}\0{f.modified_ns}\n" for f in files):
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def open_root(root: str) -> fs.FileSystem:
    """Return the file system of an input's root URI."""
    return fs.FileSystem.from_uri(root)[0]


def _list_input(name: str, include: Sequence[str], exclude: Sequence[str]) -> Iterator[SourceFile]:
    """Yield the selected files of one input, ordered by path."""
    root = name if "://" in name else Path(name).expanduser().absolute().as_uri()
    # A file is read whatever the patterns say; a folder is listed with all its subfolders.
    try:
        system, top = fs.FileSystem.from_uri(root)
        info = system.get_file_info(top)
        if info.is_file:
            yield _source_file(root, info, PurePosixPath(top).name)
            return
        found = system.get_file_info(fs.FileSelector(top, recursive=True))
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(_unreadable(name, str(error).splitlines()[0])) from error
    for info in sorted((info for info in found if info.is_file), key=lambda info: info.path):
        relative = info.path.removeprefix(top).lstrip("/")
        if _matches(relative, include) and not _matches(relative, exclude):
            yield _source_file(root, info, relative)


def _source_file(root: str, info: fs.FileInfo, name: str) -> SourceFile:
    return SourceFile(
        root=root, path=info.path, name=name, num_bytes=info.size, modified_ns=info.mtime_ns
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # "a/b/c": parts are a, b, c; folders are a, a/b, a/b/c.
    parts = name.split("/")
    folders = list(accumulate(parts, "{}/{}".format))
    return any(
        fnmatchcase(part, pattern.rstrip("/"))
        for pattern in patterns
        for part in (folders if "/" in pattern.rstrip("/") else parts)
    )


def _cut(file: SourceFile, target: int) -> Iterator[FilePiece]:
    # Only JSON lines can be cut at any byte: documents.py finds the next line.
    step = target if file.name.endswith(SPLITTABLE_SUFFIX) else max(file.num_bytes, 1)
    for start in range(0, file.num_bytes, step):
        yield FilePiece(file=file, start=start, end=min(start + step, file.num_bytes))


def _hash(name: str, purpose: str) -> int:
    encoded = name.encode(errors="surrogateescape")
    return int.from_bytes(blake2b(encoded, digest_size=8, person=purpose.encode()).digest())


def _unreadable(name: str, why: str) -> Fault:
    return Fault(
        fact=f"INPUT {name!r} cannot be read: {why}",
        rule="an input is a file, a folder, or a URI such as s3://bucket/folder",
        remedy="name what exists and is readable on every node",
    )


def _nothing_selected(
    inputs: Sequence[str], include: Sequence[str], exclude: Sequence[str]
) -> Fault:
    return Fault(
        fact=f"no file is left in {', '.join(inputs)}",
        rule=f"a file must match one of --include {' '.join(include)} and none of --exclude "
        f"{' '.join(exclude) or '(nothing)'}",
        remedy="widen --include or drop an --exclude",
    )
