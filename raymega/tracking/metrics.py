"""Which metrics each event carries, so that every sink reads all events alike.

It owns the map from events to names; the names' meaning is tracking.names'.
"""

from __future__ import annotations

from collections.abc import Mapping

from raymega.schedule.timeline import bubble
from raymega.tracking.sink import (
    AttemptStarted,
    CheckpointCommitted,
    EvaluationFinished,
    Recovered,
    RunEvent,
    RunFinished,
    StepFinished,
    TimelineReady,
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
            }
        case Recovered():
            return {
                "run/detection_s": event.detection_s,
                "run/recovery_s": event.recovery_s,
                "run/lost_steps": event.lost_steps,
            }
        case TimelineReady():
            return {"run/bubble": bubble(event.events.values()).ratio}
        case RunFinished():
            return {"run/goodput": event.goodput, "run/wall_s": event.wall_s}
        case _:
            return {}
