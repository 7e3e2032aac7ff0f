"""Lines of a trace as values: what a rank launched, copied, sent, waited for and touched, in the host's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LEGACY_STREAM = 0
"""CUDA's default stream, which a trace writes as (nil)."""
HOST_STREAM = -1
"""The host's own operations on pinned memory, which copies read and write beside it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of memory: ``begin`` up to, not including, ``end``."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Access:
    """An operation on a stream, with the memory that it reads and writes; ``thread`` launched it."""

    number: int
    thread: int
    stream: int
    what: str
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """An event recorded on a stream."""

    stream: int
    event: str


@dataclass(frozen=True, slots=True)
class StreamWait:
    """A stream that waits for an event; the host does not."""

    stream: int
    event: str


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host behind a stream, an event (``name``), or, with neither, the whole device.

    ``is_blocking`` is false for a query of an event that was complete.
    """

    thread: int
    stream: int | None = None
    event: str = ""
    is_blocking: bool = True


Entry = Access | Record | StreamWait | HostWait


def read_trace(lines: Iterable[str]) -> Iterator[Entry]:
    """Yield what orders or touches memory; launches without a note of their memory are left out."""
    for line in lines:
        number, thread, kind, *fields = line.rstrip("\n").split("\t")
        match kind:
            case "note":
                stream, what, reads, writes = fields[0].split("|")
                yield Access(
                    int(number), int(thread), int(stream, 16), what, _spans(reads), _spans(writes)
                )
            case "nccl":
                stream, what, source, sent, target, received, *_ = fields
                reads, writes = _span(source, sent), _span(target, received)
                # in place, the rank's own part lies inside the result and is read only
                if what == "all_gather":
                    writes = _without(writes, reads)
                yield Access(
                    int(number), int(thread), _stream(stream), f"nccl {what}", reads, writes
                )
            case "copy":
                # a copy reads and writes equally many bytes
                stream, way, size, _, source, target = fields
                yield Access(
                    int(number),
                    int(thread),
                    _stream(stream),
                    f"copy {way}",
                    _span(source, size),
                    _span(target, size),
                )
            case "record":
                yield Record(_stream(fields[0]), fields[1])
            case "wait":
                yield StreamWait(_stream(fields[0]), fields[1])
            case "sync" | "query":
                yield _host_wait(int(thread), fields, is_blocking=kind == "sync")


def _host_wait(thread: int, fields: list[str], *, is_blocking: bool) -> HostWait:
    match fields:
        case ["stream", stream]:
            return HostWait(thread, stream=_stream(stream))
        case ["event", event]:
            return HostWait(thread, event=event, is_blocking=is_blocking)
    return HostWait(thread)


def _stream(text: str) -> int:
    return LEGACY_STREAM if text == "(nil)" else int(text, 16)


def _span(begin: str, size: str) -> tuple[Span, ...]:
    if begin == "(nil)" or not int(size):
        return ()
    return (Span(int(begin, 16), int(begin, 16) + int(size)),)


def _without(whole: tuple[Span, ...], part: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return what is left of a span: NCCL's all-gather in place does not write the rank's own part."""
    if not (whole and part) or not whole[0].begin <= part[0].begin <= part[0].end <= whole[0].end:
        return whole
    sides = Span(whole[0].begin, part[0].begin), Span(part[0].end, whole[0].end)
    return tuple(side for side in sides if side.begin < side.end)


def _spans(text: str) -> tuple[Span, ...]:
    """Read ``begin:size`` in hexadecimal and decimal, by commas."""
    parts = [part.split(":") for part in text.split(",") if part]
    return tuple(span for begin, size in parts for span in _span(begin, size))
