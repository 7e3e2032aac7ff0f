"""Lines of a trace as values: what a rank launched, copied, sent, waited for and touched, in the host's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LEGACY_STREAM = 0
"""CUDA's default stream, which a trace writes as (nil)."""
HOST = -1
"""The host's own reads and writes of pinned memory, in place of a stream."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of memory: ``begin`` up to, not including, ``end``."""

    begin: int
    end: int

    def meets(self, other: Span) -> bool:
        """Return whether the two have a byte in common."""
        return self.begin < other.end and other.begin < self.end


@dataclass(frozen=True, slots=True)
class Access:
    """An operation on a stream, with the memory that it reads and writes."""

    number: int
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

    stream: int | None = None
    event: str = ""
    is_blocking: bool = True


Entry = Access | Record | StreamWait | HostWait


def read_trace(lines: Iterable[str]) -> Iterator[Entry]:
    """Yield what orders or touches memory; launches without a note of their memory are left out."""
    for line in lines:
        number, kind, *fields = line.rstrip("\n").split("\t")
        match kind:
            case "note":
                stream, what, reads, writes = fields[0].split("|")
                yield Access(int(number), int(stream, 16), what, _spans(reads), _spans(writes))
            case "nccl":
                stream, what, source, sent, target, received, *_ = fields
                yield Access(int(number), _stream(stream), f"nccl {what}",
                             _span(source, sent), _span(target, received))  # fmt: skip
            case "copy":
                stream, way, size, _, source, target = fields
                yield Access(int(number), _stream(stream), f"copy {way}",
                             _span(source, size), _span(target, size))  # fmt: skip
            case "record":
                yield Record(_stream(fields[0]), fields[1])
            case "wait":
                yield StreamWait(_stream(fields[0]), fields[1])
            case "sync" | "query":
                yield _host_wait(fields, is_blocking=kind == "sync")


def _host_wait(fields: list[str], *, is_blocking: bool) -> HostWait:
    match fields:
        case ["stream", stream]:
            return HostWait(stream=_stream(stream))
        case ["event", event]:
            return HostWait(event=event, is_blocking=is_blocking)
    return HostWait()


def _stream(text: str) -> int:
    return LEGACY_STREAM if text == "(nil)" else int(text, 16)


def _span(begin: str, size: str) -> tuple[Span, ...]:
    if begin == "(nil)" or not int(size):
        return ()
    return (Span(int(begin, 16), int(begin, 16) + int(size)),)


def _spans(text: str) -> tuple[Span, ...]:
    """Read ``begin:size`` in hexadecimal and decimal, by commas."""
    parts = [part.split(":") for part in text.split(",") if part]
    return tuple(span for begin, size in parts for span in _span(begin, size))
