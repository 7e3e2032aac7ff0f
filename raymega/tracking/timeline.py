"""A recorded pipeline step as numbers and as a trace file; it draws nothing.

Times come from the executors, already on one clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from raymega.tracking.sink import WorkEvent

_WORK = ("forward", "backward")


def measured_bubble(events: Mapping[int, tuple[WorkEvent, ...]]) -> float:
    """Idle time over busy time: (ranks * span - busy) / busy; 0 when nothing was done.

    Args:
        events: ``(name, micro_batch, chunk, start_s, end_s)`` by rank. Only forward and backward
            work is busy time; waiting for a neighbour is idle time.
    """
    work = [e for row in events.values() for e in row if e[0] in _WORK]
    busy_s = sum(end - start for *_, start, end in work)
    if busy_s <= 0:
        return 0.0
    span_s = max(e[4] for e in work) - min(e[3] for e in work)
    return (len(events) * span_s - busy_s) / busy_s


def write_trace(events: Mapping[int, tuple[WorkEvent, ...]], path: Path) -> None:
    """Write the step in Chrome's trace format, which Perfetto opens: one row a rank."""
    rows = [_row_name(rank) for rank in sorted(events)]
    spans = [_span(rank, event) for rank in sorted(events) for event in events[rank]]
    trace = {"traceEvents": rows + spans, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(trace), encoding="utf-8")


def _row_name(rank: int) -> dict[str, object]:
    name = {"name": f"rank {rank}"}
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": name}


def _span(rank: int, event: WorkEvent) -> dict[str, object]:
    name, micro_batch, chunk, start_s, end_s = event
    return {
        "ph": "X",
        "name": f"{name} {micro_batch}",
        "cat": name,
        "pid": 0,
        "tid": rank,
        "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6,
        "args": {"micro_batch": micro_batch, "chunk": chunk},
    }
