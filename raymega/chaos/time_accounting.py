"""Outcome of each fault, and wall time by cause, from the events of drivers and the times of faults."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raymega.chaos.chaos_run import InjectedFault
from raymega.chaos.driver_process import DriverOutput
from raymega.chaos.faults import KINDS

STARTING, STEPPING, BETWEEN, ENDING = "start", "steps that count", "between steps", "end"


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Outcome of an injected fault.

    Attributes:
        injected: Fault with its time, rank and step.
        detection_s: Seconds from the fault until the driver reported the lost attempt, or a new driver
            was started; -1 for a fault that ended no attempt.
        recovery_s: Seconds from the fault to the first new step; -1 when there was none.
        lost_steps: Number of completed steps that were recomputed.
        source: Source of the restored state: ``store``, ``memory`` or ``nothing``.
        grid_before: Degree of each axis before the fault.
        grid_after: Degree of each axis after the recovery.
        cause: Cause as reported by the driver.
    """

    injected: InjectedFault
    detection_s: float = -1.0
    recovery_s: float = -1.0
    lost_steps: int = 0
    source: str = ""
    grid_before: Mapping[str, int] = field(default_factory=dict)
    grid_after: Mapping[str, int] = field(default_factory=dict)
    cause: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBreakdown:
    """Wall time of a run in seconds by cause; the parts add up to ``wall_s``."""

    wall_s: float
    by_cause: Mapping[str, float]

    @property
    def goodput(self) -> float:
        """Return the share of wall time spent in surviving steps."""
        return self.by_cause[STEPPING] / self.wall_s if self.wall_s else 0.0


def incidents(
    output: Sequence[DriverOutput],
    injected_faults: Sequence[InjectedFault],
    begun_s: Sequence[float],
) -> list[Incident]:
    """Return the outcome of each injected fault, in order."""
    return [_incident(output, injected, begun_s) for injected in injected_faults]


def _incident(
    output: Sequence[DriverOutput], injected: InjectedFault, begun_s: Sequence[float]
) -> Incident:
    # events up to the fault and after it
    before = [each for each in output if each.at_s <= injected.at_s]
    after = [each for each in output if each.at_s > injected.at_s]
    grid = _grid(before)
    end = _end_of_attempt(after, injected, begun_s)
    if end is None:
        return Incident(injected=injected, grid_before=grid, grid_after=grid)
    # after the detection: the next attempt, and its first new step
    ended_s, cause = end
    later = [each for each in after if each.at_s >= ended_s]
    earlier = [each for each in output if each.name == "step" and each.at_s < ended_s]
    done = max((each.event["step"] for each in earlier), default=0)
    again = next((each for each in later if each.name == "attempt"), None)
    good = next((each for each in later if each.name == "step" and each.event["step"] > done), None)
    return Incident(
        injected=injected,
        detection_s=ended_s - injected.at_s,
        recovery_s=good.at_s - injected.at_s if good else -1.0,
        lost_steps=max(0, done - again.event["step"]) if again else 0,
        source=again.event["source"] if again else "",
        grid_before=grid,
        grid_after=_grid([each for each in output if good and each.at_s <= good.at_s]),
        cause=cause,
    )


def _end_of_attempt(
    after: Sequence[DriverOutput], injected: InjectedFault, begun_s: Sequence[float]
) -> tuple[float, str] | None:
    """Return when and as what the fault was detected: a lost attempt, a new one, or a new driver."""
    if KINDS[injected.fault.kind].family == "driver":
        # A killed driver reports nothing: the next start shows it.
        again = [at_s for at_s in begun_s if at_s > injected.at_s]
        return (again[0], "the driver was ended") if again else None
    for each in after:
        if each.name == "failure":
            return each.at_s, str(each.event["cause"])
        if each.name == "attempt" and KINDS[injected.fault.kind].ends_attempt:
            return each.at_s, str(each.event["reason"])
    return None


def _grid(output: Sequence[DriverOutput]) -> Mapping[str, int]:
    """Return the grid of the last attempt among the events; empty without one."""
    attempts = [each for each in output if each.name == "attempt"]
    return dict(attempts[-1].event["grid"]) if attempts else {}


def time_sheet(
    output: Sequence[DriverOutput], found: Sequence[Incident], *, begun_s: float, ended_s: float
) -> TimeBreakdown:
    """Return wall time by cause; where outages overlap, the time counts for the earlier fault."""
    # steps count as such even during an outage: a drained node still trains
    spans = _spans(found, ended_s)
    steps = _surviving_steps(output)
    by_cause: dict[str, float] = defaultdict(float)
    by_cause[STEPPING] = sum(seconds for _, seconds in steps)
    lost_s = 0.0
    for kind, from_s, to_s in spans:
        inside_s = sum(min(s, at - from_s) for at, s in steps if from_s < at <= to_s)
        by_cause[kind] += to_s - from_s - inside_s
        lost_s += to_s - from_s - inside_s
    # start and end, without outages in them
    first_s = steps[0][0] - steps[0][1] if steps else ended_s
    last_s = steps[-1][0] if steps else ended_s
    for name, span in ((STARTING, (begun_s, first_s)), (ENDING, (last_s, ended_s))):
        by_cause[name] = max(0.0, span[1] - span[0] - _overlap(span, spans))
    # the rest lies between steps
    wall_s = ended_s - begun_s
    named_s = by_cause[STEPPING] + lost_s + by_cause[STARTING] + by_cause[ENDING]
    by_cause[BETWEEN] = max(0.0, wall_s - named_s)
    return TimeBreakdown(wall_s=wall_s, by_cause=dict(by_cause))


def _spans(found: Sequence[Incident], ended_s: float) -> list[tuple[str, float, float]]:
    """Return the outages without overlap, as kind, start and end in seconds."""
    spans: list[tuple[str, float, float]] = []
    for each in found:
        if each.detection_s < 0:
            continue
        at_s = each.injected.at_s
        from_s = max(at_s, spans[-1][2]) if spans else at_s
        to_s = at_s + each.recovery_s if each.recovery_s >= 0 else ended_s
        if to_s > from_s:
            spans.append((each.injected.fault.kind, from_s, to_s))
    return spans


def _surviving_steps(output: Sequence[DriverOutput]) -> list[tuple[float, float]]:
    """Return the end time and the duration of each surviving step, in seconds."""
    last = {each.event["step"]: each for each in output if each.name == "step"}
    return [(last[step].at_s, last[step].event["step_time_s"]) for step in sorted(last)]


def _overlap(span: tuple[float, float], spans: Sequence[tuple[str, float, float]]) -> float:
    return sum(max(0.0, min(span[1], to) - max(span[0], since)) for _, since, to in spans)
