"""The table of schedules by name, from which the lists of all ranks are made.

A new schedule is one file in `raymega.schedule.schedules` and one line here. It owns the rules for
a legal request; `raymega.schedule.checker` proves that a schedule's lists are correct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from raymega.errors import Fault, PlanError, raise_faults
from raymega.schedule.instructions import Schedule
from raymega.schedule.order import Sizes
from raymega.schedule.schedules.dual_pipe_v import dualpipe_v
from raymega.schedule.schedules.gpipe import forward_only, gpipe
from raymega.schedule.schedules.interleaved import interleaved
from raymega.schedule.schedules.one_f_one_b import one_f_one_b
from raymega.schedule.schedules.zero_bubble import zb_h1, zb_h2
from raymega.schedule.schedules.zero_bubble_auto import zb_auto
from raymega.schedule.schedules.zero_bubble_v import zb_v
from raymega.schedule.stage_placement import Placement, Program
from raymega.schedule.transfers import make_program

MANY = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleKind:
    """A schedule: a pure function from sizes to the work of every rank, and its stage placement.

    Attributes:
        make: Function that returns one list per rank, without transfers.
        least_chunks: Smallest legal number of chunks per rank.
        most_chunks: Largest legal number of chunks per rank.
        is_vee: True if odd chunks run from the last rank to the first.
        reads: Optional fields of the job's schedule section that this schedule reads, each with the
            smallest number of chunks from which it does.
    """

    make: Callable[[Sizes], tuple[Schedule, ...]]
    least_chunks: int = 1
    most_chunks: int = MANY
    is_vee: bool = False
    reads: Mapping[str, int] = field(default_factory=dict)


IN_GROUPS = {"microbatch_group_size_per_vp_stage": 2}
BY_MEMORY = {"max_in_flight_microbatches": 1, "wgrad_activation_fraction": 1}
SCHEDULES: dict[str, ScheduleKind] = {
    "1f1b": ScheduleKind(make=one_f_one_b, reads=IN_GROUPS),
    "gpipe": ScheduleKind(make=gpipe),
    "interleaved": ScheduleKind(make=interleaved, least_chunks=2, reads=IN_GROUPS),
    "zb_h1": ScheduleKind(make=zb_h1, most_chunks=1),
    "zb_h2": ScheduleKind(make=zb_h2, most_chunks=1),
    "zb_v": ScheduleKind(make=zb_v, least_chunks=2, most_chunks=2, is_vee=True),
    "zb_auto": ScheduleKind(make=zb_auto, most_chunks=1, reads=BY_MEMORY),
    "dualpipe_v": ScheduleKind(make=dualpipe_v, least_chunks=2, most_chunks=2, is_vee=True),
}


MOST_PASSES = 200_000
"""Most passes of micro-batches through stages in a step, which a schedule lists one by one."""


def make_schedule(name: str, sizes: Sizes) -> Program:
    """Return the instructions of every rank for one optimizer step.

    Raises:
        PlanError: There is no such schedule, or these sizes are illegal for it.
    """
    raise_faults(PlanError, schedule_faults(name, sizes))
    return make_program(
        SCHEDULES[name].make(sizes),
        make_placement(name, pp=sizes.pp, chunks=sizes.chunks),
        # With fewer micro-batches than ranks, passes become adjacent that DualPipe-V separates.
        is_paired=sizes.is_paired and sizes.num_micro_batches >= sizes.pp,
    )


def make_forward_only(placement: Placement, num_micro_batches: int) -> Program:
    """Return the instructions of every rank for an evaluation."""
    return make_program(forward_only(placement, num_micro_batches), placement)


def make_placement(name: str, *, pp: int, chunks: int) -> Placement:
    """Return the assignment of stages to ranks under schedule ``name``."""
    return Placement(pp=pp, chunks=chunks, is_vee=SCHEDULES[name].is_vee)


def can_pair(name: str, *, pp: int, chunks: int) -> bool:
    """Return True if a forward and a backward may run together without stalling other ranks."""
    return name == "dualpipe_v" or (name == "1f1b" and pp == chunks == 1)


def schedule_faults(name: str, sizes: Sizes) -> Iterator[Fault]:
    """Yield a fault for each reason that the schedule cannot be made."""
    numbers = {
        "parallel.pp": sizes.pp,
        "num_micro_batches": sizes.num_micro_batches,
        "schedule.chunks": sizes.chunks,
    }
    for field_name, size in numbers.items():
        if size < 1:
            fact = f"{field_name}={size}"
            yield Fault(fact=fact, rule="it must be at least 1", remedy="use 1 or more")
    if name not in SCHEDULES:
        rule = f"it must be one of {', '.join(sorted(SCHEDULES))}"
        yield Fault(fact=f"schedule.name={name!r}", rule=rule, remedy="use one of these")
        return
    passes = sizes.pp * sizes.chunks * sizes.num_micro_batches
    if sizes.num_micro_batches > 1 and passes > MOST_PASSES:
        yield Fault(
            fact=f"{sizes.num_micro_batches:,} micro-batches through {sizes.pp * sizes.chunks:,} stages",
            rule=f"a schedule lists every pass, {MOST_PASSES:,} at most",
            remedy=f"use at most {max(1, MOST_PASSES // (sizes.pp * sizes.chunks)):,} micro-batches",
        )
    # Limits of this schedule.
    kind = SCHEDULES[name]
    if not kind.least_chunks <= sizes.chunks <= kind.most_chunks and sizes.chunks >= 1:
        nearest = min(max(sizes.chunks, kind.least_chunks), kind.most_chunks)
        yield Fault(
            fact=f"schedule.chunks={sizes.chunks}",
            rule=f"the schedule {name} works on {_chunk_range(kind)} a rank",
            remedy=f"set schedule.chunks={nearest}, or another schedule.name",
        )
    if not 0 < sizes.wgrad_activation_fraction <= 1:
        yield Fault(
            fact=f"schedule.wgrad_activation_fraction={sizes.wgrad_activation_fraction:g}",
            rule="it is a share of a micro-batch's activations, above 0 and at most 1",
            remedy="use 1, which is safe",
        )
    if 0 < sizes.microbatch_group_size_per_vp_stage < sizes.pp:
        yield Fault(
            fact=f"schedule.microbatch_group_size_per_vp_stage={sizes.microbatch_group_size_per_vp_stage}",
            rule=f"a smaller group than parallel.pp={sizes.pp} makes ranks wait for each other",
            remedy=f"use {sizes.pp} or more, or pp",
        )


def unused_size_faults(
    name: str, *, chunks: int, given: Mapping[str, int | float | str]
) -> list[Fault]:
    """Return a fault for each field of ``given`` that schedule ``name`` does not read."""
    reads = SCHEDULES[name].reads
    return [
        Fault(
            fact=f"schedule.{setting}={value}",
            rule=f"only {_readers(setting)} reads it; this is {name}, schedule.chunks={chunks}",
            remedy="remove it, or choose such a schedule",
        )
        for setting, value in given.items()
        if chunks < reads.get(setting, MANY)
    ]


def _readers(setting: str) -> str:
    """Return the schedules that read a field, such as ``1f1b from 2 chunks on or zb_auto``."""
    least = {name: kind.reads[setting] for name, kind in SCHEDULES.items() if setting in kind.reads}
    return " or ".join(
        f"{name} from {chunks} chunks on" if chunks > SCHEDULES[name].least_chunks else name
        for name, chunks in least.items()
    )


def _chunk_range(kind: ScheduleKind) -> str:
    if kind.least_chunks == kind.most_chunks:
        return f"{kind.least_chunks} model chunk{'s' * (kind.least_chunks > 1)}"
    return f"{kind.least_chunks} or more model chunks"
