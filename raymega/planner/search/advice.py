"""Say what binds a planned step, and which single change of the layout makes it faster.

A change is proposed only if the planner itself finds it legal, fitting and faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.config.grid_text import set_options
from raymega.plan.hardware.catalog import Accelerator
from raymega.planner.cost.step_time import StepTime
from raymega.planner.search.candidates import VARIED, Space, candidates
from raymega.planner.search.search import Judge, RankedLayout
from raymega.planner.search.selection import seconds

CHANGES = (
    ("schedule.micro_batch_size",),
    ("memory.recompute",),
    ("parallel.sharding", "parallel.data_parallel_shard_degree"),
    ("schedule.name", "schedule.chunks", "parallel.stages"),
    ("parallel.tp", "parallel.dp", "parallel.sequence_parallel"),
    ("parallel.pp", "parallel.dp", "parallel.stages"),
    ("parallel.cp", "parallel.dp", "parallel.cp_method"),
    ("parallel.ep", "parallel.etp"),
    ("parallel.sequence_parallel",),
)
"""Fields that one change sets together; all others keep their values."""
SIMULATED = 2
"""Number of the fastest layouts whose schedules are simulated."""
LEAST_GAIN = 0.01
"""Least share of a step that a change must save to be proposed."""
NETWORK, COMPUTE, MEMORY = "network", "compute", "memory"
RESOURCE_OF = {
    "compute": COMPUTE,
    "tensor parallel": NETWORK,
    "messages": NETWORK,
    "data parallel": NETWORK,
    "experts": NETWORK,
    "bubble": "pipeline",
    "optimizer": "memory bandwidth",
    "sharing": "cores",
    "straggler": "slowest device",
    "reference": COMPUTE,
}
"""Resource that a part of the step waits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Resource that binds a layout, and the change to try.

    Attributes:
        resource: Resource that binds: ``memory`` where the layout does not fit, or where only memory
            rules out a faster one; else the one that takes most of the step.
        part: Part of the step that takes most of this resource; empty for memory.
        share: Share of the step that the resource takes; for memory, of the device's memory.
        changes: Values to set, as ``--set`` takes them; empty where no single change is faster.
        step_s: Predicted seconds of a step with them.
        missed: Change that would be faster and needs more memory than there is, in words; or empty.
    """

    resource: str
    part: str
    share: float
    changes: tuple[str, ...] = ()
    step_s: float = 0.0
    missed: str = ""


def advise(found: RankedLayout, device: Accelerator) -> Advice:
    """Return what binds the layout ``found`` on ``device``, and the best single change of it."""
    fits = found.memory.total_bytes <= device.memory_bytes
    resource, part, share = _largest(found.time)
    best, missed = _best_change(found, device)
    present_s = found.time.total_s
    # A layout that does not fit is helped by one that does, whatever its speed.
    is_better = best is not None and (not fits or best.time.total_s < (1 - LEAST_GAIN) * present_s)
    told = _missed_text(missed, found, device) if fits and missed is not None else ""
    if not fits or (told and not is_better):
        resource, part, share = MEMORY, "", found.memory.total_bytes / device.memory_bytes
    return Advice(
        resource=resource,
        part=part,
        share=share,
        changes=best.overrides(found.plan.job) if best is not None and is_better else (),
        step_s=best.time.total_s if best is not None and is_better else 0.0,
        missed=told,
    )


def advice_line(advice: Advice, found: RankedLayout, device: Accelerator) -> str:
    """Return the advice as a line for people."""
    present_s = found.time.total_s
    if advice.resource == MEMORY and not advice.missed:
        binds = (
            f"memory binds: a rank needs {found.memory.total_bytes / 2**30:.1f} of "
            f"{device.memory_bytes / 2**30:.0f} GiB"
        )
    elif advice.resource == MEMORY:
        binds = f"memory binds: {advice.missed}"
    else:
        named = f", most of it {advice.part}" if advice.part != advice.resource else ""
        verb = "bind" if advice.resource == "cores" else "binds"
        binds = f"{advice.resource} {verb}: {advice.share:.0%} of the step{named}"
    if not advice.changes:
        return f"{binds}; no single change of the layout is faster, --top 5 searches all"
    change = set_options(advice.changes)
    return f"{binds}; try {change}: {seconds(advice.step_s)} a step ({advice.step_s / present_s - 1:+.1%})"


def _largest(time: StepTime) -> tuple[str, str, float]:
    """Return the resource that takes most of a step, its largest part, and its share."""
    by_resource: dict[str, float] = {}
    for name, value in time.parts.items():
        by_resource[RESOURCE_OF[name]] = by_resource.get(RESOURCE_OF[name], 0.0) + value
    most = max(by_resource, key=lambda name: by_resource[name])
    parts = {name: value for name, value in time.parts.items() if RESOURCE_OF[name] == most}
    return most, max(parts, key=lambda name: parts[name]), by_resource[most] / time.total_s


def _best_change(
    found: RankedLayout, device: Accelerator
) -> tuple[RankedLayout | None, RankedLayout | None]:
    """Return the fastest layout one change away that fits, and the fastest that memory alone rules out."""
    plan, judge, fit = found.plan, Judge(device, device.memory_bytes), []
    for free in CHANGES:
        fixed = frozenset(VARIED) - set(free)
        space = Space(job=plan.job, device=device, num_devices=plan.grid.world_size, fixed=fixed)
        verdicts = map(judge.verdict, candidates(space))
        fit += [verdict for verdict in verdicts if isinstance(verdict, RankedLayout)]
    # Closed forms rank; the few that are shown are simulated, which may change their order.
    few = [each.played(device) for each in sorted(fit, key=_total_s)[:SIMULATED]]
    missed = min(judge.missed, key=_total_s, default=None)
    return min(few, key=_total_s, default=None), missed and missed.played(device)


def _total_s(layout: RankedLayout) -> float:
    return layout.time.total_s


def _missed_text(missed: RankedLayout, found: RankedLayout, device: Accelerator) -> str:
    """Return what more memory would allow; empty where it is hardly faster."""
    faster = missed.time.total_s / found.time.total_s - 1
    if faster > -LEAST_GAIN:
        return ""
    change = " ".join(missed.overrides(found.plan.job))
    return (
        f"{change} would take {seconds(missed.time.total_s)} ({faster:+.1%}) and needs "
        f"{missed.memory.total_bytes / 2**30:.1f} of {device.memory_bytes / 2**30:.0f} GiB"
    )
