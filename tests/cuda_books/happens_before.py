"""Races between streams: two operations touch the same memory, one writes it, and nothing orders them.

A clock of each stream counts its operations (Lamport 1978, vector clocks as of Mattern 1988). An event carries the
clocks of its stream; who waits for it knows them. The host is one more clock, that each launch starts from. Only
threads that launch are the host: NCCL's watchdog and the writer of a checkpoint learn of events at moments that vary,
and the training thread does not hear of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.cuda_books.trace import HOST_STREAM, Access, Entry, HostWait, Record, Span, StreamWait

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


Touch = tuple[int, int, bool]
"""First byte, byte behind the last, and whether they are written."""


def find_races(entries: Iterable[Entry]) -> list[Race]:
    """Return each pair of conflicting operations that no event, stream or host wait orders."""
    clocks: Mapping[int, Clock] = defaultdict(Counter)
    # by stream: its operations, each with its tick and what it touched
    done: Mapping[int, list[tuple[int, Access, list[Touch]]]] = defaultdict(list)
    events: dict[str, Clock] = {}
    host = clocks[HOST_STREAM]
    races: list[Race] = []
    entries = list(entries)
    launching = {entry.thread for entry in entries if isinstance(entry, Access)}
    for entry in entries:
        match entry:
            case HostWait(thread=thread) if thread not in launching:
                continue
            case Access(stream=stream):
                # a launch comes after all that the host has done and waited for
                clocks[stream] |= host
                clocks[stream][stream] += 1
                touches = _touches(entry)
                races += _conflicts(entry, touches, clocks[stream], done)
                done[stream].append((clocks[stream][stream], entry, touches))
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


def _touches(access: Access) -> list[Touch]:
    return [
        (span.begin, span.end, is_write)
        for is_write, spans in ((False, access.reads), (True, access.writes))
        for span in spans
    ]


def _conflicts(
    access: Access,
    touches: list[Touch],
    known: Clock,
    done: Mapping[int, list[tuple[int, Access, list[Touch]]]],
) -> Iterator[Race]:
    """Yield the races of ``access`` with operations of other streams that its stream does not know to be over."""
    for stream, operations in done.items():
        if stream == access.stream:
            continue
        over = known[stream]
        for tick, earlier, theirs in reversed(operations):
            if tick <= over:
                break  # this one is over, and so is all before it on its stream
            for begin, end, is_write in theirs:
                for own_begin, own_end, own_writes in touches:
                    if (own_writes or is_write) and own_begin < end and begin < own_end:
                        span = Span(own_begin, own_end)
                        yield Race(_kind(own_writes, is_write), earlier, access, span)


def _kind(writes: bool, wrote: bool) -> str:
    if not wrote:
        return "write after read"
    return "write after write" if writes else "read after write"
