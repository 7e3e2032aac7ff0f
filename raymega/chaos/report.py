"""The report of a drill as plain values: what `raymega chaos --json` prints, and a file beside the runs."""

from __future__ import annotations

from dataclasses import asdict

from raymega.chaos.experiment import Verdict
from raymega.chaos.time_accounting import Incident


def verdict_object(verdict: Verdict, *, seed: int) -> dict[str, object]:
    """The report as plain values."""
    compared = asdict(verdict.comparison)
    return {
        "event": "verdict",
        "passed": not verdict.faults,
        "faults": [*verdict.faults],
        "seed": seed,
        "code": verdict.code,
        "incidents": [_incident_object(each) for each in verdict.incidents],
        "goodput": verdict.sheet.goodput,
        "wall_s": verdict.sheet.wall_s,
        "seconds_by_cause": dict(verdict.sheet.by_cause),
        "loss": {
            key: compared[key] for key in ("num_steps", "num_equal", "largest", "at", "limit")
        },
        "leftovers": [*verdict.leftovers],
        "memory": [asdict(each) for each in verdict.memory],
    }


def _incident_object(each: Incident) -> dict[str, object]:
    injected = each.injected
    return {
        "kind": injected.fault.kind,
        "phase": injected.fault.phase,
        "rank": injected.rank,
        "step": injected.step,
        "detection_s": _known(each.detection_s),
        "recovery_s": _known(each.recovery_s),
        "lost_steps": each.lost_steps,
        "source": each.source,
        "grid_before": dict(each.grid_before),
        "grid_after": dict(each.grid_after),
        "cause": each.cause,
    }


def _known(seconds: float) -> float | None:
    return seconds if seconds >= 0 else None
