"""State in words how far a prediction can be trusted; every prediction is printed with it.

The figures are the bands of ``raymega.planner.calibration.error_band``.
"""

from __future__ import annotations

from raymega.config.schema import Job
from raymega.plan.hardware.catalog import Accelerator
from raymega.planner.calibration.error_band import TimeBand, band_of, format_of_job

_OF_A_CPU = (
    "Expect the order of layouts, not their seconds. `raymega doctor JOB.yaml --calibrate FILE.yaml` "
    "measures yours."
)


def expected_error(device: Accelerator, job: Job) -> str:
    """Return how far to trust a prediction for ``job`` on ``device``, in words."""
    band = band_of(job, device)
    if device.known_error:
        return device.known_error
    if band.is_measured:
        return (
            f"{in_words(band)}: so it was on published "
            f"runs of {band.basis}, whose sources the constants had not seen."
        )
    known = f"No constants were measured for {format_of_job(job)} products on {device.name}"
    if device.shared_cores:
        return f"{known}. {in_words(band)}. {_OF_A_CPU}"
    return f"{known}: they are those of a similar device. {in_words(band)}."


def in_words(band: TimeBand) -> str:
    """Return the range of a step's time around its prediction, in words."""
    return f"In 8 of 10 cases a step takes {1 - band.low:.0%} less to {band.high - 1:.0%} more than predicted"
