"""Selects the files to read, orders them, and chooses the held-out documents.

It owns selection and order, which depend on relative paths alone, so that the same corpus gives the
same dataset on every machine. Folders are listed by `raymega.prepare.readers.listing`, files are grouped by
`raymega.prepare.groups` and read by `raymega.prepare.documents`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import accumulate
from pathlib import PurePosixPath

import pyarrow as pa
from pyarrow import fs

from raymega.errors import ConfigError, Fault, first_few
from raymega.prepare.readers.corpora import is_part_of_unfinished, own_folders
from raymega.prepare.readers.formats import (
    WEB_FORMATS,
    Form,
    form_of,
    missing_library,
    unknown_suffixes,
)
from raymega.prepare.readers.listing import HF_DICT, Listed, list_root, root_of
from raymega.prepare.readers.pieces import SourceFile


def list_files(
    inputs: Sequence[str], *, include: Sequence[str], exclude: Sequence[str]
) -> list[SourceFile]:
    """Return the files of all inputs, each once, in order of their names without suffixes.

    A pattern without '/' is matched against every part of a file's path relative to its input. A
    pattern with '/' is matched against every leading part of that path. Excluding ``test``
    leaves out every folder of that name, excluding ``idlelib/idle_test`` only that one. A file that
    is itself an input is always read.

    Raises:
        ConfigError: An input is missing or of an unknown scheme, a selected file has an unknown
            suffix or cannot be listed, or no file is selected.
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
    if any(file.form.format in WEB_FORMATS for file in files.values()):
        faults += missing_library()
    if faults:
        raise ConfigError(*faults)
    return sorted(files.values(), key=lambda file: (file.form.stem, file.name))


def split_of(text: str, valid_fraction: float) -> str:
    """Return ``train`` or ``valid``, by a hash of the document's text."""
    return "valid" if hash_of(text, "split") < valid_fraction * 2**64 else "train"


def files_digest(files: Sequence[SourceFile]) -> str:
    """Return a digest of the files' names, sizes and modification times; reads no content."""
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(identity_of(file).encode(errors="surrogateescape"))
    return digest.hexdigest()


def identity_of(file: SourceFile) -> str:
    """Return the name, size and modification time of a file, by which a changed one is noticed."""
    return f"{file.name}\0{file.num_bytes}\0{file.modified_ns}\n"


def hash_of(text: str, purpose: str) -> int:
    """Return a hash of ``text`` below 2**64; hashes of other purposes are independent of it."""
    # Names may hold bytes that are no UTF-8, which Python spells as surrogates.
    encoded = text.encode(errors="surrogatepass")
    return int.from_bytes(blake2b(encoded, digest_size=8, person=purpose.encode()).digest())


def _list_input(name: str, include: Sequence[str], exclude: Sequence[str]) -> list[SourceFile]:
    """Return the selected files of one input."""
    root = root_of(name)
    # A file is read whatever the patterns say; a folder is listed with all its subfolders.
    try:
        system, top = fs.FileSystem.from_uri(root)
        info = system.get_file_info(top)
        listed = [_one_file(info, top)] if info.is_file else list_root(system, top)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(_unreadable(name, _reason(error))) from error
    # What raymega wrote beside a corpus is not read, and a corpus that is not whole not at all.
    own = own_folders(each.name for each in listed)
    if info.is_file and is_part_of_unfinished(system, info.path):
        raise ConfigError(_unfinished(name))
    unknown, broken, files, dicts = [], [], [], []
    for each in listed:
        if not info.is_file and PurePosixPath(each.name).name == HF_DICT:
            dicts.append(each.name.removesuffix(HF_DICT))
            continue
        is_left_out = own.has(each.name) or _matches(each.name, exclude)
        if not info.is_file and (is_left_out or not (each.why or _matches(each.name, include))):
            continue
        label = name if info.is_file else f"{name.rstrip('/')}/{each.name}"
        form = form_of(each.name, include)
        if own.is_unfinished(each.name):
            raise ConfigError(_unfinished(label))
        if each.why:
            broken.append(_unlisted(label, each.why))
        elif form is None:
            unknown.append(label)
        else:
            files.append(_source_file(root, each, label, form))
    faults = [*broken[:5], *([unknown_suffixes(unknown)] if unknown else [])]
    faults += _mixed_splits(name, dicts, files)
    if faults:
        raise ConfigError(*faults)
    return files


def _mixed_splits(name: str, dicts: Iterable[str], files: Iterable[SourceFile]) -> Iterator[Fault]:
    """Yield a fault for each DatasetDict of `datasets` of which files of several splits are selected."""
    for top in dicts:
        inside = [each.name.removeprefix(top) for each in files if each.name.startswith(top)]
        splits = sorted({each.partition("/")[0] for each in inside if "/" in each})
        if len(splits) > 1:
            folder = f"{name.rstrip('/')}/{top}"
            one = shlex.quote(f"{folder}{'train' if 'train' in splits else splits[0]}")
            yield Fault(
                fact=f"{folder} is a DatasetDict with the splits {', '.join(splits)}",
                rule="a dataset is made of one split: as one input, their documents would be mixed, and trained on",
                remedy=f"give {one} as the INPUT; the folders of several as INPUTs, to join them",
            )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", "") or str(error).splitlines()[0]


def _one_file(info: fs.FileInfo, top: str) -> Listed:
    return Listed(
        name=PurePosixPath(top).name, path=info.path, num_bytes=info.size, modified_ns=info.mtime_ns
    )


def _source_file(root: str, listed: Listed, label: str, form: Form) -> SourceFile:
    return SourceFile(
        root=root,
        path=listed.path,
        name=listed.name,
        label=label,
        num_bytes=listed.num_bytes,
        modified_ns=listed.modified_ns,
        form=form,
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


def _unlisted(label: str, why: str) -> Fault:
    return Fault(
        fact=f"{label} {why}",
        rule="what is in an INPUT must be files that can be read, each in one place",
        remedy="give the target as an INPUT of its own, or leave it out with --exclude",
    )


def _unreadable(name: str, why: str) -> Fault:
    return Fault(
        fact=f"INPUT {name!r} cannot be read: {why}",
        rule="an input is a file, a folder, or a URI such as s3://bucket/folder",
        remedy="name what exists and is readable on every node",
    )


def _unfinished(name: str) -> Fault:
    return Fault(
        fact=f"INPUT {name!r} is of a corpus that raymega data curate has not finished",
        rule="a corpus is read when it is whole: until then files of it are missing",
        remedy="run its command again to the end, or leave the folder out with --exclude",
    )


def _nothing_selected(
    inputs: Sequence[str], include: Sequence[str], exclude: Sequence[str]
) -> Fault:
    return Fault(
        fact=f"no file is left in {first_few(inputs)}",
        rule=f"a file must match one of --include {' '.join(include)} and none of --exclude "
        f"{' '.join(exclude) or '(nothing)'}",
        remedy="widen --include or drop an --exclude",
    )
