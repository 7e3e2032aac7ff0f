"""Whether a run under faults is the undisturbed run: its losses, and each sample once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raymega.chaos.driver_process import DriverOutput

LIMITS = {"float64": 1e-9, "float32": 1e-4}
"""Largest relative deviation of a loss on another grid than the undisturbed run's, by compute dtype."""
LOW_PRECISION_LIMIT = 5e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Two loss curves, and what their steps were trained on.

    Attributes:
        num_steps: How many steps there are to compare.
        num_equal: How many of their losses are equal bit for bit.
        largest: Largest relative deviation.
        at: Step of that.
        limit: What it may be where the grid was another.
        faults: What is wrong, one sentence each; none when it is the same run.
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
    """The steps that survived in ``tried`` against those of ``calm``.

    As long as the run had one grid, losses are equal to the bit; from the first step on another one
    they are so to rounding.
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
    """The steps of the history that survived: an attempt undoes those beyond the one it begins from."""
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
        is_same_grid = is_same_grid and ours[step]["grid"] == theirs[step]["grid"]
        allowed = 0.0 if is_same_grid else limit
        if not off[step] <= allowed:  # also when it is not a number
            wrong.append(f"the loss of step {step} is off by {off[step]:.3g}, at most {allowed:g}")
    return wrong[:3]


def _wrong_samples(
    ours: Mapping[int, Mapping[str, object]], theirs: Mapping[int, Mapping[str, object]]
) -> list[str]:
    """Steps without a gap, and after each as many samples and tokens as in the undisturbed run."""
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
