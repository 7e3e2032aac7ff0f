"""Bad steps: NaN, Inf and spikes in loss or gradient norm, and the action that the job asks for.

The module is pure. It reads totals that are equal on all ranks, before any rank has changed a weight,
so all ranks decide alike. `train/step.py` runs the second pass, skips the step or ends the attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from statistics import median

from raymega.config.elastic import ElasticSection, OnTrouble
from raymega.train.state import TrainState


class BadStepAction(StrEnum):
    """Outcome of a bad step; the value is the text that metrics and events carry."""

    SECOND_PASS = "used the second pass"
    """The second pass had good numbers: the first one met a transient hardware fault."""
    KEEP = "kept"
    """The second pass had the same spike, so it comes from the data; the update is made."""
    SKIP = "left out"
    ROLL_BACK = "rolled back"
    STOP = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadNumbers:
    """Fault in a step's loss or gradient norm.

    Attributes:
        kind: ``nan`` (NaN or Inf) or ``spike``.
        fact: The number and the limit that it breaks, for people.
        policy: The job's ``elastic.on_nan`` or ``elastic.on_spike``.
    """

    kind: str
    fact: str
    policy: OnTrouble


def detect_bad_step(
    section: ElasticSection, state: TrainState, *, loss: float, grad_norm: float
) -> BadNumbers | None:
    """Return the fault in the numbers of the step that follows ``state``, or None."""
    # NaN and Inf first: neither compares with a median.
    if not (isfinite(loss) and isfinite(grad_norm)):
        fact = f"loss={loss!r}, gradient norm={grad_norm!r}"
        return BadNumbers(kind="nan", fact=fact, policy=section.on_nan)
    # Spikes: compare with the median of the last spike_window good steps.
    held_against = (
        ("loss", loss, section.spike_loss, state.losses),
        ("gradient norm", grad_norm, section.spike_grad_norm, state.grad_norms),
    )
    for name, value, ratio, before in held_against:
        # A ratio of 0 turns the check off; a short history has no reliable median.
        if not ratio or len(before) < section.spike_window:
            continue
        usual = median(before[-section.spike_window :])
        if value > ratio * usual:
            fact = (
                f"{name} {value:.4g} is {value / usual if usual else float('inf'):.3g} times the median "
                f"{usual:.4g} of the last {section.spike_window} steps"
            )
            return BadNumbers(kind="spike", fact=fact, policy=section.on_spike)
    return None


def decide(section: ElasticSection, state: TrainState, numbers: BadNumbers) -> BadStepAction:
    """Return the action for a step whose second pass is bad too, or that gets no second pass."""
    match numbers.policy:
        case "skip" if state.bad_steps < section.max_bad_steps:
            return BadStepAction.SKIP
        case "rollback":
            return BadStepAction.ROLL_BACK
        case "rerun" if numbers.kind == "spike":
            return BadStepAction.KEEP
    # All else: policy "stop", a NaN that a rerun repeats, and skip beyond elastic.max_bad_steps.
    return BadStepAction.STOP
