"""The stand-in's counters and trace as seen from the process that has it loaded, and what is counted from a trace."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

COUNTERS = (
    "launches",
    "syncs",
    "collectives",
    "mallocs",
    "pinned_bytes",
    "communicators",
    "used_bytes",
)
ATOMIC = re.compile(r"ReduceAdd|flash_bwd_dot_do_o_kernel<true")
"""Kernels that add by atomic operations; flash attention's first one clears what the others add to so."""
EXACT = re.compile(r"<true, (long|int), ")
"""Atomic kernels of integers, whose sum has the same bits in any order."""


class Books:
    """The stand-in's counters and trace, by way of the library that is loaded into this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.books_count.restype = ctypes.c_ulonglong

    def counts(self) -> dict[str, int]:
        """Return all counters since the process began."""
        return {name: int(self._library.books_count(n)) for n, name in enumerate(COUNTERS)}

    def note(self, text: str) -> None:
        """Write a line of the trace."""
        self._library.books_note(text.encode())

    @contextmanager
    def counting(self, trace: Path) -> Iterator[dict[str, int]]:
        """Trace what runs inside; the mapping has the counts of it when that is over."""
        # counters only grow, so a phase has the difference
        before, found = self.counts(), dict[str, int]()
        self._library.books_open(str(trace).encode())
        try:
            yield found
        finally:
            self._library.books_close()
            found.update({name: now - before[name] for name, now in self.counts().items()})


@dataclass(kw_only=True, slots=True)
class Traffic:
    """NCCL's part in a trace.

    Attributes:
        calls: Calls by kind of collective.
        num_bytes: Bytes by kind: of each call those of the larger buffer, sent or received.
        opened: Communicators that were made.
        used: Communicators that a call went over.
        closed: Communicators that were destroyed or aborted.
        early_receives: Receives that were queued before the first matrix product. On a GPU such a receive
            occupies multiprocessors until the peer sends, and the peer may be waiting for this rank. The
            receives of an exchange, each behind a send of the same call, are none.
    """

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    opened: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    early_receives: int = 0

    def figures(self) -> dict[str, int]:
        """Return calls and bytes of each kind under a name each."""
        return {
            f"{kind}_{what}": counts[kind]
            for kind in sorted(self.calls)
            for what, counts in (("calls", self.calls), ("bytes", self.num_bytes))
        }


def traffic_of(lines: Iterable[str]) -> Traffic:
    """Read what a trace's lines say of NCCL."""
    found, has_product, is_exchange = Traffic(), False, False
    for line in lines:
        _, _, kind, *fields = line.rstrip("\n").split("\t")
        match kind:
            case "nccl":
                _, what, _, sent, _, received, communicator, _ = fields
                found.calls[what] += 1
                found.num_bytes[what] += max(int(sent), int(received))
                found.used.add(communicator)
                # an exchange sends first, and its receive stands behind that
                is_early = what == "recv" and not (has_product or is_exchange)
                found.early_receives += is_early
                is_exchange = what == "send"
            case "gemm":
                has_product = True
            case "communicator":
                found.opened.add(fields[0])
            case "closed":
                found.closed.add(fields[0])
    return found


def atomic_sums(trace: Path) -> int:
    """Count the kernels of a trace whose sums of floats depend on the order in which threads arrive."""
    with trace.open() as lines:
        kernels = [line for line in lines if "\tkernel\t" in line]
    return sum(bool(ATOMIC.search(each)) and not EXACT.search(each) for each in kernels)
