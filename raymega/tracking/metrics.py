"""Which metrics each event carries, so that every sink reads all events alike.

It owns the map from events to names; the names' meaning is tracking.names'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raymega.schedule.instructions import COMPUTE, Op
from raymega.schedule.timeline import (
    BETWEEN_CP,
    BETWEEN_EXPERTS,
    COLLECTIVES,
    IN_UPDATE,
    WAITS,
    bubble,
    overlap,
)
from raymega.tracking.sink import (
    AttemptStarted,
    CheckpointCommitted,
    EvaluationFinished,
    MemoryReady,
    Recovered,
    RunEvent,
    RunFinished,
    RunStarted,
    SaveUnderWay,
    StepFinished,
    TimelineReady,
    WorkersStarted,
    WorkEvent,
)


def metrics_of(event: RunEvent) -> Mapping[str, float]:
    """The event's metrics by name; empty when it carries none. All are of the event's step."""
    match event:
        case StepFinished() | EvaluationFinished():
            return event.metrics
        case AttemptStarted():
            return {"run/attempt": event.attempt}
        case CheckpointCommitted():
            return {
                "checkpoint/stall_s": event.stall_s,
                "checkpoint/save_s": event.save_s,
                "checkpoint/bytes": event.num_bytes,
                "checkpoint/written_share": 1.0,
            }
        case SaveUnderWay():
            return {"checkpoint/written_share": event.written_bytes / max(1, event.num_bytes)}
        case Recovered():
            return {
                "run/detection_s": event.detection_s,
                "run/recovery_s": event.recovery_s,
                "run/lost_steps": event.lost_steps,
            }
        case TimelineReady():
            return _timeline_metrics(event)
        case MemoryReady():
            peaks = [metrics.get("memory/peak_bytes", 0.0) for metrics in event.ranks.values()]
            ratio = {"worker/max_work_ratio": event.work_ratio} if event.work_ratio else {}
            return {"memory/max_peak_bytes": max(peaks)} | ratio
        case RunFinished():
            return {"run/goodput": event.goodput, "run/wall_s": event.wall_s}
        case _:
            return {}


def standing_metrics_of(event: RunEvent) -> Mapping[str, float]:
    """Where the run stands after the event: what a sink without a step axis shows beside."""
    match event:
        case RunStarted():
            return {
                "run/step": event.step,
                "run/total_steps": event.total_steps,
                "checkpoint/step": event.step,
                "checkpoint/every_steps": _checkpoint_every(event.job),
            }
        case WorkersStarted():
            return {"run/world_size": len(event.pids)}
        case AttemptStarted() | StepFinished():
            return {"run/step": event.step}
        case CheckpointCommitted():
            return {"checkpoint/step": event.step}
        case _:
            return {}


def rank_metrics_of(event: RunEvent) -> Mapping[int, Mapping[str, float]]:
    """Metrics that each rank has of its own, by rank."""
    match event:
        case TimelineReady():
            return {rank: _parts(row) for rank, row in event.events.items()}
        case MemoryReady():
            return event.ranks
        case _:
            return {}


def _parts(row: Sequence[WorkEvent]) -> dict[str, float]:
    parts = dict.fromkeys(("worker/forward_s", "worker/backward_s", "worker/transfer_s"), 0.0)
    for name, _micro_batch, _chunk, start_s, end_s in row:
        if name not in COLLECTIVES | WAITS:
            parts[_part(name)] += end_s - start_s
    return parts


def _timeline_metrics(event: TimelineReady) -> dict[str, float]:
    rows = event.events.values()
    metrics = {
        "run/bubble": bubble(rows).ratio,
        "run/simulated_bubble": event.simulated_bubble,
    }
    hidden = overlap(rows)
    if hidden is not None:
        metrics |= {"comm/exposed_s": hidden.exposed_s, "comm/hidden_share": hidden.hidden_share}
    for who, names in (("cp", BETWEEN_CP), ("experts", BETWEEN_EXPERTS)):
        travel = overlap(rows, names)
        if travel is not None:
            metrics |= {
                f"comm/{who}_exposed_s": travel.exposed_s,
                f"comm/{who}_hidden_share": travel.hidden_share,
            }
    in_update = overlap(rows, IN_UPDATE)
    if in_update is not None:  # nothing hides it
        metrics["comm/update_exposed_s"] = in_update.exposed_s
    return metrics


def _part(op: str) -> str:
    if op not in COMPUTE:
        return "worker/transfer_s"
    return "worker/forward_s" if op == Op.FORWARD else "worker/backward_s"


def _checkpoint_every(job: Mapping[str, object]) -> float:
    section = job.get("checkpoint")
    every = section.get("every") if isinstance(section, Mapping) else None
    return every if isinstance(every, int) else 0
