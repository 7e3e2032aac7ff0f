"""Replays the trace of a step with the seconds of each operation, and says what the device spends them on.

Streams run in order and wait for events as the trace says; the host launches one operation every few
microseconds, and waits where it waited. So what overlaps costs nothing, and what does not is seen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.cuda_books.roofline.rates import (
    HOST_BYTES_PER_S,
    LAUNCH_S,
    MEMORY_BYTES_PER_S,
    collective_s,
    operation_s,
)

LAUNCHES, NOTHING = "launches", "nothing"
LAUNCHED = ("kernel", "gemm", "memset")


@dataclass(slots=True)
class Operation:
    """An operation on a stream; a collective may be several calls of NCCL.

    Attributes:
        stream: Name of the stream.
        phase: Part of the step.
        kind: Part of the time that it counts as.
        seconds: Seconds on the device.
        num_bytes: Bytes of memory, or of a message.
        name: Name of what was launched.
    """

    stream: str
    phase: str
    kind: str = "other"
    seconds: float = 0.0
    num_bytes: float = 0.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """A ``record`` or ``wait`` of a stream, or a ``host`` wait for a stream, an event, or everything."""

    kind: str
    stream: str = ""
    event: str = ""


Entry = Operation | Order


def read_costs(lines: Iterable[str], *, tp: int) -> list[Entry]:
    """Return the operations of a trace with their seconds, and what orders them."""
    return list(_Reader(tp).read(lines))


@dataclass(slots=True)
class _Reader:
    """State of reading: launches without a note, and the group of the collective that comes, by thread."""

    tp: int
    phase: str = "update"
    launched: defaultdict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    groups: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    sent: dict[str, Operation] = field(default_factory=dict)
    launching: set[str] = field(default_factory=set)

    def read(self, lines: Iterable[str]) -> Iterator[Entry]:
        for line in lines:
            _, thread, kind, *fields = line.rstrip("\n").split("\t")
            match kind:
                case "kernel" | "gemm" | "memset":
                    made = Operation(fields[0], self.phase, name=fields[-1])
                    self.launched[thread].append(made)
                    self.launching.add(thread)
                    yield made
                case "copy":
                    yield self._copy(fields)
                case "nccl":
                    yield from self._collective(thread, fields)
                case "note":
                    self._note(thread, fields[0].split("|"))
                case "record" | "wait":
                    yield Order(kind, *fields[:2])
                case "sync" if thread in self.launching:
                    yield _host_wait(fields)

    def _copy(self, fields: list[str]) -> Operation:
        stream, way, size = fields[:3]
        rate = MEMORY_BYTES_PER_S / 2 if way == "d2d" else HOST_BYTES_PER_S
        kind = "element-wise" if way == "d2d" else "copies"
        return Operation(stream, self.phase, kind, int(size) / rate, int(size), f"copy {way}")

    def _collective(self, thread: str, fields: list[str]) -> Iterator[Operation]:
        """Yield a collective at its first call; further calls of it, to other peers, add their bytes."""
        stream, what, _, sent, _, received, _, size = fields
        name, ranks, per_node = self.groups.get(thread, ("world", int(size), 1))
        known = self.sent.get(thread)
        # an all-to-all is a send and a receive for each peer; its bytes are known at the last
        is_exchange = what in ("send", "recv") and not name.startswith("pp")
        if is_exchange and known is not None:
            known.num_bytes += int(sent)
        else:
            known = Operation(stream, self.phase, f"messages {name}", 0.0, 0.0, what)
            known.num_bytes = int(sent) if is_exchange else max(int(sent), int(received))
            self.sent[thread] = known
            yield known
        known.seconds = collective_s(
            "exchange" if is_exchange else what, known.num_bytes, ranks=ranks, per_node=per_node
        )

    def _note(self, thread: str, fields: list[str]) -> None:
        match fields:
            case ["phase", name]:
                self.phase = name
            case ["group", name, ranks, per_node]:
                self.groups[thread] = name, int(ranks), int(per_node)
                self.sent.pop(thread, None)
            case ["cost", kind, name, num_bytes, flops]:
                # a note follows its launches: they share the seconds of the operation equally
                launched = self.launched.pop(thread, [])
                seconds = operation_s(kind, float(num_bytes), float(flops), tp=self.tp)
                for each in launched:
                    each.kind = _part(kind, each.phase)
                    each.seconds = seconds / len(launched)
                    each.num_bytes = float(num_bytes) / len(launched)
                    each.name = name


def _part(kind: str, phase: str) -> str:
    """Return the part of the step's time that an operation's kind counts as."""
    if kind.endswith("product"):
        return "products"
    if kind.startswith("attention"):
        return "attention"
    return kind if phase == "passes" else "update"


def _host_wait(fields: list[str]) -> Order:
    match fields:
        case ["stream", stream]:
            return Order("host", stream=stream)
        case ["event", event]:
            return Order("host", event=event)
    return Order("host")


def replay(entries: Iterable[Entry]) -> Counter[str]:
    """Return the seconds of a step by part; the parts add up to its length.

    Each second belongs to what the stream of the products does, or to what it waits for: messages,
    another stream's operations, or the host's launches.
    """
    # state: the host's time, and of each stream when it is ready, what it did last, and what it waits for
    entries = list(entries)
    main = _main_stream(entries)
    parts: Counter[str] = Counter()
    host = 0.0
    ready: defaultdict[str, float] = defaultdict(float)
    last: defaultdict[str, str] = defaultdict(lambda: NOTHING)
    events: dict[str, tuple[float, str]] = {}
    waits: dict[str, tuple[float, str]] = {}
    for entry in entries:
        match entry:
            case Operation():
                # an operation begins when the host has launched it, its stream is free, and its waits are over
                host += LAUNCH_S
                until, reason = waits.pop(entry.stream, (0.0, NOTHING))
                begin = max(ready[entry.stream], host, until)
                if entry.stream == main:
                    _count_gap(parts, ready[main], begin, until, reason)
                    parts[entry.kind] += entry.seconds
                ready[entry.stream] = begin + entry.seconds
                last[entry.stream] = entry.kind
            case Order("record", stream, event):
                # an event holds the time of what was launched before it, and that thing's kind as the reason
                until, reason = waits.get(stream, (0.0, NOTHING))
                events[event] = max((ready[stream], last[stream]), (until, reason))
            case Order("wait", stream, event) if event in events:
                waits[stream] = max(waits.get(stream, (0.0, NOTHING)), events[event])
            # the host waits for the device, for a stream, for an event
            case Order("host", "", ""):
                host = max(host, *ready.values(), 0.0)
            case Order("host", stream, ""):
                host = max(host, ready[stream], waits.get(stream, (0.0, NOTHING))[0])
            case Order("host", _, event) if event in events:
                host = max(host, events[event][0])
    # the end: what other streams still do, or the host
    latest = max(ready, key=ready.__getitem__, default=main)
    end = max(host, ready[latest])
    _count_gap(parts, ready[main], end, ready[latest], last[latest])
    return parts


def _count_gap(parts: Counter[str], begin: float, end: float, until: float, reason: str) -> None:
    """Count an idle time of the main stream: up to ``until`` for ``reason``, the rest for the host."""
    waited = min(max(until - begin, 0.0), end - begin)
    parts[reason] += waited
    parts[LAUNCHES] += end - begin - waited


def _main_stream(entries: Iterable[Entry]) -> str:
    counts = Counter(e.stream for e in entries if isinstance(e, Operation) and e.kind == "products")
    return counts.most_common(1)[0][0]


def totals_of(entries: Iterable[Entry], *, phase: str) -> dict[str, float]:
    """Return launches and bytes by kind of a part of the step: products, and what is element-wise."""
    found: Counter[str] = Counter()
    for entry in entries:
        if not isinstance(entry, Operation) or entry.phase != phase:
            continue
        if entry.kind.startswith("messages"):
            found["messages"] += 1
            found["message_bytes"] += entry.num_bytes
        elif entry.kind != "copies":
            found["launches"] += 1
            if entry.kind == "element-wise":
                found["element_bytes"] += entry.num_bytes
    return dict(found)
