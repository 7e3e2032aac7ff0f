"""Maps suffixes of file names to formats and compressions, and refuses names that have none.

It owns the table of suffixes. Files are opened and read by `raymega.prepare.documents`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Literal

from raymega.errors import Fault, first_few

Format = Literal["text", "json", "lines", "parquet", "arrow", "html", "warc"]
# Names of pyarrow's codecs.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# Prose, settings and source code; a file is one document.
TEXT_SUFFIXES = """
.txt .text .md .markdown .rst .tex .adoc .org .po .srt .vtt
.py .pyi .pyx .ipy .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .java .kt .scala .groovy .cs .fs .go .rs .rb .php
.js .mjs .jsx .ts .tsx .vue .css .scss .swift .m .mm .lua .pl .pm .r .jl .hs .ml .mli .clj .ex .exs .erl .el
.lisp .scm .f .f90 .asm .s .sh .bash .zsh .fish .bat .ps1 .sql .proto .thrift .tf .cmake .mk
.yaml .yml .toml .ini .cfg .conf .properties .v .sv .vhd .dart .nim .zig .d .pas .vb .tcl .awk .diff .patch
"""
FORMATS: dict[str, Format] = {
    **dict.fromkeys(TEXT_SUFFIXES.split(), "text"),
    ".json": "json",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".warc": "warc",
}
WEB_FORMATS: tuple[Format, ...] = ("html", "warc")
MAGIC = {
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"BZh": ".bz2",
    b"PAR1": ".parquet",
    b"ARROW1": ".arrow",
    b"\x89PNG": ".png",
    b"%PDF": ".pdf",
    b"PK\x03\x04": ".zip",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Form of a file, from its name.

    Attributes:
        format: Format of the documents.
        compression: Name of pyarrow's codec, or empty.
        stem: Name without the suffixes of format and compression. All forms of one corpus have
            equal stems, so that what depends on names is the same for all of them.
    """

    format: Format
    compression: str
    stem: str


def form_of(name: str, include: Sequence[str]) -> Form | None:
    """Return the form of a file; None for an unknown suffix that no pattern spells out.

    Args:
        name: Path of the file relative to its input.
        include: Patterns of ``--include``. One that ends with an unknown suffix, such as
            ``*.log``, or is the file's whole name, such as ``LICENSE``, makes the file a text.
    """
    base, suffix = _split_suffix(name)
    compression = COMPRESSIONS.get(suffix, "")
    if not compression:
        base = name
    stem, suffix = _split_suffix(base)
    if suffix in FORMATS:
        return Form(format=FORMATS[suffix], compression=compression, stem=stem)
    # The pattern must spell out the suffix, or the whole name where there is none.
    last, ending = PurePosixPath(name).name, _ending(name)
    patterns = [pattern.rpartition("/")[2] for pattern in include if pattern.endswith(ending)]
    if any(fnmatchcase(last, pattern) for pattern in patterns):
        return Form(format="text", compression=compression, stem=stem)
    return None


def unknown_suffixes(names: Sequence[str]) -> Fault:
    """Return the fault of files whose suffix is none of the known ones."""
    endings = sorted({_ending(name) for name in names})
    patterns = [f"*{each}" if each.startswith(".") else each for each in endings]
    admit, leave = (
        " ".join(f"--{word} '{each}'" for each in patterns[:5]) for word in ("include", "exclude")
    )
    return Fault(
        fact=f"no known suffix: {first_few(names)}",
        rule="a file is read by its suffix: .json .jsonl .ndjson .parquet .arrow .html .htm .warc, a text such as "
        ".txt .md .py, each also with .gz .zst .bz2",
        remedy=f"leave them out with {leave}, or read them as texts with {admit} --include '*'",
    )


def missing_library() -> list[Fault]:
    """Return a fault if the library that reads web pages is not installed."""
    if find_spec("resiliparse") and find_spec("fastwarc"):
        return []
    return [
        Fault(
            fact="resiliparse is not installed",
            rule="it reads .html and .warc files",
            remedy="run `pip install 'raymega[web]'` on every node, or leave them out with --exclude '*.html'",
        )
    ]


def told_by_magic(raw: bytes) -> str:
    """Return a hint for a message when the first bytes are those of another format; else empty."""
    found = next((suffix for magic, suffix in MAGIC.items() if raw.startswith(magic)), "")
    return f"; its first bytes are those of {found}" if found else ""


def _ending(name: str) -> str:
    """Return the suffixes of format and compression, or the last part of a name without any."""
    base, suffix = _split_suffix(name)
    if suffix not in COMPRESSIONS:
        base, suffix = name, ""
    return (PurePosixPath(base).suffix or PurePosixPath(base).name) + suffix


def _split_suffix(name: str) -> tuple[str, str]:
    suffix = PurePosixPath(name).suffix
    return name.removesuffix(suffix) if suffix else name, suffix.lower()
