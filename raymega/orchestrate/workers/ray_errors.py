"""What Ray's errors about a worker mean, as reports and sentences. It calls no worker itself."""

from __future__ import annotations

import re

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raymega.messages import WorkerFailed

FETCH_TIMEOUT_S = 30.0
MAX_CAUSE_LENGTH = 300


def is_true(ref: ray.ObjectRef[bool]) -> bool:
    """The answer; a death or an error is a no."""
    try:
        return bool(ray.get(ref, timeout=FETCH_TIMEOUT_S))
    except (RayActorError, RayTaskError, GetTimeoutError):
        return False


def broken_call(rank: int, error: Exception) -> WorkerFailed:
    """An error outside the training thread: the driver's own calls into a living worker."""
    cause = getattr(error, "cause", None) or error
    return WorkerFailed(
        rank=rank,
        step=0,
        error=type(cause).__name__,
        message=str(cause),
        traceback=str(error),
        is_secondary=False,
        exit_code=getattr(cause, "exit_code", 1),
    )


def death_cause(error: RayActorError) -> str:
    """What Ray knows of a death, without ids before it and general advice behind it."""
    text = " ".join(str(error).split())
    *_, detail = re.split(r"Worker exit detail: | ip: \S+ ", text)
    return detail.partition(" Some common causes")[0].rstrip(".")[:MAX_CAUSE_LENGTH]
