"""Metrics of a recorded step (timeline), by the names of `tracking/names.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from raymega.schedule.instructions import COMPUTE, Op
from raymega.schedule.timeline import (
    BETWEEN_CP,
    BETWEEN_EXPERTS,
    COLLECTIVES,
    IN_UPDATE,
    WAITS,
    EventTuple,
    bubble,
    overlap,
)


def timeline_metrics(
    rows: Collection[Sequence[EventTuple]], *, simulated_bubble: float
) -> dict[str, float]:
    """Return bubble, simulated bubble and overlap of communication with compute, over all ranks.

    Args:
        rows: Recorded events of each rank.
        simulated_bubble: Bubble that the schedule has with the same durations and free transfers.
    """
    metrics = {"run/bubble": bubble(rows).ratio, "run/simulated_bubble": simulated_bubble}
    # collectives of gradients and weights
    hidden = overlap(rows)
    if hidden is not None:
        metrics |= {"comm/exposed_s": hidden.exposed_s, "comm/hidden_share": hidden.hidden_share}
    # context-parallel transfers, expert dispatch and combine
    for who, names in (("cp", BETWEEN_CP), ("experts", BETWEEN_EXPERTS)):
        travel = overlap(rows, names)
        if travel is not None:
            metrics |= {
                f"comm/{who}_exposed_s": travel.exposed_s,
                f"comm/{who}_hidden_share": travel.hidden_share,
            }
    # communication of the optimizer update
    in_update = overlap(rows, IN_UPDATE)
    if in_update is not None:  # no compute runs beside it: no hidden share
        metrics["comm/update_exposed_s"] = in_update.exposed_s
    return metrics


def rank_timeline_metrics(row: Sequence[EventTuple]) -> dict[str, float]:
    """Return the seconds that one rank spent in forward, backward and transfers."""
    parts = dict.fromkeys(("worker/forward_s", "worker/backward_s", "worker/transfer_s"), 0.0)
    for name, _micro_batch, _chunk, start_s, end_s in row:
        if name not in COLLECTIVES | WAITS:
            parts[_part(name)] += end_s - start_s
    return parts


def _part(op: str) -> str:
    if op not in COMPUTE:
        return "worker/transfer_s"
    return "worker/forward_s" if op == Op.FORWARD else "worker/backward_s"
