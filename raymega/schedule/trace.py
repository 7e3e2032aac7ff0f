"""Merges the recorded events of all ranks into one trace for Chrome or Perfetto.

It returns plain values that json can write; it opens no file and draws nothing. The format is
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from raymega.schedule.recording import Transfer
from raymega.schedule.timeline import (
    BETWEEN_CP,
    BETWEEN_EXPERTS,
    COLLECTIVES,
    IN_UPDATE,
    SUMS_AND_WEIGHTS,
    TRANSFERS,
    WAITS,
    EventTuple,
)

US_PER_S = 1e6
STEP, COLLECTIVE, CONTEXT, EXPERTS, UPDATE = 0, 1, 2, 3, 4
"""Process ids of the trace: the ranks' own sequence of work, and the concurrent collectives."""
BESIDE = {
    COLLECTIVE: (SUMS_AND_WEIGHTS, "gradients and weights"),
    CONTEXT: (BETWEEN_CP, "between context-parallel ranks"),
    EXPERTS: (BETWEEN_EXPERTS, "between experts"),
    UPDATE: (IN_UPDATE, "in the update"),
}


def merge_trace(
    rows: Mapping[int, Sequence[EventTuple]], transfers: Iterable[Transfer] = ()
) -> dict[str, object]:
    """Return the trace of one step: rows are ranks, spans are instructions, times in microseconds.

    Args:
        rows: Events by rank, in seconds since a start that all ranks share.
        transfers: Messages between these ranks; each becomes an arrow from its send to its receive.
    """
    # metadata events name the rows: ranks first, then their concurrent collectives
    names = [_row_name(STEP, rank, f"rank {rank}") for rank in sorted(rows)]
    names += [
        _row_name(process, rank, f"rank {rank}, {title}")
        for process, (kinds, title) in BESIDE.items()
        for rank in sorted(rows)
        if any(event[0] in kinds for event in rows[rank])
    ]
    spans = [_span(rank, event) for rank in sorted(rows) for event in rows[rank]]
    arrows = [end for index, transfer in enumerate(transfers) for end in _arrow(index, transfer)]
    return {"traceEvents": names + spans + arrows, "displayTimeUnit": "ms"}


def _row_name(process: int, rank: int, name: str) -> dict[str, object]:
    return {
        "ph": "M",
        "name": "thread_name",
        "pid": process,
        "tid": rank,
        "args": {"name": name},
    }


def _span(rank: int, event: EventTuple) -> dict[str, object]:
    name, micro_batch, chunk, start_s, end_s = event
    return {
        "ph": "X",
        "name": f"{name} {micro_batch}",
        "cat": name,
        "pid": next((pid for pid, (kinds, _) in BESIDE.items() if name in kinds), STEP),
        "tid": rank,
        "ts": start_s * US_PER_S,
        "dur": (end_s - start_s) * US_PER_S,
        "args": {_number_of(name): micro_batch, "chunk": chunk},
    }


def _arrow(index: int, transfer: Transfer) -> Iterator[dict[str, object]]:
    """Yield both ends of an arrow, each inside its span: on an edge it would not attach."""
    sent, received = transfer.sent, transfer.received
    left_s = (sent.start_s + sent.end_s) / 2
    earliest_s = min(max(left_s, received.start_s), received.end_s)
    for phase, rank, time_s in (
        ("s", transfer.sender, left_s),
        ("f", transfer.receiver, (earliest_s + received.end_s) / 2),
    ):
        yield {
            "ph": phase,
            "bp": "e",
            "id": index,
            "name": f"message {sent.micro_batch}",
            "cat": "message",
            "pid": STEP,
            "tid": rank,
            "ts": time_s * US_PER_S,
        }


def _number_of(name: str) -> str:
    if name not in COLLECTIVES | WAITS:
        return "micro_batch"
    return "transfer" if name.removeprefix("wait_") in TRANSFERS else "bucket"
