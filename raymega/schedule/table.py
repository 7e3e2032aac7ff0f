"""The table of schedules by name, and the lists of all stages at once.

A new schedule is one file and one line here. It says what is a legal request; whether a schedule
keeps its promises is checker's to prove.
"""

from __future__ import annotations

from typing import Protocol

from raymega.errors import Fault, PlanError, raise_faults
from raymega.schedule.gpipe import forward_only, gpipe
from raymega.schedule.instructions import Schedule
from raymega.schedule.one_f_one_b import one_f_one_b


class ScheduleFunction(Protocol):
    """A pure function from a place in the pipeline to the work done there in one step."""

    def __call__(
        self, *, pp: int, stage: int, num_micro_batches: int, chunks: int = 1
    ) -> Schedule: ...


SCHEDULES: dict[str, ScheduleFunction] = {"1f1b": one_f_one_b, "gpipe": gpipe}


def make_schedule(
    name: str, *, pp: int, num_micro_batches: int, chunks: int = 1
) -> tuple[Schedule, ...]:
    """The instructions of every stage for one optimizer step, by stage.

    Raises:
        PlanError: There is no such schedule, or it cannot have these numbers.
    """
    faults = _size_faults(pp=pp, num_micro_batches=num_micro_batches, chunks=chunks)
    if name not in SCHEDULES:
        faults.append(
            Fault(
                fact=f"schedule.name={name!r}",
                rule=f"it must be one of {', '.join(sorted(SCHEDULES))}",
                remedy="use one of these",
            )
        )
    raise_faults(PlanError, faults)
    make = SCHEDULES[name]
    return tuple(
        make(pp=pp, stage=stage, num_micro_batches=num_micro_batches, chunks=chunks)
        for stage in range(pp)
    )


def make_forward_only(*, pp: int, num_micro_batches: int) -> tuple[Schedule, ...]:
    """The instructions of every stage for an evaluation, by stage.

    Raises:
        PlanError: There cannot be these numbers.
    """
    raise_faults(PlanError, _size_faults(pp=pp, num_micro_batches=num_micro_batches, chunks=1))
    return tuple(
        forward_only(pp=pp, stage=stage, num_micro_batches=num_micro_batches) for stage in range(pp)
    )


def _size_faults(**sizes: int) -> list[Fault]:
    fields = {"pp": "parallel.pp", "chunks": "schedule.chunks"}
    return [
        Fault(
            fact=f"{fields.get(name, name)}={size}",
            rule="it must be at least 1",
            remedy="use 1 or more",
        )
        for name, size in sizes.items()
        if size < 1
    ]
