"""Steps whose numbers are no good: what counts as such, and what the job wants done about one.

Pure: it reads totals that all ranks share, before any of them has changed a weight, so all decide
alike. To do a step again, to skip it and to end it are train.step's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from statistics import median

from raymega.config.elastic import ElasticSection, OnTrouble
from raymega.train.state import TrainState


class BadStepAction(StrEnum):
    """What becomes of a bad step."""

    SECOND_PASS = "used the second pass"
    """It was fine: what went wrong was a passing fault of a machine, and left nothing behind."""
    KEEP = "kept"
    """It came again, and is what the data give."""
    SKIP = "left out"
    ROLL_BACK = "rolled back"
    STOP = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadNumbers:
    """Why a step's numbers are not taken as they are.

    Attributes:
        kind: ``nan`` or ``spike``.
        fact: The number and what it is held against.
        policy: The job's wish for this kind.
    """

    kind: str
    fact: str
    policy: OnTrouble


def detect_bad_step(
    section: ElasticSection, state: TrainState, *, loss: float, grad_norm: float
) -> BadNumbers | None:
    """What is wrong with a step after ``state``; None when nothing is."""
    if not (isfinite(loss) and isfinite(grad_norm)):
        fact = f"loss={loss!r}, gradient norm={grad_norm!r}"
        return BadNumbers(kind="nan", fact=fact, policy=section.on_nan)
    held_against = (
        ("loss", loss, section.spike_loss, state.losses),
        ("gradient norm", grad_norm, section.spike_grad_norm, state.grad_norms),
    )
    for name, value, ratio, before in held_against:
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
    """What becomes of a step whose second pass has bad ``numbers`` too, or that gets none."""
    match numbers.policy:
        case "skip" if state.bad_steps < section.max_bad_steps:
            return BadStepAction.SKIP
        case "rollback":
            return BadStepAction.ROLL_BACK
        case "rerun" if numbers.kind == "spike":
            return BadStepAction.KEEP
    return BadStepAction.STOP
