"""Comparison of a run under faults with the undisturbed one: losses, samples and tokens by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raymega.chaos.driver_process import DriverOutput

LIMITS = {"float64": 1e-9, "float32": 1e-4}
"""Maximum relative deviation of a loss, by compute dtype, where the grid differs from the undisturbed run's."""
LOW_PRECISION_LIMIT = 5e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Result of the comparison.

    Attributes:
        num_steps: Number of steps that both runs have.
        num_equal: Number of these whose losses are equal bit for bit.
        largest: Largest relative deviation of a loss.
        at: Step of the largest deviation.
        limit: Maximum relative deviation where the grid was another.
        faults: Differences, one sentence each; empty when the runs are the same.
    """

    num_steps: int
    num_equal: int
    largest: float
    at: int
    limit: float
    faults: Sequence[str]


def compare_runs(
    calm: Sequence[DriverOutput], tried: Sequence[DriverOutput], *, dtype: str
) -> RunComparison:
    """Compare the surviving steps of ``tried`` with those of ``calm``.

    Losses must be equal bit for bit until the grid first changes, and from then on within the limit.
    """
    limit = LIMITS.get(dtype, LOW_PRECISION_LIMIT)
    ours, theirs = surviving(tried), surviving(calm)
    common = sorted(ours.keys() & theirs.keys())
    off = {step: _deviation(ours[step]["loss"], theirs[step]["loss"]) for step in common}
    at = max(off, key=lambda step: off[step], default=0)
    return RunComparison(
        num_steps=len(common),
        num_equal=sum(value == 0 for value in off.values()),
        largest=off.get(at, 0.0),
        at=at,
        limit=limit,
        faults=[*_wrong_losses(ours, theirs, off, limit), *_wrong_samples(ours, theirs)],
    )


def surviving(output: Sequence[DriverOutput]) -> Mapping[int, Mapping[str, object]]:
    """Return the events of the surviving steps: an attempt drops those beyond the step it starts from."""
    steps: dict[int, Mapping[str, object]] = {}
    for each in output:
        if each.name == "attempt":
            begun = each.event["step"]
            steps = {step: event for step, event in steps.items() if step <= begun}
        if each.name == "step":
            steps[each.event["step"]] = each.event
    return steps


def _wrong_losses(
    ours: Mapping[int, Mapping[str, object]],
    theirs: Mapping[int, Mapping[str, object]],
    off: Mapping[int, float],
    limit: float,
) -> list[str]:
    wrong = []
    is_same_grid = True
    for step in sorted(off):
        # One step on another grid changes the rounding of all later ones.
        is_same_grid = is_same_grid and ours[step]["grid"] == theirs[step]["grid"]
        allowed = 0.0 if is_same_grid else limit
        if not off[step] <= allowed:  # also when it is NaN
            wrong.append(f"the loss of step {step} is off by {off[step]:.3g}, at most {allowed:g}")
    # The first differences tell the cause; the rest follow from them.
    return wrong[:3]


def _wrong_samples(
    ours: Mapping[int, Mapping[str, object]], theirs: Mapping[int, Mapping[str, object]]
) -> list[str]:
    """Return gaps in the steps, and steps whose sample or token counts differ from the undisturbed run's."""
    steps = sorted(ours)
    wrong = []
    if steps != list(range(1, len(steps) + 1)):
        wrong.append(f"steps {steps[0] if steps else 0} to {len(steps)} are not each there once")
    for step in steps:
        for what in ("samples", "tokens"):
            if step in theirs and ours[step][what] != theirs[step][what]:
                wrong.append(
                    f"after step {step} {ours[step][what]} {what} were seen instead of "
                    f"{theirs[step][what]}"
                )
    return wrong[:3]


def _deviation(ours: object, theirs: object) -> float:
    if ours == theirs:
        return 0.0
    if not isinstance(ours, float) or not isinstance(theirs, float):
        return float("nan")
    return abs(ours - theirs) / abs(theirs) if theirs else float("inf")
