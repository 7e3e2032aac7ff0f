"""Races between streams, and with the host: two touch the same memory, one writes it, and nothing orders them.

A clock of each stream counts its operations (Lamport 1978, vector clocks as of Mattern 1988). An event carries the
clocks of its stream; who waits for it knows them. The host is one more clock, that each launch starts from.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.cuda_books.trace import HOST, Access, Entry, HostWait, Record, Span, StreamWait

Clock = Counter[int]


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations that nothing orders.

    Attributes:
        kind: "write after read", "read after write" or "write after write".
        first: the operation that was launched first.
        second: the operation launched later, which may run before or beside it.
        span: bytes that both touch.
    """

    kind: str
    first: Access
    second: Access
    span: Span

    def __str__(self) -> str:
        """Return both operations with their lines in the trace."""
        a, b = self.first, self.second
        return (
            f"{self.kind}: {b.what} on stream {b.stream:x} (line {b.number}) and {a.what} on stream {a.stream:x} "
            f"(line {a.number}) share {self.span.end - self.span.begin} bytes at {self.span.begin:x}"
        )


@dataclass(frozen=True, slots=True)
class _Touch:
    """A span that an operation touched, at the tick of its stream."""

    tick: int
    span: Span
    is_write: bool
    access: Access


def find_races(entries: Iterable[Entry]) -> list[Race]:
    """Return each pair of conflicting operations that no event, stream or host wait orders."""
    clocks: Mapping[int, Clock] = defaultdict(Counter)
    touched: Mapping[int, list[_Touch]] = defaultdict(list)
    events: dict[str, Clock] = {}
    host: Clock = Counter()
    races: list[Race] = []
    for entry in entries:
        match entry:
            case Access(stream=stream):
                # a launch comes after all that the host has waited for, and all that it did
                clock = host if stream == HOST else clocks[stream]
                clock |= host
                clock[stream] += 1
                races += _conflicts(entry, clock, touched)
                touched[stream].extend(_touches(entry, clock[stream]))
            case Record(stream, event):
                clocks[stream] |= host
                events[event] = Counter(clocks[stream])
            case StreamWait(stream, event):
                # waiting for an event that was never recorded orders nothing
                clocks[stream] |= events.get(event, Counter())
            case HostWait(stream=None, event=""):
                for clock in clocks.values():
                    host |= clock
            case HostWait(stream=None, event=event):
                host |= events.get(event, Counter())
            case HostWait(stream=stream):
                host |= clocks[stream]
    return races


def _touches(access: Access, tick: int) -> Iterator[_Touch]:
    for is_write, spans in ((False, access.reads), (True, access.writes)):
        for span in spans:
            yield _Touch(tick, span, is_write, access)


def _conflicts(access: Access, known: Clock, touched: Mapping[int, list[_Touch]]) -> Iterator[Race]:
    """Yield the races of ``access`` with operations of other streams that its stream does not know to be over."""
    for stream, touches in touched.items():
        if stream == access.stream:
            continue
        for earlier in reversed(touches):
            if earlier.tick <= known[stream]:
                break  # this one is over, and so is all before it on its stream
            for own in _touches(access, 0):
                if (own.is_write or earlier.is_write) and own.span.meets(earlier.span):
                    yield Race(_kind(own, earlier), earlier.access, access, own.span)


def _kind(own: _Touch, earlier: _Touch) -> str:
    if not earlier.is_write:
        return "write after read"
    return "write after write" if own.is_write else "read after write"
